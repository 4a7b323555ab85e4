"""`preempt` over the API: who may ask, what is answered, what others are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from carma import errors
from carma.config import Daemon, Settings
from carma.core.model.events import PreemptionMissed, PreemptionRequested
from carma.core.model.values import SaveSignal, TaskId
from tests.unit.daemon.api_server import ALICE, BOB, Served, serving

CAROL = 1003


@pytest.fixture
def served() -> Iterator[Served]:
    """A daemon that is root; carol is an administrator."""
    with serving(own_uid=0, settings=Settings(daemon=Daemon(admins=("carol",)))) as made:
        yield made


def running(served: Served, saves: SaveSignal | None = SaveSignal(10, 45.0)) -> int:
    task = served.client(ALICE).submit(served.request("sleep", "600", checkpoint=saves)).ids[0]
    served.estimated(task)
    served.place(task)
    return task


def test_it_is_asked_by_its_owner_with_its_own_signal_and_grace(served: Served) -> None:
    task = running(served)
    note = served.client(ALICE).preempt(task, hold=True, reason="my own").note
    assert re.findall(r"\d+", note) == [str(task), "10", "45"]
    event = served.store.load().events[-1]
    assert isinstance(event, PreemptionRequested)
    assert (event.by, event.signal, event.grace_s, event.hold, event.reason) == ("alice", 10, 45.0, True, "my own")


def test_an_administrator_may_and_others_may_not(served: Served) -> None:
    task = running(served)
    with pytest.raises(errors.NotAllowed, match=r"alice.*bob"):
        served.client(BOB).preempt(task)
    assert "returns to the queue" in served.client(CAROL).preempt(task).note


def test_a_list_says_since_when_and_by_whom_it_is_asked_and_the_reason_is_the_owners(served: Served) -> None:
    task = running(served)
    served.client(CAROL).preempt(task, reason="the secret experiment")
    view = served.client(ALICE).task(task)
    assert (view.code, view.reason_code) == ("R", "Saving")
    assert view.reason.endswith(" by carol: the secret experiment")
    assert view.asked_to_save_at is not None
    assert (view.checkpoint_signal, view.checkpoint_grace_s) == (10, 45.0)
    others = served.client(BOB)
    assert others.task(task).reason.endswith(" by carol")
    assert "secret" not in repr([others.task(task), others.story(task)])
    served.emit(PreemptionMissed(served.shell.clock.now(), TaskId(task)))
    view = served.client(ALICE).task(task)
    assert (view.reason_code, view.asked_to_save_at) == ("Stayed", None)
    assert "did not end in time" in view.reason


def test_a_task_that_cannot_save_is_refused_with_the_reason(served: Served) -> None:
    alice = served.client(ALICE)
    with pytest.raises(errors.WrongState, match="signal") as caught:
        alice.preempt(running(served, None))
    assert "--checkpoint-signal" in caught.value.hint
    waiting = alice.submit(served.request("true", checkpoint=SaveSignal(10))).ids[0]
    served.estimated(waiting)
    with pytest.raises(errors.WrongState, match="running"):
        alice.preempt(waiting)
    task = running(served)
    alice.preempt(task)
    with pytest.raises(errors.WrongState, match="already"):
        alice.preempt(task)
    assert "is held" in alice.preempt(task, hold=True).note
    stopped = running(served)
    alice.cancel(stopped)
    with pytest.raises(errors.WrongState, match="is being stopped"):
        alice.preempt(stopped)
    with pytest.raises(errors.NotFound):
        alice.preempt(99)


@pytest.mark.parametrize("saves", [SaveSignal(9), SaveSignal(19), SaveSignal(0), SaveSignal(65), SaveSignal(10, 0.0)])
def test_a_signal_that_cannot_be_caught_is_refused(served: Served, saves: SaveSignal) -> None:
    with pytest.raises(errors.Usage):
        served.client(ALICE).submit(served.request("true", checkpoint=saves))
