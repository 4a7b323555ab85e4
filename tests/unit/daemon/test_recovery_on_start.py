"""Killed between any two steps, one after the other: every commit and every launch, just before it and just after it.

The whole engine but for the device and the processes: shell, loop, executor and recovery over a store in memory and a
launcher without processes, which both outlive the daemon as the disk and the runners do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from carma.config import LoadedSettings
from carma.core.model.commands import StopAttempt
from carma.core.model.events import (
    AttemptEnded,
    Durable,
    PreemptionRequested,
    StopRequested,
    TaskPaused,
    TaskPlaced,
    TaskSubmitted,
    TaskUnpaused,
)
from carma.core.model.outcome import Cancelled, Failed, Outcome, Preempted, Succeeded
from carma.core.model.settings import Rules
from carma.core.model.status import Finished, Running
from carma.core.model.values import (
    AttemptKey,
    Capabilities,
    Gpu,
    GpuId,
    GpuSample,
    Owner,
    SaveSignal,
    TaskId,
    TaskSpec,
)
from carma.core.policies import exclusive
from carma.core.ports import LaunchOrder
from carma.core.state import State
from carma.daemon import loop as loop_module
from carma.daemon.loop import Loop
from carma.daemon.recovery_on_start import last_time, reconcile, replay
from carma.daemon.runtime import SteadyClock
from carma.daemon.shell import Shell
from carma.store.memory import MemoryStore
from carma.testing.fake_launcher import AT_ONCE, FOREVER, FakeLauncher, Plan
from tests.unit.daemon.shells import make_executor

OWNER = Owner(1000, 1000, "ada")
LIMIT_S = 180.0
CODES: dict[TaskId, int] = {TaskId(1): 0, TaskId(2): 3, TaskId(3): 0}
DEAF = TaskId(4)  # runs until SIGKILL; it is cancelled
SAVER = TaskId(5)  # runs until it is asked to save; its second attempt succeeds


class Killed(BaseException):
    """The daemon is gone. Nothing may catch it."""


class Fate:
    """Strikes at the n-th step, before or after it; from then on nothing works any more."""

    def __init__(self, at_step: int | None, after: bool = False) -> None:
        self.steps = 0
        self.dead = threading.Event()
        self._at_step, self._after = at_step, after

    @contextlib.contextmanager
    def step(self) -> Any:
        if self.dead.is_set():
            raise Killed
        self.steps += 1
        mine = self.steps == self._at_step
        if mine and not self._after:
            self._strike()
        yield
        if mine:
            self._strike()

    def _strike(self) -> None:
        self.dead.set()
        raise Killed


class MortalStore(MemoryStore):
    fate = Fate(None)

    def append(self, events: Sequence[Durable]) -> int:
        with self.fate.step():
            return super().append(events)


class MortalLauncher(FakeLauncher):
    def __init__(self) -> None:
        super().__init__(_becomes)
        self.fate = Fate(None)

    def launch(self, order: LaunchOrder) -> None:
        with self.fate.step():
            super().launch(order)

    def signal(self, key: AttemptKey, signal: int) -> None:
        with self.fate.step():
            super().signal(key, signal)

    def pause(self, key: AttemptKey) -> bool:
        with self.fate.step():
            return super().pause(key)

    def unpause(self, key: AttemptKey) -> bool:
        with self.fate.step():
            return super().unpause(key)

    def request_checkpoint(self, key: AttemptKey, signal: int, asked_at: float) -> bool:
        with self.fate.step():
            return super().request_checkpoint(key, signal, asked_at)


def _becomes(order: LaunchOrder) -> Plan:
    if order.key.task == SAVER:
        return AT_ONCE if order.preempted else Plan(saves_in_s=0.0)
    code = CODES.get(order.key.task)
    if code is None:
        return Plan(ignores=(15,))
    return Plan(outcome=Succeeded() if code == 0 else Failed(code), after_s=0.0)


class OneGpu:
    """core.ports.Sampler with one idle GPU."""

    gpu = Gpu(id=GpuId("GPU-0"), index=0, name="Test", memory_mib=8192, capabilities=Capabilities(processes=True))

    def gpus(self) -> tuple[Gpu, ...]:
        return (self.gpu,)

    def sample(self, at: float) -> tuple[GpuSample, ...]:
        return (GpuSample(gpu=self.gpu.id, at=at, memory_used_mib=0, processes=()),)

    def sample_memory(self, gpus: Sequence[GpuId], at: float) -> tuple[GpuSample, ...]:
        return self.sample(at) if self.gpu.id in gpus else ()

    def close(self) -> None:
        pass


Work = Callable[[Shell, Loop, Any], Coroutine[Any, Any, None]]


async def one_life(store: MortalStore, launcher: MortalLauncher, fate: Fate, work: Work | None = None) -> bool:
    """One life of the daemon, until all is done (True) or until it is killed (False)."""
    store.fate = launcher.fate = fate
    loaded = store.load()
    replayed = replay(loaded, Rules(), exclusive.POLICY)
    shell = Shell(
        state=replayed.state,
        sequence=replayed.sequence,
        store=store,
        clock=SteadyClock(not_before=last_time(loaded)),
        loaded=LoadedSettings(cast(Any, None), {}),
        paths=cast(Any, None),
    )
    loop = Loop(shell, make_executor(shell, launcher), OneGpu(), period_s=0.02)
    running = asyncio.create_task(loop.run())
    ending = asyncio.create_task((work or _work)(shell, loop, replayed))
    dead = asyncio.create_task(asyncio.to_thread(fate.dead.wait, LIMIT_S))
    await asyncio.wait({ending, dead}, return_when=asyncio.FIRST_COMPLETED)
    alive = not fate.dead.is_set()
    if alive:
        ending.result()
    fate.dead.set()
    for task in (ending, running):
        task.cancel()
    await asyncio.gather(ending, running, dead, return_exceptions=True)
    await loop.close()
    for thread in (shell._store_thread, *shell._read_threads):
        thread.close()  # a killed process has no threads; one that still wrote would disturb the next life
    return alive


async def _work(shell: Shell, loop: Loop, replayed: Any) -> None:
    """A user who submits what is not there yet, cancels the deaf one when it runs, and waits for the end."""
    await reconcile(shell, loop, replayed)
    for task in (*CODES, DEAF, SAVER):
        if task not in shell.state.tasks:
            saves = SaveSignal(10) if task == SAVER else None
            spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=100, checkpoint=saves)
            await shell.commit([TaskSubmitted(shell.clock.now(), task, OWNER, spec)])
    await shell.wait_for(lambda state: DEAF in state.active or _over(state, DEAF), LIMIT_S)

    def cancel(state: State) -> Sequence[Durable]:
        if _over(state, DEAF):
            return ()
        return (StopRequested(shell.clock.now(), DEAF, Cancelled("ada"), 0.01),)

    def preempt(state: State) -> Sequence[Durable]:
        status = state.tasks[SAVER].status
        if not isinstance(status, Running) or status.preempting is not None or state.tasks[SAVER].key.attempt > 1:
            return ()
        return (PreemptionRequested(shell.clock.now(), SAVER, "ada", 10, LIMIT_S),)

    await shell.change(cancel)
    await shell.wait_for(lambda state: isinstance(state.tasks[SAVER].status, Running) or _over(state, SAVER), LIMIT_S)
    await shell.change(preempt)
    assert await shell.wait_for(lambda state: all(_over(state, task) for task in (*CODES, DEAF, SAVER)), LIMIT_S)


def _over(state: State, task: TaskId) -> bool:
    return isinstance(state.tasks[task].status, Finished)


def check(store: MortalStore, launcher: MortalLauncher) -> None:
    state = replay(store.load(), Rules(), exclusive.POLICY).state
    wanted: dict[TaskId, Outcome] = {task: Failed(code) if code else Succeeded() for task, code in CODES.items()}
    wanted[DEAF] = Cancelled("ada")
    for task, outcome in wanted.items():
        status = state.tasks[task].status
        assert isinstance(status, Finished)
        assert status.outcome == outcome
        assert len(state.tasks[task].attempts) == 1
    assert [attempt.outcome for attempt in state.tasks[SAVER].attempts] == [Preempted("ada", "", 0), Succeeded()]
    assert launcher.checkpoint_requests == [(AttemptKey(SAVER, 1), 10)], "once"
    launched = [order.key for order in launcher.launched]
    assert len(launched) == len(set(launched))
    # The deaf one may have been cancelled between its placement and its launch; then it never starts.
    assert {key.task for key in launched} | {DEAF} == {*CODES, DEAF, SAVER}
    events = store.load().events
    for kind in (TaskPlaced, AttemptEnded):
        keys = [event.key for event in events if isinstance(event, kind)]
        assert len(keys) == len(set(keys)) == 6
    assert not state.active


def lives(fate: Fate) -> tuple[MortalStore, MortalLauncher]:
    store, launcher = MortalStore(), MortalLauncher()

    async def work() -> None:
        async with asyncio.timeout(LIMIT_S):
            if not await one_life(store, launcher, fate):
                assert await one_life(store, launcher, Fate(None))

    asyncio.run(work())
    return store, launcher


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_after_a_kill_at_any_step_nothing_is_lost_and_nothing_is_done_twice(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.01)
    whole = Fate(None)
    check(*lives(whole))
    assert whole.steps > 15
    for number in range(1, whole.steps + 1):
        check(*lives(Fate(number, after)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_after_a_kill_between_a_pause_and_its_effect_the_processes_are_as_the_state_says(after: bool) -> None:
    """Also between the end of a pause and its effect: the next daemon makes up for whatever was left."""

    async def life(store: MortalStore, launcher: MortalLauncher, fate: Fate, key: AttemptKey) -> None:
        async def work(shell: Shell, loop: Loop, replayed: Any) -> None:
            await reconcile(shell, loop, replayed)
            if not shell.state.tasks:
                spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=100)
                await shell.commit([TaskSubmitted(shell.clock.now(), key.task, OWNER, spec)])
            await shell.wait_for(lambda state: isinstance(state.tasks[key.task].status, Running), LIMIT_S)
            for event in (TaskPaused, TaskUnpaused) if key.task not in paused else ():
                paused.append(key.task)
                await shell.commit([event(shell.clock.now(), key.task, "ada")])
            while (key in launcher.paused) != (shell.state.tasks[key.task].paused is not None):
                await asyncio.sleep(0.001)

        paused: list[TaskId] = []
        if not await one_life(store, launcher, fate, work):
            paused.append(key.task)
            assert await one_life(store, launcher, Fate(None), work)

    def lives_of(fate: Fate) -> Fate:
        store, launcher = MortalStore(), MortalLauncher()
        asyncio.run(asyncio.wait_for(life(store, launcher, fate, AttemptKey(DEAF, 1)), LIMIT_S))
        return fate

    whole = lives_of(Fate(None))
    assert whole.steps >= 8
    for number in range(1, whole.steps + 1):
        lives_of(Fate(number, after))


def test_a_stop_from_before_a_restart_gets_no_second_grace_period() -> None:
    """What is left of the grace is counted from the time of the request."""
    launcher = FakeLauncher(lambda _: FOREVER)
    stop = StopAttempt(AttemptKey(TaskId(1), 1), grace_s=100.0)

    async def work() -> None:
        shell = cast(Any, type("S", (), {"clock": SteadyClock(), "state": State(Rules(), exclusive.POLICY)}))
        executor = make_executor(shell, launcher)
        executor.execute(stop, at=shell.clock.now() - 90.0)
        assert min(executor._kill_at.values()) - shell.clock.now() < 11.0
        await executor.close()

    asyncio.run(work())
