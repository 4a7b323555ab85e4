"""The one writer: durable, then stepped, then acknowledged; requests share a transaction; errors stay local."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest

from carma.core.model.commands import Command, EstimateTask
from carma.core.model.events import (
    Durable,
    StopRequested,
    TaskChanged,
    TaskEstimated,
    TaskHeld,
    TaskPlaced,
    TaskSubmitted,
)
from carma.core.model.outcome import Cancelled
from carma.core.model.settings import Rules
from carma.core.model.status import Finished, Queued
from carma.core.model.values import AttemptKey, Booking, GpuId, Owner, Placement, TaskId, TaskSpec
from carma.core.policies import magm
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.state import State
from carma.daemon import writer as writer_module
from carma.daemon.shell import Shell, Subscription
from carma.daemon.writer import Fatal, Writer
from carma.errors import CarmaError, Refused, StoreError
from carma.store.memory import MemoryStore
from tests.unit.daemon.shells import make_shell, writing

OWNER = Owner(1000, 1000, "ada")
LIMIT_S = 180.0


class CountingStore(MemoryStore):
    """A store that records its transactions and refuses them on request."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions: list[tuple[Durable, ...]] = []
        self.refuse: Exception | None = None

    def append(self, events: Sequence[Durable]) -> int:
        if self.refuse is not None:
            raise self.refuse
        self.transactions.append(tuple(events))
        return super().append(events)


def submitted(task: int, held: bool = False) -> TaskSubmitted:
    return TaskSubmitted(1.0, TaskId(task), OWNER, TaskSpec(command=("true",), directory="/"), held)


@contextlib.asynccontextmanager
async def running(store: MemoryStore) -> AsyncIterator[Shell]:
    shell = make_shell(store, State(Rules(), magm.POLICY))
    async with writing(shell):
        yield shell


def go(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


def test_a_request_is_answered_when_it_is_stored_and_stepped() -> None:
    store = CountingStore()

    async def work() -> None:
        async with running(store) as shell:
            await shell.commit([submitted(1)])
            assert store.transactions == [(submitted(1),)]
            assert TaskId(1) in shell.state.tasks

    go(work())


def test_requests_that_wait_together_share_one_transaction() -> None:
    store = CountingStore()

    async def work() -> None:
        async with running(store) as shell:
            await asyncio.gather(*(shell.commit([submitted(task)]) for task in range(1, 21)))
            assert shell.sequence == 20
            assert [len(events) for events in store.transactions] == [20]

    go(work())


def test_two_requests_about_one_task_cannot_contradict_each_other() -> None:
    """The second is judged on the state after the first, although they came together."""

    def cancel(state: State) -> Sequence[Durable]:
        if isinstance(state.tasks[TaskId(1)].status, Finished):
            raise Refused("task 1 has already finished")
        return [StopRequested(2.0, TaskId(1), Cancelled("ada"), 10.0)]

    async def work() -> None:
        async with running(CountingStore()) as shell:
            await shell.commit([submitted(1)])
            answers = await asyncio.gather(shell.change(cancel), shell.change(cancel), return_exceptions=True)
            assert answers[0] is None
            assert isinstance(answers[1], Refused)
            assert shell.sequence == 2

    go(work())


def test_a_refused_request_leaves_the_others_of_its_batch_alone() -> None:
    def refuse(_state: State) -> Sequence[Durable]:
        raise Refused("no")

    async def work() -> None:
        async with running(CountingStore()) as shell:
            answers = await asyncio.gather(
                shell.commit([submitted(1)]),
                shell.change(refuse),
                shell.change(lambda _: ()),
                shell.commit([submitted(2)]),
                return_exceptions=True,
            )
            assert isinstance(answers[1], Refused)
            assert (answers[0], answers[3]) == (None, None)
            assert set(shell.state.tasks) == {1, 2}

    go(work())


@pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError(28, "No space left on device")])
def test_a_full_disk_fails_the_request_and_nothing_else(error: Exception) -> None:
    store = CountingStore()

    async def work() -> None:
        async with running(store) as shell:
            store.refuse = error
            with pytest.raises(StoreError):
                await shell.commit([submitted(1)])
            assert not shell.state.tasks
            store.refuse = None
            await shell.commit([submitted(2)])
            assert shell.sequence == 1
            assert set(shell.state.tasks) == {2}

    go(work())


def test_proposals_are_tried_again_after_the_disk_refused_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    monkeypatch.setattr(writer_module, "STORE_RETRY_S", 0.01)

    def propose(state: State, now: float, _verdicts: VerdictCache) -> list[Durable]:
        task = state.tasks.get(TaskId(1))
        return [TaskChanged(now, TaskId(1), comment="seen")] if task is not None and not task.spec.comment else []

    monkeypatch.setattr(writer_module, "propose", propose)

    async def work() -> None:
        async with running(store) as shell:
            await shell.commit([submitted(1)])
            store.refuse = StoreError("the disk is full")
            shell.reconciled.set()
            with pytest.raises(StoreError):
                await shell.commit([submitted(2)])
            store.refuse = None
            assert await shell.wait_for(lambda state: state.tasks[TaskId(1)].spec.comment == "seen", LIMIT_S)

    go(work())


def test_a_decision_that_raises_does_not_end_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(_state: State, _now: float, _verdicts: VerdictCache) -> list[Durable]:
        raise ZeroDivisionError

    monkeypatch.setattr(writer_module, "propose", propose)

    async def work() -> None:
        async with running(CountingStore()) as shell:
            shell.reconciled.set()
            await shell.commit([submitted(1)])
            await shell.commit([submitted(2)])
            assert shell.sequence == 2

    go(work())


def test_a_stored_event_that_cannot_be_stepped_ends_the_daemon() -> None:
    async def work() -> None:
        shell = make_shell(CountingStore(), State(Rules(), magm.POLICY))
        writer = asyncio.create_task(Writer(shell, lambda _commands, _event: None).run())
        placement = Placement(gpus=(GpuId("GPU-0"),), booking=Booking(memory_mib=1, source="declared"))
        with pytest.raises(CarmaError, match="TaskPlaced"):
            await shell.commit([TaskPlaced(1.0, AttemptKey(TaskId(9), 1), placement)])
        with pytest.raises(Fatal, match="TaskPlaced"):
            await writer

    go(work())


def test_commands_follow_after_their_event_is_stored() -> None:
    store = CountingStore()
    seen: list[tuple[Sequence[Command], int]] = []

    async def work() -> None:
        shell = make_shell(store, State(Rules(), magm.POLICY))
        async with writing(shell, lambda commands, _event: seen.append((commands, len(store.transactions)))):
            await shell.commit([submitted(1)])
        assert seen == [([EstimateTask(TaskId(1))], 1)]

    go(work())


def test_subscribers_get_every_event_with_its_number() -> None:
    async def work() -> None:
        async with running(CountingStore()) as shell:
            await shell.commit([submitted(1)])
            subscription = shell.subscribe()
            await shell.commit([TaskHeld(2.0, TaskId(1)), submitted(2)])
            assert [await anext(subscription), await anext(subscription)] == [
                (2, TaskHeld(2.0, TaskId(1))),
                (3, submitted(2)),
            ]
            subscription.close()
            await shell.commit([submitted(3)])
            with pytest.raises(StopAsyncIteration):
                await anext(subscription)

    go(work())


def test_the_subscription_of_a_slow_subscriber_ends() -> None:
    left: list[Subscription] = []

    async def work() -> None:
        subscription = Subscription(left.append, buffer=3)
        for number in range(5):
            subscription.put(number, submitted(number))
        assert left
        assert [number async for number, _ in subscription] == [0, 1, 2]

    go(work())


def test_a_wait_ends_when_its_predicate_holds_or_at_its_time_limit() -> None:
    async def work() -> None:
        async with running(CountingStore()) as shell:
            assert not await shell.wait_for(lambda state: TaskId(1) in state.tasks, 0.01)
            waiting = asyncio.create_task(shell.wait_for(lambda state: TaskId(1) in state.tasks, LIMIT_S))
            await asyncio.sleep(0)
            await shell.commit([submitted(1)])
            assert await waiting
            forever = asyncio.create_task(shell.wait_for(lambda _: False, LIMIT_S))
            await asyncio.sleep(0)
            shell.release()
            assert not await forever

    go(work())


def test_a_checkpoint_archives_what_has_finished_and_the_log_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "CHECKPOINT_EVERY", 4)
    store = CountingStore()

    async def work() -> None:
        async with running(store) as shell:
            await shell.commit([submitted(1), submitted(2)])
            await shell.commit([StopRequested(2.0, TaskId(1), Cancelled("ada"), 1.0)])
            await shell.commit([TaskEstimated(3.0, TaskId(2), None)])
            assert await shell.wait_for(lambda state: TaskId(1) not in state.tasks, LIMIT_S)
            assert store.task(TaskId(1)) is not None
            loaded = store.load()
            assert (loaded.events, loaded.sequence) == ((), 4)
            assert loaded.checkpoint is not None
            assert [type(task.status) for task in loaded.checkpoint.tasks] == [Queued]

    go(work())


def test_nothing_new_is_placed_while_the_daemon_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(gpus=(GpuId("GPU-0"),), booking=Booking(memory_mib=1, source="declared"))

    def propose(state: State, now: float, _verdicts: VerdictCache) -> list[Durable]:
        task = state.tasks.get(TaskId(1))
        if task is None or task.spec.comment:
            return []
        return [TaskPlaced(now, AttemptKey(TaskId(1), 1), placement), TaskChanged(now, TaskId(1), comment="kept")]

    monkeypatch.setattr(writer_module, "propose", propose)

    async def work() -> None:
        async with running(CountingStore()) as shell:
            shell.reconciled.set()
            shell.request_stop()
            await shell.commit([submitted(1), TaskEstimated(1.0, TaskId(1), None)])
            assert await shell.wait_for(lambda state: state.tasks[TaskId(1)].spec.comment == "kept", LIMIT_S)
            assert isinstance(shell.state.tasks[TaskId(1)].status, Queued)

    go(work())
