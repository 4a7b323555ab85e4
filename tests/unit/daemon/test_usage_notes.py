"""What users' tasks took and what the GPUs gave to tasks is one figure, over a clean stop and over a kill."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from carma.core.attempt_end import ended
from carma.core.model.events import (
    AttemptStarted,
    Durable,
    GpusFound,
    GpusSampled,
    TaskEstimated,
    TaskPlaced,
    TaskSubmitted,
    UseNoted,
)
from carma.core.model.outcome import Succeeded
from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import (
    Activity,
    AttemptKey,
    Booking,
    Capabilities,
    Gpu,
    GpuId,
    GpuSample,
    Owner,
    Placement,
    ProcessUse,
    TaskId,
    TaskSpec,
)
from carma.core.policies import magm
from carma.core.scheduling.snapshot import views
from carma.core.state import State
from carma.core.telemetry.attribution import measured_idle_w
from carma.daemon.recovery_on_start import replay
from carma.daemon.views.report import HOUR_S, Totals, report
from carma.daemon.writer import USAGE_S, Writer
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore
from carma.wire.report_types import Report
from tests.unit.daemon.shells import make_shell

LIMIT_S = 180.0
RULES = Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=5.0))
CARD = Gpu(
    id=GpuId("GPU-0"),
    index=0,
    name="Test",
    memory_mib=40_960,
    capabilities=Capabilities(processes=True, power=True, energy=True, metrics=("sm_active",)),
)
FIRST, SECOND = AttemptKey(TaskId(1), 1), AttemptKey(TaskId(2), 1)


class Server:
    """A shell over a file, and a card of 50 W that takes 100 W more for each task on it."""

    def __init__(self, path: Path, start: float = 0.0, counter_j: float = 0.0) -> None:
        self.store = SqliteStore(path)
        replayed = replay(self.store.load(), RULES, magm.POLICY)
        self.shell = make_shell(self.store, replayed.state, replayed.sequence)
        self.writer = Writer(self.shell, lambda _commands, _event: None)
        self.running = asyncio.create_task(self.writer.run())
        self.now, self.counter_j = start, counter_j
        self.memory: dict[AttemptKey, int] = {}

    @property
    def state(self) -> State:
        return self.shell.state

    async def run(self, key: AttemptKey, mib: int) -> None:
        spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=mib)
        booked = Placement(gpus=(CARD.id,), booking=Booking(memory_mib=mib, source="declared"))
        await self.shell.commit([TaskSubmitted(self.now, key.task, Owner(1, 1, "ada"), spec)])
        await self.shell.commit([TaskEstimated(self.now, key.task, None)])
        await self.shell.commit([TaskPlaced(self.now, key, booked), AttemptStarted(self.now, key, 100 + key.task)])
        self.memory[key] = mib

    async def end(self, key: AttemptKey) -> None:
        del self.memory[key]
        await self.shell.change(lambda state: [ended(state, key, Succeeded(), self.now)])

    async def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            power_w = 50.0 + 100.0 * len(self.memory)
            self.counter_j += power_w
            uses = tuple(ProcessUse(pid=100 + k.task, memory_mib=mib, attempt=k) for k, mib in self.memory.items())
            sample = GpuSample(
                gpu=CARD.id,
                at=self.now,
                memory_used_mib=sum(self.memory.values()),
                activity=Activity(sm_active=0.3 * len(self.memory)),
                power_w=power_w,
                energy_j=self.counter_j,
                processes=uses,
            )
            self.shell.observe(GpusSampled(self.now, (sample,)))
        await self.shell.commit([])

    async def note(self) -> None:
        """Stores the use, as the daemon does every minute."""
        self.writer._usage_at_s = 0.0
        await self.shell.commit([])
        assert await self.shell.wait_for(lambda state: not state.usage, LIMIT_S)

    def report(self) -> Report:
        rows = self.store.usage(since=0.0, until=10 * HOUR_S)
        totals = Totals(0.0, 2 * HOUR_S)
        totals.add(self.state.tasks.values(), self.state)
        return report(totals, rows, self.state)

    async def killed(self) -> None:
        """What was not stored is gone."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.shell._store_thread.close()
        self.store.close()

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.writer.close()


async def two_tasks(server: Server) -> None:
    """One that shares the card with another, which ends; the card was seen idle before."""
    await server.shell.commit([GpusFound(0.0, (CARD,))])
    await server.wait(7)
    await server.run(FIRST, 4_000)
    await server.wait(20)
    await server.run(SECOND, 6_000)
    await server.wait(20)


def figures(server: Server) -> tuple[float, float]:
    """(the users', the GPUs'), in joules."""
    made = server.report()
    return made.total.energy_j, sum(gpu.tasks_j for gpu in made.gpus)


def go(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    asyncio.run(limited())


def test_a_clean_stop_loses_nothing_of_what_tasks_took(tmp_path: Path) -> None:
    path = tmp_path / "carma.db"

    async def work() -> None:
        server = Server(path)
        await two_tasks(server)
        users_j, gpus_j = figures(server)
        assert users_j == pytest.approx(gpus_j) == pytest.approx(20 * 100 + 20 * 200)
        await server.stop()
        again = Server(path, server.now, server.counter_j)
        assert figures(again) == pytest.approx((users_j, gpus_j))
        again.memory = dict(server.memory)
        await again.wait(10)  # the first of these ten has none before it
        await again.end(FIRST)
        await again.stop()
        last = Server(path)
        assert figures(last) == pytest.approx((users_j + 9 * 200, gpus_j + 9 * 200))
        assert last.state.tracks[SECOND].activity is not None
        await last.stop()

    go(work)


@pytest.mark.parametrize("then", ["nothing", "an end", "growth", "a minute"])
def test_killed_at_any_time_tasks_and_gpus_have_lost_the_same(tmp_path: Path, then: str) -> None:
    """Whatever brings some task's energy to the disk brings that of the others and the GPUs' too."""
    path = tmp_path / "carma.db"

    async def work() -> None:
        server = Server(path)
        await two_tasks(server)
        await server.note()
        await server.wait(10)
        noted_j = 6_000.0
        if then == "an end":
            await server.end(FIRST)
        elif then == "growth":
            server.memory[SECOND] += 1_000
            server.shell.reconciled.set()
            await server.wait(1)
            assert await server.shell.wait_for(lambda state: _peak(state, SECOND) == 7_000, LIMIT_S)
        elif then == "a minute":
            await server.note()
        noted_j += {"nothing": 0, "an end": 10, "growth": 11, "a minute": 10}[then] * 200
        await server.wait(5)
        await server.killed()
        again = Server(path, server.now, server.counter_j)
        users_j, gpus_j = figures(again)
        assert users_j == pytest.approx(gpus_j)
        assert users_j == pytest.approx(noted_j)
        await again.stop()

    go(work)


def _peak(state: State, key: AttemptKey) -> int | None:
    return state.tasks[key.task].attempts[-1].observed_mib


@pytest.mark.parametrize("idle_s", [2, 7])
@pytest.mark.parametrize("cleanly", [True, False])
def test_what_a_card_takes_idle_is_known_after_a_restart(tmp_path: Path, idle_s: int, cleanly: bool) -> None:
    """The idle power is a mean, or comes from the few readings that exist."""
    path = tmp_path / "carma.db"

    async def work() -> None:
        server = Server(path)
        await server.shell.commit([GpusFound(0.0, (CARD,))])
        await server.wait(idle_s)
        await server.run(FIRST, 4_000)
        await server.wait(3)
        await server.note()
        await (server.stop() if cleanly else server.killed())
        again = Server(path, server.now, server.counter_j)
        assert measured_idle_w(again.state, CARD.id) == pytest.approx(50.0)
        assert (CARD.id in again.state.idle_w) == (idle_s == 7)
        again.memory = {FIRST: 4_000}
        await again.wait(11)
        assert figures(again)[0] == pytest.approx(3 * 100 + 10 * 100)
        assert not [note for note in again.report().notes if "assumed" in note]
        await again.stop()

    go(work)


def test_the_report_names_a_gpu_whose_idle_power_is_assumed(tmp_path: Path) -> None:
    def assumed(server: Server) -> list[str]:
        return [note for note in server.report().notes if "idle power is assumed" in note]

    async def work() -> None:
        server = Server(tmp_path / "carma.db")
        await server.shell.commit([GpusFound(0.0, (CARD,))])
        await server.run(FIRST, 4_000)
        await server.wait(11)
        assert assumed(server)[0].startswith("GPU 0 was never seen without tasks")
        await server.note()
        assert assumed(server)[0].startswith("GPU 0 was never seen without tasks")  # from the archive
        await server.end(FIRST)
        await server.wait(6)
        assert assumed(server)[0].startswith("for 10 s, GPU 0 had not been seen without tasks")
        await server.stop()

    go(work)


def test_a_task_that_had_settled_does_not_warm_up_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "carma.db"

    async def work() -> None:
        server = Server(path)
        await server.shell.commit([GpusFound(0.0, (CARD,))])
        await server.run(FIRST, 4_000)
        await server.wait(10)
        await server.run(SECOND, 6_000)
        await server.wait(3)
        await server.stop()
        again = Server(path, server.now, server.counter_j)
        again.memory = dict(server.memory)
        await again.wait(3)
        first, second = views(again.state, again.now)[0].holders
        assert first.warming is None
        assert second.warming is not None
        assert "since the daemon's restart it has been seen on the GPU for 2 s" in second.warming
        await again.stop()

    go(work)


class Slow(MemoryStore):
    """A disk that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()

    def append(self, events: Sequence[Durable]) -> int:
        self.asked.set()
        assert self.answer.wait(LIMIT_S)
        return super().append(events)


def test_a_stop_does_not_cut_short_what_is_being_stored() -> None:
    """Stored but not stepped, it would be missing in the checkpoint that claims to hold it."""
    store = Slow()

    async def work() -> None:
        shell = make_shell(store, replay(store.load(), RULES, magm.POLICY).state, 0)
        writer = Writer(shell, lambda _commands, _event: None)
        running = asyncio.create_task(writer.run())
        spec = TaskSpec(command=("x",), directory="/")
        submitting = asyncio.create_task(shell.commit([TaskSubmitted(1.0, TaskId(1), Owner(1, 1, "ada"), spec)]))
        assert await asyncio.to_thread(store.asked.wait, LIMIT_S)
        running.cancel()
        await asyncio.sleep(0)
        store.answer.set()
        await asyncio.gather(running, return_exceptions=True)
        await submitting
        assert shell.sequence == 1
        await writer.close()

    go(work)
    store.reopen()
    loaded = store.load()
    assert loaded.checkpoint is not None
    assert ([task.id for task in loaded.checkpoint.tasks], loaded.events) == ([1], ())


def test_notes_of_usage_are_not_in_the_stream_of_events(tmp_path: Path) -> None:
    async def work() -> None:
        server = Server(tmp_path / "carma.db")
        heard = server.shell.subscribe()
        await two_tasks(server)
        await server.note()
        await server.end(SECOND)
        await server.stop()
        told = [event async for _, event in heard]
        assert told
        assert not [event for event in told if isinstance(event, UseNoted)]

    go(work)
    assert USAGE_S == 60.0
