"""What the daemon does for shared GPUs: looks often where no limit holds, knows whose processes it sees, stops what has
nothing left to run under, and notes what the GPUs did."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, cast

import pytest

from carma.core.attempt_end import ended
from carma.core.model.events import (
    AttemptEnded,
    AttemptStarted,
    Durable,
    Event,
    GpusFound,
    StepsCounted,
    StopRequested,
    TaskPaused,
    TaskSubmitted,
    UseNoted,
)
from carma.core.model.outcome import Disrupted, Failed, Outcome, OutOfMemory
from carma.core.model.settings import Gate, Rules, WarmUp, WindowRules
from carma.core.model.status import Running
from carma.core.model.values import (
    AttemptKey,
    Capabilities,
    Confinement,
    Estimate,
    Gpu,
    GpuId,
    GpuSample,
    GpuUsage,
    Guard,
    Owner,
    ProcessUse,
    TaskId,
    TaskSpec,
)
from carma.core.policies import magm
from carma.core.ports import AttemptReport, StepCount, StepCounters
from carma.core.state import State
from carma.daemon import found_attempts as finder
from carma.daemon import writer as writer_module
from carma.daemon.loop import Loop, ProcessOwners
from carma.daemon.recovery_on_start import ReplayedLog, reconcile
from carma.daemon.runtime import SteadyClock
from carma.daemon.shell import Shell
from carma.errors import StoreError
from carma.store.memory import MemoryStore
from carma.testing.builders import World
from carma.testing.fake_launcher import FakeLauncher, Plan
from carma.testing.step_counters import FakeStepCounters
from tests.unit.daemon.shells import add_use, make_executor, make_shell, writing

LIMIT_S = 180.0
G0 = GpuId("GPU-0")
OWNER = Owner(1000, 1000, "ada")
OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(enabled=False), window=WindowRules(stale_s=3600.0))
HELD = Plan(confinement=Confinement(mechanism="mps", guards=(Guard(rung="mps", limit_mib=4_000),)))


class Card:
    """core.ports.Sampler: one GPU whose processes hold what the test says."""

    gpu = Gpu(id=G0, index=0, name="Test", memory_mib=16_384, capabilities=Capabilities(processes=True))

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}  # by pid
        self.memory_samples = 0

    def gpus(self) -> tuple[Gpu, ...]:
        return (self.gpu,)

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        uses = tuple(ProcessUse(pid=pid, memory_mib=mib) for pid, mib in self.memory.items())
        used_mib = sum(self.memory.values())
        return (GpuSample(gpu=G0, at=at, memory_used_mib=used_mib, processes=uses),)

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        assert tuple(gpus) == (G0,)
        self.memory_samples += 1
        return self.sample(at)

    def close(self) -> None:
        pass


class Server:
    def __init__(self, shell: Shell, loop: Loop, launcher: FakeLauncher, card: Card) -> None:
        self.shell, self.loop, self.launcher, self.card = shell, loop, launcher, card

    async def submit(self, number: int, mib: int) -> AttemptKey:
        task, now = TaskId(number), self.shell.clock.now()
        spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=mib)
        await self.shell.commit([TaskSubmitted(now, task, OWNER, spec)])
        await self.until(lambda state: isinstance(state.tasks[task].status, Running))
        return AttemptKey(task, 1)

    async def until(self, holds: Callable[[State], bool]) -> None:
        assert await self.shell.wait_for(holds, LIMIT_S)

    def holds(self, key: AttemptKey, mib: int) -> None:
        pid = next(pid for pid, whose in self.launcher.pids([key]).items() if whose == key)
        self.card.memory[pid] = mib

    def outcome(self, key: AttemptKey) -> Outcome | None:
        return self.shell.state.tasks[key.task].attempts[key.attempt - 1].outcome


class Declared:
    name = "declared"
    quick = False

    def estimate(self, request: Any) -> Estimate:
        mib = request.spec.gpu_memory_mib
        return Estimate(footprint_mib=mib, upper_mib=mib, source="declared")


@contextlib.asynccontextmanager
async def serving(plan: Plan, period_s: float, steps: StepCounters | None = None) -> AsyncIterator[Server]:
    shell, launcher, card = (
        make_shell(MemoryStore(), State(OPEN, magm.POLICY)),
        FakeLauncher(lambda _: plan),
        Card(),
    )
    loop = Loop(shell, make_executor(shell, launcher, (Declared(),)), card, period_s=period_s, steps=steps)
    running = asyncio.create_task(loop.run())
    try:
        await reconcile(shell, loop, ReplayedLog(shell.state, 0))
        yield Server(shell, loop, launcher, card)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await loop.close()
        await loop.writer.close()


def go(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(4 * LIMIT_S):
            await work

    asyncio.run(limited())


def test_without_limits_growth_between_two_samples_is_noticed() -> None:
    """Samples are an hour apart here, so only a memory sample can have seen it."""

    async def work() -> None:
        async with serving(Plan(), period_s=3600.0) as server:
            grower, calm = await server.submit(1, 3_000), await server.submit(2, 10_000)
            server.holds(calm, 1_000)
            server.holds(grower, 9_000)
            await server.until(lambda _: server.outcome(grower) is not None)
            outcome = server.outcome(grower)
            assert isinstance(outcome, OutOfMemory)
            assert outcome.peak_mib == 9_000
            assert (grower, 9) in server.launcher.signals
            assert server.outcome(calm) is None

    go(work())


def test_gpus_whose_tasks_have_limits_are_not_watched_between_samples() -> None:
    async def work() -> None:
        async with serving(HELD, period_s=0.02) as server:
            first, second = await server.submit(1, 4_000), await server.submit(2, 4_000)
            server.holds(first, 2_000)
            server.holds(second, 2_000)
            sampled = server.shell.state.live[G0].window
            before = server.card.memory_samples  # before the second one's limit was known it may have been watched
            count_before = sampled.count_since(0.0)
            await server.until(lambda state: state.live[G0].window.count_since(0.0) > count_before + 20)
            assert server.card.memory_samples <= before + 1
            assert server.shell.state.tasks[first.task].attempts[-1].confinement == HELD.confinement

    go(work())


def test_an_attempt_whose_mps_server_ended_is_stopped_and_retried() -> None:
    async def work() -> None:
        async with serving(Plan(), period_s=0.02) as server:
            key = await server.submit(1, 3_000)
            server.launcher.disturb(key, "the MPS server ended")
            await server.until(lambda _: server.outcome(key) is not None)
            assert server.outcome(key) == Disrupted("the MPS server ended")
            await server.until(lambda state: len(state.tasks[key.task].attempts) == 2)

    go(work())


def test_at_its_end_the_daemon_continues_what_it_has_paused_itself_and_leaves_a_users_pause() -> None:
    async def work() -> None:
        async with serving(Plan(), period_s=3600.0) as server:
            own, users = await server.submit(1, 3_000), await server.submit(2, 3_000)
            now = server.shell.clock.now()
            by_carma = TaskPaused(now, own.task, "carma", until=now + 3600.0, slowed=users.task, slowdown=2.0)
            await server.shell.commit([by_carma, TaskPaused(now, users.task, "ada")])
            await server.loop.end_own_pauses()
            await server.until(lambda _: server.launcher.paused == {users})
            tasks = server.shell.state.tasks
            assert (tasks[own.task].paused, tasks[users.task].paused is None) == (None, False)

    go(work())


# Optimizer steps.


class BrokenCounters:
    def read(self, keys: Iterable[AttemptKey]) -> tuple[StepCount, ...]:
        raise RuntimeError(f"cannot read {keys}")


def test_steps_that_cannot_be_read_do_not_stop_the_ends_of_attempts() -> None:
    async def work() -> None:
        async with serving(Plan(), period_s=3600.0, steps=BrokenCounters()) as server:
            key = await server.submit(1, 3_000)
            server.launcher.end(key, Failed(1))
            await server.until(lambda _: server.outcome(key) == Failed(1))

    go(work())


class HangingCounters(FakeStepCounters):
    def __init__(self) -> None:
        super().__init__()
        self.armed, self.entered, self.released = threading.Event(), threading.Event(), threading.Event()

    def read(self, keys: Iterable[AttemptKey]) -> tuple[StepCount, ...]:
        if self.armed.is_set():
            self.entered.set()
            self.released.wait()
        return super().read(keys)


def test_a_read_of_steps_that_hangs_does_not_stop_the_sampling_of_gpus() -> None:
    async def work() -> None:
        counters = HangingCounters()
        async with serving(Plan(), period_s=0.02, steps=counters) as server:
            await server.submit(1, 3_000)
            try:
                counters.armed.set()
                await asyncio.to_thread(counters.entered.wait)
                window = server.shell.state.live[G0].window
                before = window.count_since(0.0)
                await server.until(lambda _: window.count_since(0.0) > before + 5)
            finally:
                counters.released.set()

    go(work())


class JumpingClock(SteadyClock):
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def test_the_time_of_a_step_does_not_depend_on_when_the_loop_gets_the_count() -> None:
    async def work() -> None:
        counters, clock, events = FakeStepCounters(), JumpingClock(), list[Event]()
        async with serving(Plan(), period_s=3600.0, steps=counters) as server:
            key = await server.submit(1, 3_000)
            counters.count(key, 10, age_s=0.0)
            server.shell.clock = clock
            call, observe = server.loop.executor.call_launcher, server.shell.observe

            async def call_late(function: Callable[[], Any]) -> Any:
                found = await call(function)
                clock.ahead += 1_000.0
                return found

            def note(event: Any) -> None:
                events.append(event)
                observe(event)

            server.loop.executor.call_launcher = call_late  # type: ignore[assignment,method-assign]
            server.shell.observe = note  # type: ignore[method-assign]
            read = counters.read

            def read_at(keys: Iterable[AttemptKey]) -> tuple[StepCount, ...]:
                read_times.append(clock.now())
                return read(keys)

            read_times = list[float]()
            counters.read = read_at  # type: ignore[method-assign]
            server.launcher.end(key, Failed(1))
            await server.until(lambda _: server.outcome(key) is not None)
            (counted,) = [event for event in events if isinstance(event, StepsCounted)]
            assert counted.counts[0].last_at < read_times[0] + 500.0

    go(work())


# Whose processes.


class Servant(FakeLauncher):
    """A launcher whose tasks share through process 7."""

    asked = 0

    def pids(self, keys: Any) -> dict[int, AttemptKey]:
        self.asked += 1
        return super().pids(keys)

    def sharing_pids(self) -> frozenset[int]:
        return frozenset((7,))


def look(*pids: int) -> tuple[GpuSample, ...]:
    uses = tuple(ProcessUse(pid=pid, memory_mib=100) for pid in pids)
    return (GpuSample(gpu=G0, at=1.0, memory_used_mib=100 * len(pids), processes=uses),)


def test_a_memory_sample_asks_the_launcher_only_about_processes_that_are_new() -> None:
    launcher = Servant()
    key = AttemptKey(TaskId(1), 1)
    launcher.launch(cast(Any, type("Order", (), {"key": key})))
    (pid,) = launcher.pids([key])

    async def work() -> None:
        executor = make_executor(make_shell(MemoryStore(), State(OPEN, magm.POLICY)), launcher)
        owners = ProcessOwners(executor)
        launcher.asked = 0
        (sample,) = await owners.attributed(look(pid, 7, 99), [key])
        assert [(use.pid, use.attempt) for use in sample.processes or ()] == [(pid, key), (99, None)]
        assert sample.memory_used_mib == 300, "what the server holds is in use all the same"
        for _ in range(3):
            (sample,) = await owners.attributed(look(pid, 7), [key], refresh=False)
            assert [use.attempt for use in sample.processes or ()] == [key]
        assert launcher.asked == 1
        await owners.attributed(look(pid, 98), [key], refresh=False)
        assert launcher.asked == 2
        await executor.close()

    go(work())


# What was found, as events.


def shared_world() -> tuple[World, AttemptKey, AttemptKey]:
    world = World(1, rules=OPEN)
    keys = []
    for _ in range(2):
        task = world.submit(5_000)
        world.settle()
        world.start(task, mib=4_000)
        keys.append(world.state.active[task])
    world.wait(1)
    return world, keys[0], keys[1]


def test_the_confinement_of_an_attempt_is_recorded_at_its_start() -> None:
    world = World(1, rules=OPEN)
    task = world.submit(5_000)
    world.settle()
    key = world.state.active[task]
    found = AttemptReport(key=key, pid=5, started_at=world.now, confinement=HELD.confinement)
    (event,) = finder.events_of(world.state, [found], world.now)
    assert event == AttemptStarted(world.now, key, 5, HELD.confinement)
    world.emit(event)
    assert world.task(task).attempts[-1].confinement == HELD.confinement


def test_a_running_attempt_that_cannot_be_read_at_the_moment_goes_on() -> None:
    world, key, other = shared_world()
    found = [AttemptReport(key=key, claimed=True), AttemptReport(key=other)]
    (event,) = finder.events_of(world.state, found, world.now)
    assert isinstance(event, AttemptEnded)
    assert event.key == other  # this one's directory is gone


def test_a_lost_server_requests_one_stop_and_does_not_replace_an_earlier_one() -> None:
    world, key, other = shared_world()
    found = [AttemptReport(key=one, pid=5, started_at=world.now, trouble="gone") for one in (key, other)]
    world.stop(other.task)
    (event,) = finder.events_of(world.state, found, world.now)
    assert event == StopRequested(world.now, key.task, Disrupted("gone"), finder.DISRUPTED_GRACE_S)
    world.emit(event)
    assert finder.events_of(world.state, found, world.now) == []


def test_a_task_that_fails_of_it_before_it_is_stopped_was_disrupted() -> None:
    world, key, _ = shared_world()
    found = AttemptReport(key=key, pid=5, outcome=Failed(1, "CUDA error"), ended_at=world.now, trouble="gone")
    (event,) = finder.events_of(world.state, [found], world.now)
    world.emit(event)
    assert world.task(key.task).attempts[-1].outcome == Disrupted("gone")


def test_of_two_that_run_out_together_the_one_above_its_booking_is_to_blame() -> None:
    """No sample showed it: only its own words tell."""
    world, guilty, victim = shared_world()
    ooms = {
        victim: OutOfMemory("gpu", 1, 500, 4_000, "CUDA out of memory"),
        guilty: OutOfMemory("gpu", 1, 500, 30_000, "CUDA out of memory"),
    }
    found = [
        AttemptReport(key=key, pid=5, outcome=oom, ended_at=world.now + place / 100)
        for place, (key, oom) in enumerate(ooms.items())
    ]
    for event in finder.events_of(world.state, found, world.now + 1):
        world.emit(event)
    assert world.task(victim.task).attempts[-1].blame == "neighbour"
    assert world.task(guilty.task).attempts[-1].blame == "own"


def test_a_past_run_carries_energy_and_activity() -> None:
    world = World(1, rules=OPEN)
    world.wait(6)
    world.activity[G0] = (0.5, 0.2, 0.1)
    task = world.submit(5_000)
    world.settle()
    world.start(task)
    world.wait(10)
    key = world.state.active[task]
    world.emit(ended(world.state, key, Failed(1), world.now))
    run = finder.past_run(world.state, key, collocated=False)
    assert run is not None
    assert run.energy_j == pytest.approx(10 * 100.0)
    assert run.activity is not None
    assert run.activity.sm_active == pytest.approx(0.5)


# What the GPUs did.

ROW = GpuUsage(gpu=G0, hour=3, watched_s=10.0, energy_j=100.0)


class Refusing(MemoryStore):
    refuse = True
    refused = 0

    def append(self, events: Sequence[Durable]) -> int:
        if self.refuse and any(isinstance(event, UseNoted) for event in events):
            self.refused += 1
            raise StoreError("no space left")
        return super().append(events)


def test_usage_is_noted_periodically_and_at_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "USAGE_S", 0.0)
    store = MemoryStore()

    async def work() -> None:
        shell = make_shell(store, State(OPEN, magm.POLICY))
        async with writing(shell):
            add_use(shell.state, [ROW])
            await shell.commit([GpusFound(1.0, (Card.gpu,))])
            assert await shell.wait_for(lambda state: not state.usage, LIMIT_S)
            assert list(store.usage(since=0.0, until=1e9)) == [ROW]
            monkeypatch.setattr(writer_module, "USAGE_S", 3600.0)
            add_use(shell.state, [ROW])

    go(work())
    store.reopen()
    assert [row.watched_s for row in store.usage(since=0.0, until=1e9)] == [20.0]


def test_usage_that_a_full_disk_refuses_is_in_the_next_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "USAGE_S", 0.0)
    store = Refusing()

    async def work() -> None:
        shell = make_shell(store, State(OPEN, magm.POLICY))
        async with writing(shell):
            add_use(shell.state, [ROW])
            await shell.commit([GpusFound(1.0, (Card.gpu,))])
            assert await shell.wait_for(lambda _: store.refused > 0, LIMIT_S)
            store.refuse = False
            await shell.commit([GpusFound(2.0, (Card.gpu,))])

    go(work())
    store.reopen()
    assert list(store.usage(since=0.0, until=1e9)) == [ROW]
