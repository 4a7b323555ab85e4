"""Carries out the core's commands: estimate, launch, stop, warn, ask to save. Each can be repeated without harm.

Nothing here blocks the event loop and nothing here is remembered on disk: after a restart, restore.py finds out from
the state and the launcher what is still to be done, and gives it here again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar, assert_never

from msgspec.structs import replace

from carma.core.model.commands import Command, EstimateTask, LaunchAttempt, PreemptAttempt, StopAttempt, WarnAttempt
from carma.core.model.events import Durable, StopRequested, TaskEstimated, TaskFinished
from carma.core.model.outcome import Preempted
from carma.core.model.status import Estimating, Running, Starting
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, Estimate, Frameworks, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import Estimator, Launcher, LaunchOrder
from carma.core.state import State
from carma.daemon.background_thread import Worker
from carma.daemon.estimating.estimates import CallOff, Estimates
from carma.daemon.estimating.fingerprints import Fingerprint
from carma.daemon.shell import Shell
from carma.errors import CarmaError, StoreError
from carma.launch.confinement import needs_frameworks

log = logging.getLogger("carma.daemon")
T = TypeVar("T")

KILL_AGAIN_S = 5.0  # a process in uninterruptible sleep takes a signal only when it wakes
RETRY_S = 1.0  # of what could not be stored
FORESEE_LIMIT_S = 20.0  # for the estimators' answer to a question that somebody waits for, in real seconds
ASK_AGAIN_S = 1.0  # before one that does not listen yet is asked to save again: a program that just starts up
RELAUNCH_S = 2.0  # before an order that left no trace is given again

FindFrameworks = Callable[[LaunchOrder], Awaitable[Frameworks]]  # does not raise


class Hands:
    def __init__(
        self,
        shell: Shell,
        launcher: Launcher,
        estimators: Sequence[Estimator],
        has_trace: Callable[[AttemptKey], bool] = lambda _key: False,
        *,
        call_off: CallOff = lambda _task: None,
        fingerprint: Fingerprint | None = None,
        find_frameworks: FindFrameworks | None = None,
    ) -> None:
        """`has_trace`: whether an order ever reached the launcher, also under an earlier daemon. `find_frameworks` is
        awaited before a launch that needs its result; None: the launcher reads the files itself."""
        self.shell = shell
        self.launcher = launcher
        self.has_trace = has_trace
        self._find_frameworks = find_frameworks
        self.estimates = Estimates(
            estimators,
            shell.state.rules.memory,
            lambda: tuple(shell.state.gpus.values()),
            call_off=call_off,
            fingerprint=fingerprint,
        )
        self.looking = asyncio.Event()  # set: look at the attempts now
        self._launches = Worker("launcher")
        self._estimating: dict[TaskId, asyncio.Task[None]] = {}
        self._kill_at: dict[AttemptKey, float] = {}  # on the daemon's clock
        self._ordered: dict[AttemptKey, float] = {}  # monotonic time at which the newest order was carried out
        self._launching: set[AttemptKey] = set()
        self._open: set[asyncio.Task[None]] = set()

    # Commands.

    def execute(self, commands: Sequence[Command], event: Durable) -> None:
        for command in commands:
            self.carry_out(command, event.at)
        if isinstance(event, StopRequested | TaskFinished):
            self._call_off(event.task)

    def carry_out(self, command: Command, at: float) -> None:
        """`at` is when it was decided: a stop that was asked for before a restart does not get a second grace."""
        match command:
            case EstimateTask(task=task):
                self._call_off(task, again=True)
                self._estimating[task] = self.start(self._estimate(task), f"estimating task {task}")
            case LaunchAttempt():
                self._launching.add(command.key)
                self.start(self._launch(command), f"launching {command.key}")
            case StopAttempt(key=key, grace_s=grace_s, signal=number):
                self._kill_at[key] = min(at + grace_s, self._kill_at.get(key, float("inf")))
                self.start(self._signal(key, number), f"stopping {key}")
            case WarnAttempt(key=key, signal=number):
                self.start(self._signal(key, number), f"warning {key}")
            case PreemptAttempt():
                self.start(self._ask(command), f"asking {command.key} to save")
            case _:
                assert_never(command)

    def start(self, work: Coroutine[object, object, None], what: str) -> asyncio.Task[None]:
        """Run it beside everything else; what it raises is logged and ends nothing."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._open.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CarmaError):
            log.error("%s: %s", task.get_name(), error)
        elif error is not None:
            log.error("%s failed", task.get_name(), exc_info=error)

    def with_launcher(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Calls of the launcher happen one after the other: a poll never meets half a launch."""
        return self._launches.call(function)

    async def close(self) -> None:
        self.estimates.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._launches.close()

    # Launching.

    async def _launch(self, command: LaunchAttempt) -> None:
        gpus = tuple(self.shell.state.gpus[gpu] for gpu in command.placement.gpus if gpu in self.shell.state.gpus)
        order = LaunchOrder(
            key=command.key,
            owner=command.owner,
            spec=command.spec,
            placement=command.placement,
            gpus=gpus,
            grace_s=self.shell.state.rules.stopping.grace_of(command.spec),
            preempted=was_preempted(self.shell.state, command.key),
        )
        try:
            if self._find_frameworks is not None and needs_frameworks(order):
                order = replace(order, frameworks=await self._find_frameworks(order))
                if self._stopped_before_launch(order.key):
                    return
            await self.with_launcher(lambda: self._launch_in_place(order))
        finally:
            self._launching.discard(command.key)
            self._ordered[command.key] = time.monotonic()
            self.looking.set()

    def _stopped_before_launch(self, key: AttemptKey) -> bool:
        """Whether a stop was requested and no runner can know of it: then the loop records the end of the attempt. If
        an earlier order may have reached a runner, it is given again and the runner answers for the attempt."""
        task = self.shell.state.tasks.get(key.task)
        if task is not None and task.key == key and isinstance(task.status, Starting) and task.status.ending is None:
            return False
        return not self.has_trace(key)

    def _launch_in_place(self, order: LaunchOrder) -> None:
        """Not if the database was removed: the directories of attempts may belong to another daemon by now."""
        if self.shell.in_place():
            self.launcher.launch(order)

    def launch_again(self, keys: Sequence[AttemptKey]) -> None:
        """Orders that were not carried out (a full disk, a runner that died): once more, not too often.

        Also for a task that is to stop, when the order may have reached a runner: that one finds the word to stop
        beside the order and answers for the attempt, where a guess of ours could be wrong.
        """
        now_s = time.monotonic()
        for key in keys:
            if now_s - self._ordered.get(key, float("-inf")) < RELAUNCH_S:
                continue
            task = self.shell.state.tasks[key.task]
            if isinstance(task.status, Starting):
                log.warning("the order to start %s was not carried out; giving it again", key)
                if task.status.ending is not None:
                    self.start(self._signal(key, signal.SIGTERM), f"stopping {key}")
                self.carry_out(launch_of(task), self.shell.clock.now())

    def in_hand(self, key: AttemptKey, since_s: float) -> bool:
        """Whether an order for this attempt is on its way, or was carried out after that (monotonic) time."""
        return key in self._launching or self._ordered.get(key, float("-inf")) >= since_s

    # Stopping.

    async def _signal(self, key: AttemptKey, number: int) -> None:
        await self.with_launcher(lambda: self.launcher.signal(key, number))
        self.looking.set()

    async def _ask(self, command: PreemptAttempt) -> None:
        """Until it has been told, has ended, or half of its time to leave is over: told later than that, it might save
        and end too late, which would be taken for the end of its work."""
        key, number, asked_at = command.key, command.signal, command.asked_at
        while may_be_told(self.shell.state, key, asked_at, self.shell.clock.now()):
            if await self.with_launcher(lambda: self.launcher.request_checkpoint(key, number, asked_at)):
                break
            await asyncio.sleep(ASK_AGAIN_S)
        self.looking.set()

    def kill_overdue(self, state: State, now: float) -> None:
        """SIGKILL for what did not end within its grace, again and again until it is gone."""
        for key, kill_at in list(self._kill_at.items()):
            if state.active.get(key.task) != key:
                del self._kill_at[key]
            elif now >= kill_at:
                self._kill_at[key] = now + KILL_AGAIN_S * self.shell.clock.speed
                self.start(self._signal(key, signal.SIGKILL), f"killing {key}")

    def forget(self, key: AttemptKey) -> None:
        self._kill_at.pop(key, None)
        self._ordered.pop(key, None)

    def release(self, key: AttemptKey) -> None:
        """The attempt's end is stored: the launcher may drop its records of it."""
        self.start(self._release(key), f"removing the records of {key}")

    async def _release(self, key: AttemptKey) -> None:
        await self.with_launcher(lambda: self.launcher.release(key))

    @property
    def next_kill_at(self) -> float | None:
        return min(self._kill_at.values(), default=None)

    # Estimating.

    async def foresee(self, owner: Owner, spec: TaskSpec) -> Estimate | None:
        """What the estimators would say of a task that is not submitted (yet)."""
        try:
            async with asyncio.timeout(FORESEE_LIMIT_S):
                return await self.estimates.foresee(owner, spec)
        except TimeoutError:
            return None

    async def _estimate(self, task_id: TaskId) -> None:
        task = self.shell.state.tasks.get(task_id)
        if task is None:
            return
        try:
            (estimate, refusals), fingerprint = await self.estimates.ask(task_id, task.owner, task.spec)
            await self._store_estimate(task_id, estimate, refusals, fingerprint)
        finally:
            if self._estimating.get(task_id) is asyncio.current_task():
                del self._estimating[task_id]

    def _call_off(self, task_id: TaskId, *, again: bool = False) -> None:
        """Nobody waits for that estimate any more; `again`: another question about the same task follows."""
        asked = self._estimating.get(task_id)
        task = self.shell.state.tasks.get(task_id)
        if asked is not None and (again or task is None or not isinstance(task.status, Estimating)):
            asked.cancel()

    async def _store_estimate(
        self, task_id: TaskId, estimate: Estimate | None, refusals: tuple[NoEstimate, ...], fingerprint: str
    ) -> None:
        def make(state: State) -> Sequence[Durable]:
            task = state.tasks.get(task_id)
            if task is None or not isinstance(task.status, Estimating):  # cancelled meanwhile
                return ()
            return (TaskEstimated(self.shell.clock.now(), task_id, estimate, refusals, fingerprint),)

        while True:
            try:
                await self.shell.change(make)
                return
            except StoreError:
                await asyncio.sleep(RETRY_S)


def may_be_told(state: State, key: AttemptKey, asked_at: float, now: float) -> bool:
    """Whether that request to save still stands, and leaves time enough for it."""
    task = state.tasks.get(key.task)
    if task is None or state.active.get(key.task) != key or not isinstance(task.status, Running):
        return False
    asked = task.status.preempting
    return asked is not None and asked.at == asked_at and now <= (asked.at + asked.until) / 2


def was_preempted(state: State, key: AttemptKey) -> bool:
    task = state.tasks.get(key.task)
    return task is not None and any(isinstance(attempt.outcome, Preempted) for attempt in task.attempts)


def launch_of(task: Task) -> LaunchAttempt:
    """The order that belongs to a task that is starting."""
    assert isinstance(task.status, Starting)
    return LaunchAttempt(task.key, task.owner, task.spec, task.status.placement)
