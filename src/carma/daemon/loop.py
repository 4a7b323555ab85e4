"""The periodic work of the daemon. It decides nothing.

1. Sample the GPUs and read the steps of the tasks (`monitor.period_s`), and read the memory of GPUs more often where
   no limit holds the tasks.
2. Poll the attempts: what ended is committed, what was never started is started, what outlived its grace is killed.
3. Let time pass (`Ticked`), so that the core proposes what is due.

An exception is logged with the work that raised it and ends nothing: a scheduler thread that dies silently while the
server accepts tasks is the worst failure of such a system.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from carma.core.model.commands import StopAttempt
from carma.core.model.events import (
    AttemptSteps,
    Durable,
    GpusFound,
    GpusSampled,
    MemorySampled,
    StepsCounted,
    StopRequested,
    TaskUnpaused,
    Ticked,
)
from carma.core.model.outcome import Cancelled
from carma.core.model.status import Running, Starting
from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, Gpu, GpuId, GpuSample, TaskId
from carma.core.pausing import CARMA
from carma.core.ports import Sampler, StepCounters
from carma.core.state import State
from carma.core.telemetry.observation import to_watch
from carma.daemon import found_attempts as finder
from carma.daemon.daemon_log import ErrorLog, FaultLog
from carma.daemon.executor import Executor
from carma.daemon.runtime import BackgroundThread
from carma.daemon.shell import Shell
from carma.daemon.writer import Writer
from carma.errors import StoreError
from carma.monitor.processes import attribute, strays

log = logging.getLogger("carma.daemon")

IDLE_S = 1.0  # between ticks when nothing runs
POLL_S = 0.2  # between polls of running attempts; the end of a child is noticed at once by its signal
STARTING_S = 0.02  # between polls just after a launch, doubling up to POLL_S
UNKILLABLE_S = 30.0  # a process that SIGKILL has not ended by then hangs in the kernel
AFTER_ERROR_S = 0.1
READING_STEPS = "reading the steps of the tasks"


class Loop:
    def __init__(
        self, shell: Shell, executor: Executor, sampler: Sampler, *, period_s: float, steps: StepCounters | None = None
    ) -> None:
        """`steps`: None where no steps are counted."""
        self.executor = executor
        self._steps = steps
        self._shell = shell
        self.writer = Writer(shell, executor.follow)
        self._sampler = sampler
        self._period_s = period_s
        self._sampler_thread = BackgroundThread("sampler")
        self._owners = ProcessOwners(executor)
        self._starting_pause_s = STARTING_S
        self._strays: set[tuple[AttemptKey, GpuId]] = set()
        self._errors = ErrorLog()
        self._faults = FaultLog()
        self._late_stops: dict[AttemptKey, StopRequested] = {}  # carried out and not stored yet

    async def run(self) -> None:
        """Runs until it is cancelled or the writer cannot go on."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.writer.run(), name="writer")
            group.create_task(self._sample_always(), name="samples")
            group.create_task(self._read_steps_always(), name="steps")
            group.create_task(self._watch_memory_always(), name="memory")
            group.create_task(self._poll_always(), name="attempts")

    async def close(self) -> None:
        """Called after `run` was cancelled; `writer.close` follows."""
        with contextlib.suppress(TimeoutError):  # a driver that hangs does not delay the end
            async with asyncio.timeout(2.0):
                await self._sampler_thread.call(self._sampler.close)
        self._sampler_thread.close(wait_s=0.0)
        await self.executor.close()

    # The GPUs.

    async def _sample_always(self) -> None:
        await self._shell.reconciled.wait()
        due_s = time.monotonic()
        while True:
            await self._guard("sampling the GPUs", self._sample)
            due_s = max(due_s + self._period_s, time.monotonic())  # missed samples are not repeated
            await asyncio.sleep(due_s - time.monotonic())

    async def _sample(self) -> None:
        state, now = self._shell.state, self._shell.clock.now
        samples, gpus = await self._sampler_thread.call(lambda: (self._sampler.sample(now()), self._sampler.gpus()))
        await self.gpus_changed(gpus)
        self._faults.observe(samples, state)
        if any(sample.processes for sample in samples):
            samples = await self._owners.attributed(samples, tuple(state.active.values()))
            self._log_strays(samples)
        self._shell.observe(GpusSampled(max((s.at for s in samples), default=now()), samples))

    async def _read_steps_always(self) -> None:
        """Not with the samples: a call of the launcher that hangs must not stop the sampling."""
        await self._shell.reconciled.wait()
        while self._steps is not None:
            await self._guard(READING_STEPS, self._read_steps)
            await asyncio.sleep(self._period_s)

    async def _read_steps(self) -> None:
        clock, counters, keys = self._shell.clock, self._steps, tuple(self._shell.state.active.values())
        if counters is None or not keys:
            return
        found, now = await self.executor.call_launcher(lambda: (counters.read(keys), clock.now()))
        if found:
            counts = tuple(AttemptSteps(one.key, one.steps, now - one.age_s * clock.speed) for one in found)
            self._shell.observe(StepsCounted(self._shell.state.now, counts))  # time passes by other events

    async def _watch_memory_always(self) -> None:
        """Sharing without memory limits is only safe if the memory is read often."""
        await self._shell.reconciled.wait()
        while True:
            speed = max(1.0, self._shell.clock.speed)
            await asyncio.sleep(max(STARTING_S, watch_pause_s(self._shell.state) / speed))
            await self._guard("reading the memory of the GPUs", self._watch_memory)

    async def _watch_memory(self) -> None:
        state, now = self._shell.state, self._shell.clock.now
        gpus = to_watch(state)
        if not gpus:
            return
        samples = await self._sampler_thread.call(lambda: self._sampler.sample_memory(gpus, now()))
        if samples:
            samples = await self._owners.attributed(samples, tuple(state.active.values()), refresh=False)
            self._shell.observe(MemorySampled(max(sample.at for sample in samples), samples))

    async def find_gpus(self) -> tuple[Gpu, ...]:
        return await self._sampler_thread.call(self._sampler.gpus)

    async def gpus_changed(self, gpus: tuple[Gpu, ...]) -> None:
        """Commit the set of GPUs if it differs from the state's."""

        def make(state: State) -> tuple[Durable, ...]:
            return () if tuple(state.gpus.values()) == gpus else (GpusFound(self._shell.clock.now(), gpus),)

        if make(self._shell.state):
            await self._shell.change(make)

    def _log_strays(self, samples: tuple[GpuSample, ...]) -> None:
        """Attempts with a process on a GPU that is not theirs; each is logged once."""
        placements = {key: held[key] for held in self._shell.state.on_gpu.values() for key in held}
        found = strays(samples, placements)
        for stray in found:
            if (stray.attempt, stray.gpu) not in self._strays:
                log.warning("%s", stray)
        self._strays = {(stray.attempt, stray.gpu) for stray in found}

    # The attempts, and time.

    async def _poll_always(self) -> None:
        await self._shell.reconciled.wait()
        wake = self.executor.poll_now
        while True:
            # Not asyncio.wait_for: in Python 3.11 it can swallow a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_pause_s()):
                    await wake.wait()
                    self._starting_pause_s = STARTING_S
            wake.clear()
            await self._guard("polling the attempts", self.poll)
            self._shell.observe(Ticked(self._shell.clock.now()))

    def _poll_pause_s(self) -> float:
        state, speed = self._shell.state, max(1.0, self._shell.clock.speed)
        if any(isinstance(state.tasks[task].status, Starting) for task in state.active):
            self._starting_pause_s = min(POLL_S, self._starting_pause_s * 2)
            return self._starting_pause_s
        self._starting_pause_s = STARTING_S
        if state.active or state.between_attempts:
            return max(STARTING_S, POLL_S / speed)
        return IDLE_S if not state.queue else max(POLL_S, IDLE_S / speed)

    async def poll(self) -> Sequence[AttemptKey]:
        """Commit what happened to the active attempts. Returns those that never started: one that is to stop and never
        reached the launcher has ended, the others are ordered again."""
        shell, executor = self._shell, self.executor
        keys = tuple(shell.state.active.values())
        if not keys:
            return ()
        executor.kill_overdue()  # first: the rest fails on a full disk
        await self._carry_out_unstored_stops()
        asked_s = time.monotonic()
        found = await executor.call_launcher(lambda: executor.launcher.poll(keys))
        if any(one.outcome is not None for one in found):
            # final counts: the file is deleted once the end is stored
            await self._guard(READING_STEPS, self._read_steps)
        if finder.events_of(shell.state, found, shell.clock.now()):
            await shell.change(lambda state: finder.events_of(state, found, shell.clock.now()))
        idle = [key for key in finder.never_launched(shell.state, found) if not executor.is_ordered(key, asked_s)]
        unknown = [key for key in idle if not executor.launcher.has_order(key)]
        if finder.called_off(shell.state, unknown, shell.clock.now()):
            await shell.change(lambda state: finder.called_off(state, unknown, shell.clock.now()))
        executor.launch_again([key for key in idle if shell.state.active.get(key.task) == key])
        return idle

    async def _carry_out_unstored_stops(self) -> None:
        """The one change that takes effect before it is stored: a user's stop of a running task, which may be what
        fills the disk. It is stored before the end of its attempt, so that the task counts as cancelled; if the daemon
        is killed before that, it counts as failed by the signal."""
        unstored = self._shell.unstored_stops
        while unstored:
            key, stop = unstored.popleft()
            self._late_stops[key] = stop
            self.executor.execute(StopAttempt(key, stop.grace_s, stop.signal), stop.at)
        if self._late_stops:
            await self._shell.change(self._events_of_late_stops)
            self._late_stops.clear()

    def _events_of_late_stops(self, state: State) -> list[Durable]:
        active = [stop for key, stop in self._late_stops.items() if state.active.get(key.task) == key]
        return [replace(stop, at=max(stop.at, state.now)) for stop in active if _not_ending(state, stop.task)]

    async def end_own_pauses(self) -> None:
        """The daemon stops: what it paused itself would stand still for longer than its bound. A user's pause stays."""
        shell = self._shell
        paused = [task for key in shell.state.active if (task := shell.state.tasks[key]).paused is not None]
        own = [task for task in paused if task.paused is not None and task.paused.slowed is not None]
        now = shell.clock.now()
        try:
            await shell.commit([TaskUnpaused(now, task.id, CARMA, "the daemon stops") for task in own])
        except StoreError as error:
            log.error("tasks stay paused until the next daemon starts: %s", error)
        await self.executor.continued([task.key for task in own if shell.state.tasks[task.id].paused is None])

    async def cancel_all(self) -> None:
        """`carma down --cancel`: stop what runs and wait until it has ended."""
        shell, by = self._shell, Cancelled("carma", "the daemon was told to stop")

        def make(state: State) -> list[Durable]:
            running = [task_id for task_id in state.active if _not_ending(state, task_id)]
            now = shell.clock.now()
            return [StopRequested(now, task_id, by, _grace_s(state, task_id)) for task_id in running]

        limit_s = max((_grace_s(shell.state, task_id) for task_id in shell.state.active), default=0.0) + UNKILLABLE_S
        try:
            await shell.change(make)
        except StoreError as error:
            log.error("the stop of running tasks cannot be stored, so they are stopped without a record: %s", error)
            await self._stop_unrecorded(limit_s)
            return
        if not await shell.wait_for(lambda state: not state.active, limit_s):
            log.error("%s left running: SIGKILL does not end them", show_count(len(shell.state.active), "task"))

    async def _stop_unrecorded(self, limit_s: float) -> None:
        """Stops attempts on a full disk: signals need no record. The next daemon reads from the runners how the
        attempts ended."""
        state, now, executor = self._shell.state, self._shell.clock.now(), self.executor
        keys = tuple(state.active.values())
        for key in keys:
            executor.execute(StopAttempt(key, _grace_s(state, key.task)), now)
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            found = await executor.call_launcher(lambda: executor.launcher.poll(keys))
            if all(one.outcome is not None for one in found):
                return
            await asyncio.sleep(POLL_S)

    async def _guard(self, work: str, function: Callable[[], Awaitable[object]]) -> None:
        try:
            await function()
        except StoreError:
            await asyncio.sleep(AFTER_ERROR_S)  # the writer has logged it
        except Exception as error:
            # The kind without the message, which may name another file each time.
            kind = f"{work}: {type(error).__name__} {getattr(error, 'errno', '')}"
            self._errors.error(f"{work}: {type(error).__name__}: {error}", kind=kind, error=error)
            await asyncio.sleep(AFTER_ERROR_S)


class ProcessOwners:
    """To which attempt each process on a GPU belongs, as the launcher says. Processes of the launcher's own servers
    (MPS) are left out."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._attempts: dict[int, AttemptKey] = {}  # by pid
        self._servers: frozenset[int] = frozenset()
        self._known: frozenset[int] = frozenset()  # the pids in the samples when the launcher was last asked

    async def attributed(
        self, samples: tuple[GpuSample, ...], keys: Sequence[AttemptKey], *, refresh: bool = True
    ) -> tuple[GpuSample, ...]:
        """The samples with the attempt of each process. The launcher has to search process trees: without `refresh` it
        is asked only about processes that are new."""
        listed = frozenset(use.pid for sample in samples for use in sample.processes or ())
        if refresh or not listed <= self._known:
            launcher = self._executor.launcher
            self._attempts, self._servers = await self._executor.call_launcher(
                lambda: (launcher.pids(keys) if keys else {}, launcher.sharing_pids())
            )
            self._known = listed
        return attribute(samples, self._attempts, self._servers)


def watch_pause_s(state: State) -> float:
    """Between two reads of the memory. A new task needs seconds until it holds memory."""
    watch_s = state.rules.sharing.watch_s
    return watch_s if to_watch(state) else max(watch_s, IDLE_S)


def _grace_s(state: State, task_id: TaskId) -> float:
    return state.rules.stopping.grace_of(state.tasks[task_id].spec)


def _not_ending(state: State, task_id: TaskId) -> bool:
    status = state.tasks[task_id].status
    return isinstance(status, Starting | Running) and status.ending is None
