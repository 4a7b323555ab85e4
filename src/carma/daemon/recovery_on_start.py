"""From the log to a running server: load, replay, then make the state agree with the living processes.

1. `replay` steps the stored events. Their commands are not carried out.
2. `reconcile` commits what happened while no daemon ran, then the GPUs (they may have changed), then gives the
   executor what is left to do. Only then may the core propose anything. The order matters: a GPU must not be taken for
   busy when its task has ended.
3. `skip_used_ids` keeps ids of lost tasks from being used again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from carma.core.machine import step
from carma.core.model.commands import EstimateTask, PreemptAttempt, SetPaused, StopAttempt
from carma.core.model.events import AttemptEnded, Durable, StopRequested, TaskPlaced
from carma.core.model.settings import Rules
from carma.core.model.status import Estimating, Running, Starting
from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, TaskId
from carma.core.ports import Archive, Loaded, PastRun, Store
from carma.core.scheduling.placement import Policy
from carma.core.state import State
from carma.daemon import found_attempts as finder
from carma.daemon.loop import Loop
from carma.daemon.shell import Shell
from carma.daemon.state_checkpoint import adopt
from carma.daemon.state_checkpoint import restore as restore_state
from carma.errors import StoreError
from carma.launch.attempt_files import AttemptFiles

log = logging.getLogger("carma.daemon")


class ReplayedLog:
    """The state as the log gives it, and facts of the log that the state does not hold."""

    def __init__(self, state: State, sequence: int) -> None:
        self.state = state
        self.sequence = sequence
        self.stops: dict[AttemptKey, StopRequested] = {}  # the first one for each attempt that is still active
        self.shared: set[AttemptKey] = set()  # active attempts that had a neighbour at any time
        self.runs: list[PastRun] = []  # of attempts that ended

    def follow(self, event: Durable) -> None:
        """Step one event of the log."""
        try:
            step(self.state, event)
        except Exception as error:
            raise StoreError(
                f"the log cannot be replayed: {type(event).__name__} at {event.at:.3f} does not fit the earlier events "
                f"({type(error).__name__}: {error})",
                "keep a copy of the database and report this; `carma up` with another CARMA_HOME starts empty",
            ) from error
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
                    self.stops.setdefault(self.state.active[task_id], event)
            case _:
                pass


def replay(loaded: Loaded, rules: Rules, policy: Policy) -> ReplayedLog:
    replayed = ReplayedLog(restore_state(rules, policy, loaded.checkpoint), loaded.sequence)
    for held in replayed.state.on_gpu.values():
        if len(held) > 1:
            replayed.shared.update(held)
    for event in loaded.events:
        replayed.follow(event)
    adopt(replayed.state)
    return replayed


def last_time(loaded: Loaded) -> float:
    """The newest time in the store, from which the clock continues."""
    times = [event.at for event in loaded.events[-100:]]
    if loaded.checkpoint is not None:
        times.append(loaded.checkpoint.at)
    return max(times, default=0.0)


async def reconcile(shell: Shell, loop: Loop, replayed: ReplayedLog) -> None:
    """The writer must be running. The core proposes nothing before this has ended."""
    executor = loop.executor
    executor.shared |= replayed.shared

    def remember() -> None:
        """The daemon may have been killed between the end of an attempt and this. Repeating it does no harm."""
        for run in replayed.runs:
            shell.archive.remember(run)

    executor.start_task(shell.in_store(remember), "remembering past runs")
    await _commit_outcomes(shell, loop)
    await loop.gpus_changed(await loop.find_gpus())
    for command, at in _left_to_do(shell, replayed):
        executor.execute(command, at)
    for task in list(shell.state.tasks.values()):
        if task.notices:
            executor.send_notices(task.id)
    shell.reconciled.set()
    executor.poll_now.set()


async def _commit_outcomes(shell: Shell, loop: Loop) -> None:
    """What happened while no daemon ran: attempts started, ended, or were never launched."""
    before = len(shell.state.active)
    idle = await loop.poll()
    adopted = sum(isinstance(shell.state.tasks[task].status, Running) for task in shell.state.active)
    if before:
        ended = before - len(shell.state.active)
        running = show_count(adopted, "running task")
        log.info("%s adopted, %d had ended meanwhile, %d to be started again", running, ended, len(idle))


def _left_to_do(
    shell: Shell, replayed: ReplayedLog
) -> Iterator[tuple[EstimateTask | StopAttempt | PreemptAttempt | SetPaused, float]]:
    """Commands that may not have been carried out, each with the time when it was decided."""
    now = shell.clock.now()
    for task in list(shell.state.tasks.values()):
        if isinstance(task.status, Running):
            yield SetPaused(task.key, task.paused is not None), now
        match task.status:
            case Estimating():
                yield EstimateTask(task.id), now
            case Starting(ending=ending) | Running(ending=ending) if ending is not None:
                stop = replayed.stops.get(task.key)
                if stop is None:
                    stop = StopRequested(now, task.id, ending, shell.state.rules.stopping.grace_of(task.spec))
                yield StopAttempt(task.key, stop.grace_s, stop.signal), stop.at
            case Running(preempting=asked) if asked is not None:  # the launcher knows whether it was asked
                yield PreemptAttempt(task.key, asked.signal, asked.at), asked.at
            case _:
                pass


def skip_used_ids(store: Store, archive: Archive, state: State, attempts: Path) -> None:
    """Never give an id again that has a directory already.

    A database that was lost, or restored from an older copy, does not know the tasks that ran after it. Their
    directories hold outcomes, which would be taken for those of new tasks with the same ids.
    """
    highest = max((key.task for key in AttemptFiles(attempts).attempts()), default=0)
    if highest == 0 or highest in state.tasks or archive.task(TaskId(highest)) is not None:
        return
    given = store.new_task_ids(1)
    if given <= highest:
        log.warning("task ids up to %d are skipped: %s has directories for them", highest, attempts)
        if highest > given:
            store.new_task_ids(highest - given)
