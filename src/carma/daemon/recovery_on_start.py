"""From the log back to a running server: load, replay, then agree with the living processes by emitting events.

The order matters. Outcomes come first, so that a GPU is not taken for busy when its task has ended; then the GPUs,
which may be others than before; and only then may the core propose anything.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from carma.core.machine import step
from carma.core.model.commands import EstimateTask, PreemptAttempt, StopAttempt
from carma.core.model.events import AttemptEnded, Durable, StopRequested, TaskPlaced
from carma.core.model.settings import Rules
from carma.core.model.status import Estimating, Running, Starting
from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, Record, TaskId
from carma.core.ports import Archive, Loaded, PastRun, Store
from carma.core.scheduling.placement import Policy
from carma.core.state import State, adopt
from carma.core.state import restore as restore_state
from carma.daemon import found_attempts as finder
from carma.daemon.executor import Hands
from carma.daemon.loop import Loop
from carma.daemon.shell import Shell
from carma.daemon.startup.home_directory import task_of
from carma.errors import StoreError

log = logging.getLogger("carma.daemon")


class Stop(Record, frozen=True):
    """A stop that was asked for and may not have been carried out."""

    at: float
    grace_s: float
    signal: int = 15


class Replayed:
    """The state as the log gives it, and what the log says about things that the state does not hold."""

    def __init__(self, state: State, sequence: int) -> None:
        self.state = state
        self.sequence = sequence
        self.stops: dict[AttemptKey, Stop] = {}
        self.shared: set[AttemptKey] = set()
        self.runs: list[PastRun] = []

    def follow(self, event: Durable) -> None:
        """One event of the log. Its commands are not carried out: what is left to do is found out afterwards."""
        try:
            step(self.state, event)
        except Exception as error:
            self._refuse(event, error)
        match event:
            case TaskPlaced():
                self.shared |= finder.neighbours(self.state, event)
            case AttemptEnded(key=key):
                run = finder.past_run(self.state, key, key in self.shared)
                self.shared.discard(key)
                self.stops.pop(key, None)
                if run is not None:
                    self.runs.append(run)
            case StopRequested(task=task_id):
                if task_id in self.state.active:
                    key = self.state.active[task_id]
                    self.stops.setdefault(key, Stop(event.at, event.grace_s, event.signal))
            case _:
                pass

    def _refuse(self, event: Durable, error: Exception) -> None:
        raise StoreError(
            f"the log cannot be followed: {type(event).__name__} at {event.at:.3f} does not fit what was before it "
            f"({type(error).__name__}: {error})",
            "keep a copy of the database and report this; `carma up` with another CARMA_HOME starts afresh",
        ) from error


def replay(loaded: Loaded, rules: Rules, policy: Policy) -> Replayed:
    replayed = Replayed(restore_state(rules, policy, loaded.checkpoint), loaded.sequence)
    for held in replayed.state.on_gpu.values():
        if len(held) > 1:
            replayed.shared.update(held)
    for event in loaded.events:
        replayed.follow(event)
    adopt(replayed.state)
    return replayed


def last_time(loaded: Loaded) -> float:
    """The time of the newest thing in the store; the clock goes on from there."""
    times = [event.at for event in loaded.events[-100:]]
    if loaded.checkpoint is not None:
        times.append(loaded.checkpoint.at)
    return max(times, default=0.0)


async def reconcile(shell: Shell, loop: Loop, replayed: Replayed) -> None:
    """Make the state agree with the world. The shell's writer must be running; nothing is proposed before the end."""
    hands = loop.hands
    loop.shared |= replayed.shared
    # The daemon may have died between an attempt's end and the note about it; a second note does no harm.
    hands.start(shell.in_store(lambda: _remember(shell.archive, replayed.runs)), "remembering past runs")
    await _outcomes(shell, loop, hands)
    await loop.gpus_changed(await loop.look_for_gpus())
    for command, at in _left_to_do(shell, replayed):
        hands.carry_out(command, at)
    shell.proposing = True
    loop.settled.set()
    hands.looking.set()


async def _outcomes(shell: Shell, loop: Loop, hands: Hands) -> None:
    """What happened while no daemon looked: started, ended, or never carried out."""
    keys = tuple(shell.state.active.values())
    found = await hands.with_launcher(lambda: hands.launcher.poll(keys))
    await shell.change(lambda state: finder.events_of(state, found, shell.clock.now()))
    idle = finder.never_launched(shell.state, found)
    await loop.settle_idle(idle)
    adopted = sum(isinstance(shell.state.tasks[task].status, Running) for task in shell.state.active)
    if keys:
        ended = len(keys) - len(shell.state.active)
        running = show_count(adopted, "running task")
        log.info("%s adopted, %d had ended meanwhile, %d to be started again", running, ended, len(idle))


Order = EstimateTask | StopAttempt | PreemptAttempt


def _left_to_do(shell: Shell, replayed: Replayed) -> Iterator[tuple[Order, float]]:
    for task in list(shell.state.tasks.values()):
        match task.status:
            case Estimating():
                yield EstimateTask(task.id), shell.clock.now()
            case Starting(ending=ending) | Running(ending=ending) if ending is not None:
                grace_s = shell.state.rules.stopping.grace_of(task.spec)
                stop = replayed.stops.get(task.key) or Stop(shell.clock.now(), grace_s)
                yield StopAttempt(task.key, stop.grace_s, stop.signal), stop.at
            case Running(preempting=asked) if asked is not None:  # the launcher knows whether it was told
                yield PreemptAttempt(task.key, asked.signal, asked.at), asked.at
            case _:
                pass


def _remember(archive: Archive, runs: Sequence[PastRun]) -> None:
    for run in runs:
        archive.remember(run)


def skip_used_ids(store: Store, archive: Archive, state: State, attempts: Path) -> None:
    """Never give an id again that has a directory already.

    A database that was lost, or put back from an older copy, does not know the tasks that ran after it; their
    directories hold outcomes that would be taken for those of new tasks with the same ids.
    """
    highest = max(_task_ids(attempts), default=0)
    if highest == 0 or highest in state.tasks or archive.task(TaskId(highest)) is not None:
        return
    given = store.new_task_ids(1)
    if given <= highest:
        log.warning("task ids up to %d are skipped: their directories are in %s already", highest, attempts)
        if highest > given:
            store.new_task_ids(highest - given)


def _task_ids(attempts: Path) -> Iterator[int]:
    for name in os.listdir(attempts):
        task = task_of(name)
        if task is not None:
            yield task
