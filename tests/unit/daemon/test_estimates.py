"""Estimates in the daemon: quick sources never wait, slow ones have a few slots, and cancelled estimates end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from carma.core.model.settings import Memory
from carma.core.model.values import Estimate, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.daemon import estimating
from carma.daemon.estimating import Estimates
from carma.estimate.declared import Declared
from carma.testing.estimator_contract import FixedEstimator

ALICE, BOB = Owner(1001, 1001, "alice"), Owner(1002, 1002, "bob")
SPEC = TaskSpec(command=("python", "train.py", "--batch", "64"), directory="/home/alice")
DECLARED = TaskSpec(command=("python", "train.py"), directory="/home/alice", gpu_memory_mib=3_000)
LIMIT_S = 180.0


class Slow:
    """Answers when the test lets it, one question after the other by name of its task."""

    name = "slow"
    quick = False

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self._gates: dict[int, threading.Event] = {}
        self._turn = threading.Lock()

    def gate(self, task: int) -> threading.Event:
        with self._turn:
            return self._gates.setdefault(task, threading.Event())

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        self.asked.append(request.task)
        assert self.gate(request.task).wait(LIMIT_S)
        self.ended.append(request.task)
        return Estimate(footprint_mib=5_000 + abs(request.task), upper_mib=6_000, source=self.name)

    def cancel(self, task: TaskId) -> None:
        self.cancelled.append(task)
        self.gate(task).set()


def made(slow: Slow, *quick: Estimator, places: int = 1, **more: Any) -> Estimates:
    memory = Memory(estimators_at_once=places)
    return Estimates((*quick, slow), memory, lambda: (), cancel_trial=slow.cancel, **more)


def go(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * LIMIT_S):
            await work

    asyncio.run(limited())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def ask(estimates: Estimates, task: int, owner: Owner = ALICE, spec: TaskSpec = SPEC) -> asyncio.Task[Any]:
    return asyncio.create_task(estimates.ask(TaskId(task), owner, spec))


def test_a_slow_estimate_delays_neither_quick_ones_nor_another_users_turn() -> None:
    async def work() -> None:
        slow = Slow()
        estimates = made(slow, Declared())
        first, second = ask(estimates, 1), ask(estimates, 2)
        await until(lambda: slow.asked == [1])
        (answer, _), _ = await ask(estimates, 3, ALICE, DECLARED)  # the only place is taken
        assert answer.source == "declared"
        of_bob = ask(estimates, 4, BOB)
        await until(lambda: estimates.stage(TaskId(4)) != "")
        for task in (1, 4, 2):
            slow.gate(task).set()
        await asyncio.gather(first, second, of_bob)
        assert slow.asked == [1, 4, 2]

    go(work())


def test_the_progress_of_an_estimate_is_known() -> None:
    async def work() -> None:
        slow = Slow()
        estimates = made(slow, places=2)
        asked = [ask(estimates, task) for task in (1, 2, 3)]
        await until(lambda: len(slow.asked) == 2 and estimates.stage(TaskId(3)) != "")
        assert estimates.stage(TaskId(1)).startswith("a trial run since ")
        assert estimates.stage(TaskId(3)) == "it waits for one of 2 places for trial runs"
        for task in (1, 2, 3):
            slow.gate(task).set()
        await asyncio.gather(*asked)
        assert [estimates.stage(TaskId(task)) for task in (1, 2, 3)] == ["", "", ""]

    go(work())


def test_an_estimate_that_is_cancelled_ends_and_gives_its_place_back() -> None:
    async def work() -> None:
        slow = Slow()
        estimates = made(slow)
        first, waiting, last = ask(estimates, 1), ask(estimates, 2), ask(estimates, 3)
        await until(lambda: slow.asked == [1] and estimates.stage(TaskId(3)) != "")
        waiting.cancel()
        first.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        assert slow.cancelled == slow.ended == [1]  # the one that waited had nothing to end
        slow.gate(3).set()
        (answer, _), _ = await last
        assert answer.footprint_mib == 5_003

    go(work())


def test_one_that_does_not_end_when_it_is_cancelled_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "CANCEL_S", 0.01)

    async def work() -> None:
        slow = Slow()
        estimates = Estimates((slow,), Memory(estimators_at_once=1), lambda: ())  # no caller could end it
        first = ask(estimates, 1)
        await until(lambda: slow.asked == [1])
        first.cancel()
        slow.gate(2).set()
        (answer, _), _ = await ask(estimates, 2)
        assert answer.footprint_mib == 5_002
        slow.gate(1).set()

    go(work())


def test_no_answer_within_the_limit_is_a_refusal_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "SPARE_S", 0.0)

    async def work() -> None:
        slow = Slow()
        memory = Memory(trial_limit_s=0.05)
        estimates = Estimates((Declared(), slow), memory, lambda: (), cancel_trial=slow.cancel)
        (answer, refusals), _ = await ask(estimates, 1)
        assert answer is None
        assert [refusal.source for refusal in refusals] == ["declared", "all"]
        assert "0.05 s" in refusals[-1].reason
        assert slow.cancelled == [1]

    go(work())


def test_a_question_about_a_task_that_is_not_there_can_be_cancelled_by_itself() -> None:
    async def work() -> None:
        slow = Slow()
        estimates = made(slow, places=2)
        one = asyncio.create_task(estimates.of_unsubmitted(ALICE, SPEC))
        two = asyncio.create_task(estimates.of_unsubmitted(ALICE, SPEC))
        await until(lambda: len(slow.asked) == 2)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        (ended,) = slow.cancelled
        (left,) = set(slow.asked) - {ended}
        slow.gate(left).set()
        assert (await two) is not None

    go(work())


def test_a_fingerprint_is_computed_without_the_numbers_of_the_command() -> None:
    async def work() -> None:
        seen: list[tuple[str, ...]] = []

        def look(request: EstimateRequest) -> str:
            seen.append(request.spec.command)
            return "abc"

        class Told(FixedEstimator):
            quick = True

            def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
                assert request.fingerprint == "abc"
                assert request.spec == SPEC
                return super().estimate(request)

        told = Told(Estimate(footprint_mib=1, upper_mib=2, source="told"))
        (answer, _), fingerprint = await ask(made(Slow(), told, fingerprint=look), 1)
        assert answer.source == "told"
        assert fingerprint == "abc"
        assert seen == [("python", "train.py", "--batch", "#")]

    go(work())


def test_a_sweep_that_is_submitted_at_once_needs_one_fingerprint() -> None:
    async def work() -> None:
        gate, looks = threading.Event(), list[tuple[str, ...]]()

        def look(request: EstimateRequest) -> str:
            looks.append(request.spec.command)
            gate.wait(LIMIT_S)
            return "abc"

        estimates = made(Slow(), Declared(), fingerprint=look)
        sweep = [replace(DECLARED, command=("python", "train.py", "--seed", str(seed))) for seed in range(20)]
        asked = [ask(estimates, place, ALICE, spec) for place, spec in enumerate((*sweep, DECLARED), start=1)]
        await until(lambda: len(looks) == 1)
        gate.set()
        assert {fingerprint for _, fingerprint in await asyncio.gather(*asked)} == {"abc"}
        assert looks == [("python", "train.py", "--seed", "#"), ("python", "train.py")]

    go(work())


def test_files_that_cannot_be_read_leave_the_fingerprint_empty() -> None:
    async def work() -> None:
        def look(_request: EstimateRequest) -> str:
            raise PermissionError("not yours")

        (answer, _), fingerprint = await ask(made(Slow(), Declared(), fingerprint=look), 1, ALICE, DECLARED)
        assert (answer.source, fingerprint) == ("declared", "")

    go(work())


def test_a_hanging_file_system_delays_only_the_users_whose_files_are_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, looks = threading.Event(), list[str]()

    def look(request: EstimateRequest) -> str:
        looks.append(request.owner.name)
        if request.owner == ALICE and len(looks) == 1:
            hangs.wait(LIMIT_S)
        return request.owner.name

    async def work() -> None:
        estimates = made(Slow(), Declared(), fingerprint=look)
        monkeypatch.setattr(estimating, "FINGERPRINT_LIMIT_S", 0.05)
        assert (await ask(estimates, 1, ALICE, DECLARED))[1] == ""
        monkeypatch.setattr(estimating, "FINGERPRINT_LIMIT_S", LIMIT_S)
        await until(lambda: looks == ["alice"])
        assert (await ask(estimates, 2, ALICE, DECLARED))[1] == ""  # and no second thread for her
        assert looks == ["alice"]
        assert (await ask(estimates, 3, BOB, DECLARED))[1] == "bob"
        hangs.set()
        while (await ask(estimates, 4, ALICE, DECLARED))[1] != "alice":  # once the drive answers again
            await asyncio.sleep(0.005)

    go(work())


def test_concurrent_questions_of_one_user_share_one_thread() -> None:
    async def work() -> None:
        before = threading.active_count()
        estimates = made(Slow(), Declared(), fingerprint=lambda _: "abc")
        await asyncio.gather(*(ask(estimates, task, ALICE, DECLARED) for task in range(1, 11)))
        estimates.close()
        await until(lambda: threading.active_count() == before)

    go(work())


@pytest.mark.parametrize("looks", [True, False])
def test_without_threads_there_is_no_estimate_and_later_there_is_one(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        slow = Slow()
        slow.gate(2).set()
        estimates = made(slow, fingerprint=(lambda _: "abc") if looks else None)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            (answer, (refusal,)), _ = await ask(estimates, 1)
            assert answer is None
            assert "can't start new thread" in refusal.reason
        (answer, _), _ = await ask(estimates, 2)
        assert answer.source == "slow"
        estimates.close()

    go(work())
