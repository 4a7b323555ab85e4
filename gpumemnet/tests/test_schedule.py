"""When runs start, wait and train: the schedule over a scripted pool of workers, with a scripted clock."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpumemnet.dataset.inside import memory_reservation

MODULE = "gpumemnet.dataset.inside.schedule"
LIMIT_S = 500.0


class Worker:
    def __init__(self, config: dict[str, Any], need_mib: float, alone: bool) -> None:
        self.config, self.need_mib, self.alone = config, need_mib, alone
        self.state, self.queue, self.held_mib, self.times_passed = "starting", "light", 0.0, 0
        self.is_read, self.is_released = True, False
        self.footprint = self.last_footprint = None
        self.messages: list[str] = []

    def enter(self, state: str) -> None:
        self.state = state

    def send(self, word: str) -> None:
        self.messages.append(word)


class Pool:
    """Records which workers were ended."""

    def __init__(self, *_: Any) -> None:
        self.workers: list[Worker] = []
        self.ended: list[str] = []

    def start(self, config: dict[str, Any], need_mib: float, alone: bool) -> Worker:
        self.workers.append(Worker(config, need_mib, alone))
        return self.workers[-1]

    def among(self, *states: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.state in states]

    read_among = among

    def end(self, workers: list[Worker]) -> None:
        for worker in list(workers):
            self.ended.append(worker.config["id"])
            self.workers.remove(worker)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> ModuleType:
    stand_in = SimpleNamespace(WorkerPool=Pool, train_and_answer=lambda: None)
    monkeypatch.setitem(sys.modules, "worker_pool", stand_in)
    monkeypatch.setitem(sys.modules, "memory_reservation", memory_reservation)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    made = importlib.import_module(MODULE)
    monkeypatch.setattr(made, "time", clock)
    return made


def config(name: str) -> dict[str, Any]:
    return {"id": name, "of": name, "family": "mlp", "guess_mib": 1000}


def schedule(kind: Any, names: str) -> Any:
    args = SimpleNamespace(
        parallel=4, limit_s=LIMIT_S, device="cpu", steps=3, activity=False, window_s=0.3, config_limit_s=60, uuid=None
    )
    return kind(args, None, [config(name) for name in names], 100_000.0, None, 0.0)


def begun(made: Any) -> str:
    return "".join(worker.config["id"] for worker in made.pool.workers)


def test_half_of_the_parallel_workers_are_on_standby(module: ModuleType) -> None:
    made = schedule(module.Schedule, "abcdef")
    made.start_more()
    assert (made.standby, begun(made)) == (2, "ab")


def test_standby_workers_start_again_after_runs_that_are_alone(module: ModuleType, clock: Clock) -> None:
    """Towards the end of the time only training workers are waited for."""
    made = schedule(module.Schedule, "abcdef")
    made.start_more()
    made.pool.workers[0].enter("running")
    made.start_more()
    assert begun(made) == "abc"
    made.alone = [config("x"), config("y")]
    clock.now_s = LIMIT_S - 2 * module.ALONE_S - module.DRAIN_S - 1
    made.start_more()
    assert made.pool.ended == []
    clock.now_s += 2
    made.start_more()
    assert (sorted(made.pool.ended), begun(made)) == (["b", "c"], "a")
    made.pool.workers.clear()  # it has trained
    made.start_more()
    assert begun(made) == "x"
    made.start_more()
    assert begun(made) == "x"
    made.pool.workers.clear()
    made.start_more()
    made.pool.workers.clear()
    assert (made.alone, len(made.queue)) == ([], 5)
    made.start_more()
    assert set(begun(made)) == {"b", "c"}


def test_the_last_standby_workers_are_not_ended_for_a_run_that_is_alone(module: ModuleType) -> None:
    made = schedule(module.Schedule, "ab")
    made.alone = [config("x")]
    made.start_more()
    assert (begun(made), len(made.queue)) == ("ab", 0)
    made.start_more()
    assert (begun(made), made.pool.ended) == ("ab", [])
    made.pool.workers.clear()
    made.start_more()
    assert begun(made) == "x"


@pytest.mark.parametrize("state", ["running", "prepared", "settling", "resting", "turning"])
def test_no_worker_ends_while_others_are_prepared_or_measured(module: ModuleType, clock: Clock, state: str) -> None:
    made = schedule(module.ActivitySchedule, "ab")
    made.start_more()
    made.pool.workers[0].enter(state)
    made.pool.workers[1].enter("waiting")
    clock.now_s = LIMIT_S + 1
    made.stop_waiting()
    assert (begun(made), made.pool.ended) == ("ab", [])
    clock.now_s = LIMIT_S + module.GRACE_S + 1
    made.stop_waiting()
    assert made.pool.ended == ["a", "b"]


def test_after_the_limit_waiting_workers_end_with_the_others(module: ModuleType, clock: Clock) -> None:
    made = schedule(module.ActivitySchedule, "ab")
    made.start_more()
    for worker in made.pool.workers:
        worker.enter("waiting")
    clock.now_s = LIMIT_S + 1
    made.grant()
    assert [worker.messages for worker in made.pool.workers] == [[], []], "it is too late to train"
    made.stop_waiting()
    assert made.pool.ended == ["a", "b"]


def test_before_the_limit_waiting_workers_train(module: ModuleType) -> None:
    made = schedule(module.ActivitySchedule, "ab")
    made.start_more()
    for worker in made.pool.workers:
        worker.enter("waiting")
    made.grant()
    assert [worker.messages for worker in made.pool.workers] == [["go"], ["go"]]
