"""`pause` and `unpause` over the API: who may, what is refused, and what lists say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from carma import errors
from carma.config import Daemon, Settings
from carma.core.model.events import TaskPaused, TaskUnpaused
from carma.core.model.values import SaveSignal, TaskId
from tests.unit.daemon.api_server import ALICE, BOB, Served, serving

CAROL = 1003


@pytest.fixture
def served() -> Iterator[Served]:
    """A daemon that is root; carol is an administrator."""
    with serving(own_uid=0, settings=Settings(daemon=Daemon(admins=("carol",)))) as made:
        yield made


def running(served: Served, *command: str, **spec: Any) -> int:
    task = served.client(ALICE).submit(served.request(*(command or ("sleep", "600")), **spec)).ids[0]
    served.estimated(task)
    served.place(task)
    return task


def test_its_owner_and_administrators_pause_it_and_others_do_not(served: Served) -> None:
    task = running(served, pause=False)
    with pytest.raises(errors.NotAllowed, match=r"alice.*bob"):
        served.client(BOB).pause(task)
    assert "--no-pause keeps only CARMA from it" in served.client(ALICE).pause(task, reason="the secret demo").note
    event = served.store.load().events[-1]
    assert isinstance(event, TaskPaused)
    assert (event.by, event.reason, event.until) == ("alice", "the secret demo", None)
    with pytest.raises(errors.NotAllowed):
        served.client(BOB).unpause(task)
    assert "continues" in served.client(CAROL).unpause(task).note
    assert isinstance(served.store.load().events[-1], TaskUnpaused)


def test_lists_show_since_when_and_by_whom_and_the_reason_is_the_owners(served: Served) -> None:
    task = running(served)
    served.client(ALICE).pause(task, reason="the secret demo")
    view = served.client(ALICE).task(task)
    assert (view.state, view.code, view.reason_code) == ("running", "S", "Paused")
    assert view.paused_at is not None
    assert view.reason.startswith("paused by alice ")
    assert view.reason.endswith(": the secret demo")
    assert [gpu.paused for gpu in served.client(BOB).gpus() if gpu.tasks] == [(task,)]
    others = served.client(BOB)
    assert "secret" not in repr([others.task(task), others.story(task)])
    assert "paused by alice" in others.task(task).reason
    assert served.client(ALICE).explain(task).reason.startswith("paused by alice")


def test_a_pause_by_carma_says_for_how_long_and_a_user_may_end_or_keep_it(served: Served) -> None:
    task = running(served)
    now = served.shell.clock.now()
    served.emit(TaskPaused(now, TaskId(task), "carma", "task 5 is slowed down", now + 300.0))
    assert "paused by carma" in served.client(BOB).task(task).reason
    assert "task 5 is slowed down; for at most " in served.client(BOB).task(task).reason
    served.client(ALICE).pause(task)
    assert "at most" not in served.client(ALICE).task(task).reason
    served.client(ALICE).unpause(task)
    assert served.client(ALICE).task(task).paused_at is None


def test_twice_is_no_error_and_what_cannot_be_paused_is_refused(served: Served) -> None:
    alice = served.client(ALICE)
    task = running(served)
    for _ in range(2):
        assert "is paused" in alice.pause(task).note
    assert sum(isinstance(event, TaskPaused) for event in served.store.load().events) == 1
    for _ in range(2):
        assert "continues" in alice.unpause(task).note
    with pytest.raises(errors.WrongState, match="torchrun") as caught:
        alice.pause(running(served, "sh", "-c", "torchrun train.py"))
    assert "carma preempt" in caught.value.hint
    waiting = alice.submit(served.request("true")).ids[0]
    for verb in (alice.pause, alice.unpause):
        with pytest.raises(errors.WrongState, match="only a"):
            verb(waiting)
    saving = running(served, checkpoint=SaveSignal(10))
    alice.preempt(saving)
    with pytest.raises(errors.WrongState, match="asked to save"):
        alice.pause(saving)
    alice.cancel(task)
    with pytest.raises(errors.WrongState, match="being stopped"):
        alice.pause(task)
