"""What happens by itself: look at the GPUs, glance at the memory of those that need it, look at the attempts, let time
pass. Nothing here decides anything.

Exceptions are logged with what was being done and end nothing: a scheduler thread that dies silently while the server
goes on accepting tasks is the worst failure such a system can have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from carma.core.model.commands import StopAttempt
from carma.core.model.events import (
    AttemptEnded,
    Durable,
    GpusFound,
    GpusSampled,
    MemorySampled,
    StopRequested,
    TaskPlaced,
    Ticked,
)
from carma.core.model.outcome import Cancelled
from carma.core.model.status import Running, Starting
from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, Gpu, GpuId, GpuSample, TaskId
from carma.core.ports import Launcher, Sampler
from carma.core.state import State
from carma.core.telemetry.observation import to_watch
from carma.daemon import found_attempts as finder
from carma.daemon.background_thread import Worker
from carma.daemon.daemon_log import SAME_ERROR_S, Journal
from carma.daemon.executor import Hands
from carma.daemon.process_owners import Whose
from carma.daemon.shell import Shell
from carma.errors import CarmaError, StoreError
from carma.monitor.processes import strays

log = logging.getLogger("carma.daemon")

IDLE_S = 1.0  # between ticks when nothing runs
POLL_S = 0.2  # between looks at running attempts; a child's end is noticed at once by its signal
STARTING_S = 0.02  # between looks just after a launch, doubling up to POLL_S
UNKILLABLE_S = 30.0  # what SIGKILL has not ended by then hangs in the kernel


class Loop:
    def __init__(self, shell: Shell, hands: Hands, sampler: Sampler, *, period_s: float) -> None:
        self.shell = shell
        self.hands = hands
        self.sampler = sampler
        self.period_s = period_s
        self._eyes = Worker("sampler")
        self._whose = Whose(hands)
        self._hasty_s = POLL_S
        self.shared: set[AttemptKey] = set()
        self._strays: set[tuple[AttemptKey, GpuId]] = set()
        self._logged: dict[str, float] = {}
        self._journal = Journal()
        self.settled = asyncio.Event()  # the state agrees with the living processes: from here on it is watched
        shell.connect(hands.execute, self.stepped, hands.foresee, hands.estimates.stage)

    @property
    def launcher(self) -> Launcher:
        return self.hands.launcher

    async def run(self) -> None:
        """Until cancelled, or until the shell cannot go on."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.shell.run(), name="shell")
            group.create_task(self._sampling(), name="sampling")
            group.create_task(self._glancing(), name="glancing")
            group.create_task(self._looking(), name="looking")

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):  # a driver that hangs does not hold up the end
            async with asyncio.timeout(2.0):
                await self._eyes.call(self.sampler.close)
        self._eyes.close(wait_s=0.0)
        await self.hands.close()

    def watch_children(self) -> None:
        """A runner that ends wakes the loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.hands.looking.set)

    # After each event.

    def stepped(self, event: Durable) -> None:
        self._journal.happened(event, self.shell.state)
        match event:
            case TaskPlaced(key=key):
                self.shared |= finder.neighbours(self.shell.state, event)
                self._hasty_s = STARTING_S
            case AttemptEnded(key=key):
                self._remember(key)
            case _:
                return

    def _remember(self, key: AttemptKey) -> None:
        self.hands.release(key)
        run = finder.past_run(self.shell.state, key, key in self.shared)
        self.shared.discard(key)
        self.hands.forget(key)
        if run is not None:
            archive = self.shell.archive
            self.hands.start(self.shell.in_store(lambda: archive.remember(run)), f"remembering {key}")

    # The GPUs.

    async def _sampling(self) -> None:
        await self.settled.wait()
        due_s = time.monotonic()
        while True:
            await self._guard("looking at the GPUs", self._sample)
            due_s = max(due_s + self.period_s, time.monotonic())  # samples that were missed are not made up for
            await asyncio.sleep(due_s - time.monotonic())

    async def _sample(self) -> None:
        gpus, samples = await self._eyes.call(self._look)
        await self.gpus_changed(gpus)
        self._journal.seen(samples, self.shell.state)
        if any(sample.processes for sample in samples):
            samples = await self._whose.attributed(samples, tuple(self.shell.state.active.values()))
            self._report_strays(samples)
        self.shell.observe(GpusSampled(max((s.at for s in samples), default=self.shell.clock.now()), samples))

    def _look(self) -> tuple[tuple[Gpu, ...], tuple[GpuSample, ...]]:
        samples = self.sampler.sample(self.shell.clock.now())
        return self.sampler.gpus(), samples

    async def _glancing(self) -> None:
        """Tasks that no limit holds are only safe beside one another if somebody looks often."""
        await self.settled.wait()
        while True:
            await asyncio.sleep(max(STARTING_S, watch_pause_s(self.shell.state) / max(1.0, self.shell.clock.speed)))
            await self._guard("glancing at the GPUs' memory", self._sample_memory)

    async def _sample_memory(self) -> None:
        gpus = to_watch(self.shell.state)
        if not gpus:
            return
        looks = await self._eyes.call(lambda: self.sampler.sample_memory(gpus, self.shell.clock.now()))
        if looks:
            looks = await self._whose.known(looks, tuple(self.shell.state.active.values()))
            self.shell.observe(MemorySampled(max(look.at for look in looks), looks))

    async def look_for_gpus(self) -> tuple[Gpu, ...]:
        return await self._eyes.call(self.sampler.gpus)

    async def gpus_changed(self, gpus: tuple[Gpu, ...]) -> None:
        """Tell the core when the set of GPUs is not the one it knows."""

        def make(state: State) -> tuple[Durable, ...]:
            return () if tuple(state.gpus.values()) == gpus else (GpusFound(self.shell.clock.now(), gpus),)

        if make(self.shell.state):
            await self.shell.change(make)

    def _report_strays(self, samples: tuple[GpuSample, ...]) -> None:
        placements = {key: held[key] for held in self.shell.state.on_gpu.values() for key in held}
        found = strays(samples, placements)
        for stray in found:
            if (stray.attempt, stray.gpu) not in self._strays:
                log.warning("%s", stray)
        self._strays = {(stray.attempt, stray.gpu) for stray in found}

    # The attempts, and time.

    async def _looking(self) -> None:
        await self.settled.wait()
        while True:
            # Not asyncio.wait_for: in Python 3.11 it can swallow a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self.hands.looking.wait()
            self.hands.looking.clear()
            await self._guard("looking at the attempts", self.look_at_attempts)
            self.shell.observe(Ticked(self.shell.clock.now()))

    def _pause_s(self) -> float:
        state = self.shell.state
        if any(isinstance(state.tasks[task].status, Starting) for task in state.active):
            self._hasty_s = min(POLL_S, self._hasty_s * 2)
            return self._hasty_s
        self._hasty_s = STARTING_S
        if state.active or state.between_attempts:
            return max(STARTING_S, POLL_S / max(1.0, self.shell.clock.speed))
        return IDLE_S if not state.line else max(POLL_S, IDLE_S / max(1.0, self.shell.clock.speed))

    async def look_at_attempts(self) -> None:
        """How they stand; what ended is committed, what was never started is started, what overstayed is killed."""
        keys = tuple(self.shell.state.active.values())
        if not keys:
            return
        self.hands.kill_overdue(self.shell.state, self.shell.clock.now())  # first: what follows fails on a full disk
        asked_s = time.monotonic()
        found = await self.hands.with_launcher(lambda: self.launcher.poll(keys))
        if finder.events_of(self.shell.state, found, self.shell.clock.now()):
            await self.shell.change(lambda state: finder.events_of(state, found, self.shell.clock.now()))
        idle = [key for key in finder.never_launched(self.shell.state, found) if not self.hands.in_hand(key, asked_s)]
        if idle:
            await self.settle_idle(idle)

    async def settle_idle(self, idle: Sequence[AttemptKey]) -> None:
        """Orders that nobody carried out: those that are to stop and never reached the launcher have ended, the others
        are given again."""
        untouched = [key for key in idle if not self.hands.has_trace(key)]
        if finder.called_off(self.shell.state, untouched, self.shell.clock.now()):
            await self.shell.change(lambda state: finder.called_off(state, untouched, self.shell.clock.now()))
        self.hands.launch_again([key for key in idle if self.shell.state.active.get(key.task) == key])

    async def cancel_all(self) -> None:
        """`carma down --cancel`: stop what runs and wait until it has ended."""
        by = Cancelled("carma", "the daemon was told to stop")

        def make(state: State) -> list[Durable]:
            now = self.shell.clock.now()
            return [
                StopRequested(now, task_id, by, _grace_s(state, task_id))
                for task_id in state.active
                if _not_ending(state, task_id)
            ]

        longest_s = max((_grace_s(self.shell.state, task_id) for task_id in self.shell.state.active), default=0.0)
        try:
            await self.shell.change(make)
        except StoreError as error:
            log.error("the stop of running tasks cannot be stored, so they are stopped without a record: %s", error)
            await self._stop_unrecorded(longest_s + UNKILLABLE_S)
            return
        if not await self.shell.wait_for(lambda state: not state.active, longest_s + UNKILLABLE_S):
            left = show_count(len(self.shell.state.active), "task")
            log.error("%s left running: not even SIGKILL ends them", left)

    async def _stop_unrecorded(self, limit_s: float) -> None:
        """On a full disk: signals need no record. The next daemon reads from the runners how the attempts ended."""
        state, now = self.shell.state, self.shell.clock.now()
        keys = tuple(state.active.values())
        for key in keys:
            self.hands.carry_out(StopAttempt(key, _grace_s(state, key.task)), now)
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            found = await self.hands.with_launcher(lambda: self.launcher.poll(keys))
            if all(one.outcome is not None for one in found):
                return
            await asyncio.sleep(POLL_S)

    async def _guard(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StoreError:
            await asyncio.sleep(0.1)  # the shell has logged it
        except Exception as error:
            self._log_once(what, error)
            await asyncio.sleep(0.1)

    def _log_once(self, what: str, error: Exception) -> None:
        """One line a minute for each kind of error: the same one may name another file each time."""
        kind = f"{what}: {type(error).__name__} {getattr(error, 'errno', '')}"
        now_s = time.monotonic()
        if now_s - self._logged.get(kind, float("-inf")) < SAME_ERROR_S:
            return
        self._logged[kind] = now_s
        explained = isinstance(error, CarmaError | OSError)
        log.error("%s: %s: %s", what, type(error).__name__, error, exc_info=None if explained else error)


def watch_pause_s(state: State) -> float:
    """Between two glances. Where nobody is to be watched a newcomer needs seconds until it holds memory."""
    watch_s = state.rules.sharing.watch_s
    return watch_s if to_watch(state) else max(watch_s, IDLE_S)


def _grace_s(state: State, task_id: TaskId) -> float:
    return state.rules.stopping.grace_of(state.tasks[task_id].spec)


def _not_ending(state: State, task_id: TaskId) -> bool:
    status = state.tasks[task_id].status
    return isinstance(status, Starting | Running) and status.ending is None
