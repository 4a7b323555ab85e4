"""When runs begin, stand back, and are let go: the course over a crew of straw, with a clock of its own."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpumemnet.dataset.inside import memory_reservation as room

MODULE = "gpumemnet.dataset.inside.run_order"
LIMIT_S = 500.0


class Child:
    def __init__(self, config: dict[str, Any], need_mib: float, alone: bool) -> None:
        self.config, self.need_mib, self.alone = config, need_mib, alone
        self.state, self.lane, self.held_mib, self.passed = "starting", "light", 0.0, 0
        self.is_weighed, self.is_dismissed = True, False
        self.footprint = self.weight = None
        self.told: list[str] = []

    def enter(self, state: str) -> None:
        self.state = state

    def tell(self, word: str) -> None:
        self.told.append(word)


class Crew:
    """Remembers whom it was told to end."""

    def __init__(self, *_: Any) -> None:
        self.children: list[Child] = []
        self.ended: list[str] = []

    def start(self, config: dict[str, Any], need_mib: float, alone: bool) -> Child:
        self.children.append(Child(config, need_mib, alone))
        return self.children[-1]

    def among(self, *states: str) -> list[Child]:
        return [child for child in self.children if child.state in states]

    weighed = among

    def end(self, children: list[Child]) -> None:
        for child in list(children):
            self.ended.append(child.config["id"])
            self.children.remove(child)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> ModuleType:
    monkeypatch.setitem(sys.modules, "crew", SimpleNamespace(Crew=Crew))
    monkeypatch.setitem(sys.modules, "room", room)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    made = importlib.import_module(MODULE)
    monkeypatch.setattr(made, "time", clock)
    return made


def config(name: str) -> dict[str, Any]:
    return {"id": name, "of": name, "family": "mlp", "guess_mib": 1000}


def course(kind: Any, names: str) -> Any:
    args = SimpleNamespace(
        parallel=4, limit_s=LIMIT_S, device="cpu", steps=3, activity=False, window_s=0.3, config_limit_s=60, uuid=None
    )
    return kind(args, None, [config(name) for name in names], 100_000.0, None, 0.0)


def begun(made: Any) -> str:
    return "".join(child.config["id"] for child in made.crew.children)


def test_so_many_have_a_context_and_no_room_as_half_of_them_may_train(module: ModuleType) -> None:
    made = course(module.Course, "abcdef")
    made.start_more()
    assert (made.bench, begun(made)) == (2, "ab")


def test_who_has_no_room_begins_again_after_those_that_run_alone(module: ModuleType, clock: Clock) -> None:
    """Towards the end of the time: they are not waited for, only those that train."""
    made = course(module.Course, "abcdef")
    made.start_more()
    made.crew.children[0].enter("running")
    made.start_more()
    assert begun(made) == "abc"
    made.alone = [config("x"), config("y")]
    clock.now_s = LIMIT_S - 2 * module.ALONE_S - module.DRAIN_S - 1
    made.start_more()
    assert made.crew.ended == []
    clock.now_s += 2
    made.start_more()
    assert (sorted(made.crew.ended), begun(made)) == (["b", "c"], "a")
    made.crew.children.clear()  # it has trained
    made.start_more()
    assert begun(made) == "x"
    made.start_more()
    assert begun(made) == "x"
    made.crew.children.clear()
    made.start_more()
    made.crew.children.clear()
    assert (made.alone, len(made.queue)) == ([], 5)
    made.start_more()
    assert set(begun(made)) == {"b", "c"}


def test_the_last_ones_that_have_begun_are_not_ended_for_one_that_runs_alone(module: ModuleType) -> None:
    made = course(module.Course, "ab")
    made.alone = [config("x")]
    made.start_more()
    assert (begun(made), len(made.queue)) == ("ab", 0)
    made.start_more()
    assert (begun(made), made.crew.ended) == ("ab", [])
    made.crew.children.clear()
    made.start_more()
    assert begun(made) == "x"


@pytest.mark.parametrize("state", ["running", "prepared", "settling", "resting", "turning"])
def test_nobody_ends_while_others_are_prepared_and_watched(module: ModuleType, clock: Clock, state: str) -> None:
    made = course(module.Turns, "ab")
    made.start_more()
    made.crew.children[0].enter(state)
    made.crew.children[1].enter("waiting")
    clock.now_s = LIMIT_S + 1
    made.stop_waiting()
    assert (begun(made), made.crew.ended) == ("ab", [])
    clock.now_s = LIMIT_S + module.GRACE_S + 1
    made.stop_waiting()
    assert made.crew.ended == ["a", "b"]


def test_who_waits_is_let_go_when_the_others_are_gone(module: ModuleType, clock: Clock) -> None:
    made = course(module.Turns, "ab")
    made.start_more()
    for child in made.crew.children:
        child.enter("waiting")
    clock.now_s = LIMIT_S + 1
    made.grant()
    assert [child.told for child in made.crew.children] == [[], []], "it is too late to train"
    made.stop_waiting()
    assert made.crew.ended == ["a", "b"]


def test_in_time_who_waits_may_train(module: ModuleType) -> None:
    made = course(module.Turns, "ab")
    made.start_more()
    for child in made.crew.children:
        child.enter("waiting")
    made.grant()
    assert [child.told for child in made.crew.children] == [["go"], ["go"]]
