"""Notices: which event of a task gives one, once, and until it is sent."""

from __future__ import annotations

import pytest

from carma.core.model import events as e
from carma.core.model.outcome import Cancelled, Failed, Outcome, Succeeded, TimedOut
from carma.core.model.settings import NotifyRules, Rules
from carma.core.model.values import NoticeKind, Notify, TaskId
from carma.daemon.state_checkpoint import checkpoint, forget, restore
from carma.testing.builders import World

ALL = Notify(targets=("mail",), on=("finish", "failure", "oom", "retry", "wait"))
RULES = Rules(notify=NotifyRules(wait_s=600.0))


def kinds(world: World, task: TaskId) -> list[NoticeKind]:
    return [notice.kind for notice in world.task(task).notices]


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [(Succeeded(), "finish"), (Failed(3), "failure"), (TimedOut(5.0), "failure"), (Cancelled("bob"), "failure")],
)
def test_the_end_of_a_task_gives_one_notice(outcome: Outcome, kind: str) -> None:
    world = World(1)
    task = world.run(1_024, notify=ALL)
    world.end(task, outcome)
    world.settle()
    assert kinds(world, task) == [kind]


def test_a_user_who_cancels_a_task_gets_no_notice() -> None:
    world = World(1)
    task = world.submit(1_024, notify=ALL)
    world.stop(task, by="alice")
    assert kinds(world, task) == []


def test_an_out_of_memory_failure_and_its_retry_give_one_notice() -> None:
    world = World(1)
    task = world.run(1_024, notify=ALL)
    world.oom(task)
    world.settle()
    assert kinds(world, task) == ["oom"]


def test_an_out_of_memory_failure_that_is_not_retried_counts_as_a_failure() -> None:
    world = World(1)
    task = world.run(1_024, notify=Notify(targets=("mail",), on=("retry", "failure")), max_oom_retries=0)
    world.oom(task)
    world.settle()
    assert kinds(world, task) == ["failure"]


def test_events_that_no_target_wants_give_none() -> None:
    world = World(1)
    plain = world.run(1_024)
    world.end(plain, Failed(1))
    quiet = world.run(1_024, notify=Notify(targets=("mail",), on=("finish",)))
    world.end(quiet, Failed(1))
    world.settle()
    assert kinds(world, plain) == kinds(world, quiet) == []


def test_the_administrators_targets_concern_every_task() -> None:
    world = World(1, rules=Rules(notify=NotifyRules(targets_file="/etc/targets", on=("failure",))))
    task = world.run(1_024)
    world.end(task, Failed(1))
    world.settle()
    assert kinds(world, task) == ["failure"]


def test_a_long_wait_gives_a_notice_once() -> None:
    world = World(1, rules=RULES)
    waits = world.submit(99_999, notify=ALL)
    held = world.submit(99_999, notify=ALL, held=True)
    world.wait(599, every_s=50)
    assert world.settle() == []
    world.wait(2)
    assert world.settle() == [e.NoticeDue(world.now, waits)]
    world.wait(5_000, every_s=500)
    assert world.settle() == []
    assert (kinds(world, waits), kinds(world, held)) == (["wait"], [])


def test_a_notice_that_was_not_sent_outlasts_a_checkpoint_and_a_finished_task_waits_for_it() -> None:
    world = World(1)
    task = world.run(1_024, notify=ALL)
    world.end(task)
    world.settle()
    world.wait(2)
    saved, finished = checkpoint(world.state, len(world.log))
    assert finished == ()
    notices = restore(world.state.rules, world.state.policy, saved).tasks[task].notices
    assert notices == world.task(task).notices
    world.emit(e.NoticeSent(world.now, task, "finish", notices[0].at))
    assert kinds(world, task) == []
    _, finished = checkpoint(world.state, len(world.log))
    forget(world.state, finished)
    assert task not in world.state.tasks
