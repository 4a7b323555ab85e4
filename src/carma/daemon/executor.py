"""Carries out the core's commands: estimate, launch, stop, warn, ask to save, pause. Each can be repeated without harm.

1. `follow` gets the commands of each stepped event, and cleans up after an attempt that has ended.
2. Launches and signals go to the launcher, one after the other, in a thread.
3. Attempts that outlive their grace period get SIGKILL until they have ended.

The executor never blocks the event loop and stores nothing: after a restart, recovery_on_start.py derives from the
state and the launcher what is left to do, and gives it to the executor again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar, assert_never

from msgspec.structs import replace

from carma.core.model import commands as c
from carma.core.model.events import (
    AttemptEnded,
    Durable,
    StopRequested,
    TaskEstimated,
    TaskFinished,
    TaskPlaced,
    task_of,
)
from carma.core.model.outcome import Preempted
from carma.core.model.status import Running, Starting
from carma.core.model.values import AttemptKey, Frameworks, TaskId
from carma.core.ports import Launcher, LaunchOrder
from carma.core.state import State
from carma.daemon.estimating import Estimates
from carma.daemon.found_attempts import neighbours, past_run
from carma.daemon.runtime import BackgroundThread
from carma.daemon.shell import Shell
from carma.errors import CarmaError, StoreError
from carma.launch.confinement import needs_frameworks

log = logging.getLogger("carma.daemon")
T = TypeVar("T")

KILL_AGAIN_S = 5.0  # a process in uninterruptible sleep takes a signal only when it wakes
STORE_RETRY_S = 1.0  # before an estimate is stored again after the store refused it
ASK_AGAIN_S = 1.0  # before a program that does not listen yet (it is starting) is asked to save again
LOOK_AGAIN_S = 2.0  # between two looks at a paused task
CONTINUED_S = 0.02
RELAUNCH_S = 2.0  # before an order that left no trace is given again

FindFrameworks = Callable[[LaunchOrder], Awaitable[Frameworks]]  # does not raise


class Executor:
    def __init__(
        self,
        shell: Shell,
        launcher: Launcher,
        estimates: Estimates,
        find_frameworks: FindFrameworks | None = None,
        send_notices: Callable[[TaskId], None] = lambda _task: None,
    ) -> None:
        """`find_frameworks` is awaited before a launch that needs its result. `send_notices` begins to send the notices
        that a task has."""
        self.send_notices = send_notices
        self.launcher = launcher
        self.poll_now = asyncio.Event()  # set: the loop polls the attempts at once
        self.shared: set[AttemptKey] = set()  # active attempts that had a neighbour at any time
        self._shell = shell
        self._estimates = estimates
        self._find_frameworks = find_frameworks
        self._launcher_thread = BackgroundThread("launcher")
        self._estimating: dict[TaskId, asyncio.Task[None]] = {}
        self._kill_at: dict[AttemptKey, float] = {}  # on the daemon's clock
        self._ordered_s: dict[
            AttemptKey, float
        ] = {}  # monotonic; when the newest order was carried out; inf: it is not yet
        self._pauses: dict[AttemptKey, asyncio.Event] = {}  # set: the state of a pause that is followed has changed
        self._background: set[asyncio.Task[None]] = set()

    def follow(self, commands: Sequence[c.Command], event: Durable) -> None:
        """What an event that was just stepped requires."""
        state = self._shell.state
        match event:
            case TaskPlaced():
                self.shared |= neighbours(state, event)
            case AttemptEnded(key=key):
                self._clean_up(key)
            case StopRequested(task=task) | TaskFinished(task=task):
                self._cancel_estimate(task)
            case _:
                pass
        changed = state.tasks.get(task_of(event) or TaskId(0))
        if changed is not None and changed.notices:
            self.send_notices(changed.id)
        for command in commands:
            self.execute(command, event.at)

    def execute(self, command: c.Command, at: float) -> None:
        """`at`: when the command was decided. A stop from before a restart does not get a second grace period."""
        match command:
            case c.EstimateTask(task=task):
                self._cancel_estimate(task, again=True)
                self._estimating[task] = self.start_task(self._estimate(task), f"estimating task {task}")
            case c.LaunchAttempt():
                self._ordered_s[command.key] = float("inf")
                self.start_task(self._launch(command), f"launching {command.key}")
            case c.StopAttempt(key=key, grace_s=grace_s, signal=number):
                self._kill_at[key] = min(at + grace_s, self._kill_at.get(key, float("inf")))
                self.start_task(self._signal(key, number), f"stopping {key}")
            case c.WarnAttempt(key=key, signal=number):
                self.start_task(self._signal(key, number), f"warning {key}")
            case c.PreemptAttempt():
                self.start_task(self._ask_to_save(command), f"asking {command.key} to save")
            case c.SetPaused(key=key, paused=paused):
                self.start_task(self.follow_pause(key), f"{'pausing' if paused else 'continuing'} {key}")
            case _:
                assert_never(command)

    def start_task(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run it in the background. An exception is logged and ends nothing else."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._log_failure)
        return task

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CarmaError):
            log.error("%s: %s", task.get_name(), error)
        elif error is not None:
            log.error("%s failed", task.get_name(), exc_info=error)

    def call_launcher(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Calls of the launcher run one after the other: a poll never finds half a launch."""
        return self._launcher_thread.call(function)

    async def close(self) -> None:
        self._estimates.close()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._launcher_thread.close()

    # Launching.

    async def _launch(self, command: c.LaunchAttempt) -> None:
        order = self._order(command)
        try:
            if self._find_frameworks is not None and needs_frameworks(order):
                order = replace(order, frameworks=await self._find_frameworks(order))
                if self._stopped_before_launch(order.key):
                    return
            await self.call_launcher(lambda: self._launch_if_in_place(order))
        finally:
            if self._shell.state.active.get(command.key.task) == command.key:
                self._ordered_s[command.key] = time.monotonic()
            else:  # it ended meanwhile
                self._ordered_s.pop(command.key, None)
            self.poll_now.set()

    def _order(self, command: c.LaunchAttempt) -> LaunchOrder:
        state = self._shell.state
        task = state.tasks.get(command.key.task)
        earlier = task.attempts if task is not None else ()
        return LaunchOrder(
            key=command.key,
            owner=command.owner,
            spec=command.spec,
            placement=command.placement,
            gpus=tuple(state.gpus[gpu] for gpu in command.placement.gpus if gpu in state.gpus),
            grace_s=state.rules.stopping.grace_of(command.spec),
            preempted=any(isinstance(attempt.outcome, Preempted) for attempt in earlier),
        )

    def _stopped_before_launch(self, key: AttemptKey) -> bool:
        """Whether a stop was requested and no runner can know of it: then the loop records the end of the attempt. If
        an earlier order may have reached a runner, it is given again and the runner answers for the attempt."""
        task = self._shell.state.tasks.get(key.task)
        if task is not None and task.key == key and isinstance(task.status, Starting) and task.status.ending is None:
            return False
        return not self.launcher.has_order(key)

    def _launch_if_in_place(self, order: LaunchOrder) -> None:
        """Launches unless the database was removed: another daemon may own the directories of attempts by then."""
        if self._shell.store.in_place():
            self.launcher.launch(order)

    def launch_again(self, keys: Sequence[AttemptKey]) -> None:
        """Repeat orders that were not carried out (a full disk, a runner that died), at most every RELAUNCH_S.

        Also for a task that is to stop, if the order may have reached a runner: the runner finds the stop beside the
        order and answers for the attempt.
        """
        now_s = time.monotonic()
        for key in keys:
            if now_s - self._ordered_s.get(key, float("-inf")) < RELAUNCH_S:
                continue
            task = self._shell.state.tasks[key.task]
            if isinstance(task.status, Starting):
                log.warning("the order to start %s was not carried out; it is given again", key)
                if task.status.ending is not None:
                    self.start_task(self._signal(key, signal.SIGTERM), f"stopping {key}")
                launch = c.LaunchAttempt(key, task.owner, task.spec, task.status.placement)
                self.execute(launch, self._shell.clock.now())

    def is_ordered(self, key: AttemptKey, since_s: float) -> bool:
        """Whether an order for this attempt is pending, or was carried out after that (monotonic) time."""
        return self._ordered_s.get(key, float("-inf")) >= since_s

    # Stopping.

    async def _signal(self, key: AttemptKey, number: int) -> None:
        await self.call_launcher(lambda: self.launcher.signal(key, number))
        self.poll_now.set()

    async def _ask_to_save(self, command: c.PreemptAttempt) -> None:
        """Repeat until the program was asked, has ended, or half of its grace period is over: a program that is asked
        later could save and end too late, which would be recorded as the end of its work."""
        key, number, asked_at = command.key, command.signal, command.asked_at
        while may_ask_to_save(self._shell.state, key, asked_at, self._shell.clock.now()):
            if await self.call_launcher(lambda: self.launcher.request_checkpoint(key, number, asked_at)):
                break
            await asyncio.sleep(ASK_AGAIN_S)
        self.poll_now.set()

    async def follow_pause(self, key: AttemptKey) -> None:
        """Make the processes stand still, or continue, as the state says now. What stands still is looked at again: its
        user can send SIGCONT."""
        if key in self._pauses:
            return self._pauses[key].set()
        changed = self._pauses[key] = asyncio.Event()
        try:
            while self._shell.state.active.get(key.task) == key:
                changed.clear()
                paused = self._shell.state.tasks[key.task].paused is not None
                done = await self._set_paused(key, paused)
                if done and not paused and not changed.is_set():
                    return None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S if done else ASK_AGAIN_S):
                        await changed.wait()
        finally:
            del self._pauses[key]

    async def _set_paused(self, key: AttemptKey, paused: bool) -> bool:
        try:
            return await self.call_launcher(functools.partial(self._set_paused_now, key, paused))
        except OSError:  # too many open files: repeated
            return False

    def _set_paused_now(self, key: AttemptKey, paused: bool) -> bool:
        return self.launcher.pause(key) if paused else self.launcher.unpause(key)

    async def continued(self, keys: Sequence[AttemptKey]) -> None:
        """Returns when the processes of these attempts, which are not paused any more, have been continued."""
        for key in keys:
            await self.follow_pause(key)
        while any(key in self._pauses for key in keys):
            await asyncio.sleep(CONTINUED_S)

    def kill_overdue(self) -> None:
        """SIGKILL for attempts whose grace period is over, repeated until they have ended."""
        state, clock = self._shell.state, self._shell.clock
        now = clock.now()
        for key, kill_at in list(self._kill_at.items()):
            if state.active.get(key.task) != key:
                del self._kill_at[key]
            elif now >= kill_at:
                self._kill_at[key] = now + KILL_AGAIN_S * clock.speed
                self.start_task(self._signal(key, signal.SIGKILL), f"killing {key}")

    # The end of an attempt.

    def _clean_up(self, key: AttemptKey) -> None:
        """The end is stored: the launcher drops its records, and history gets the run."""
        self.start_task(self._release(key), f"removing the records of {key}")
        run = past_run(self._shell.state, key, key in self.shared, self._estimates.fingerprint_of(key.task))
        self.shared.discard(key)
        self._kill_at.pop(key, None)
        self._ordered_s.pop(key, None)
        if run is not None:
            archive = self._shell.archive
            self.start_task(self._shell.in_store(lambda: archive.remember(run)), f"remembering {key}")

    async def _release(self, key: AttemptKey) -> None:
        await self.call_launcher(lambda: self.launcher.release(key))

    # Estimating.

    async def _estimate(self, task_id: TaskId) -> None:
        task = self._shell.state.tasks.get(task_id)
        if task is None:
            return
        try:
            (estimate, refusals), fingerprint = await self._estimates.ask(task_id, task.owner, task.spec)

            def make(state: State) -> Sequence[Durable]:
                known = state.tasks.get(task_id)
                if known is None or not known.awaits_estimate:  # cancelled or finished meanwhile
                    return ()
                return (TaskEstimated(self._shell.clock.now(), task_id, estimate, refusals, fingerprint),)

            await self._store(make)
        finally:
            if self._estimating.get(task_id) is asyncio.current_task():
                del self._estimating[task_id]

    async def _store(self, make: Callable[[State], Sequence[Durable]]) -> None:
        while True:
            try:
                await self._shell.change(make)
                return
            except StoreError:
                await asyncio.sleep(STORE_RETRY_S)

    def _cancel_estimate(self, task_id: TaskId, *, again: bool = False) -> None:
        """End an estimate that is no longer needed. `again`: a new estimate of the same task follows."""
        asked = self._estimating.get(task_id)
        task = self._shell.state.tasks.get(task_id)
        if asked is not None and (again or task is None or not task.awaits_estimate):
            asked.cancel()


def may_ask_to_save(state: State, key: AttemptKey, asked_at: float, now: float) -> bool:
    """Whether that request to save still stands and leaves enough time."""
    task = state.tasks.get(key.task)
    if task is None or state.active.get(key.task) != key or not isinstance(task.status, Running):
        return False
    asked = task.status.preempting
    return asked is not None and asked.at == asked_at and now <= (asked.at + asked.until) / 2
