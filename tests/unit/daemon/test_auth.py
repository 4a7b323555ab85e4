"""The kernel names the user who asks; other users may see and do little."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from carma import errors
from carma.config import Daemon, Settings
from carma.core.model.events import StopRequested
from carma.core.model.outcome import Failed
from carma.core.model.values import TaskId
from carma.daemon.auth import Authenticator, Identity, Peer, UserNames, read_peer, require_admin, uid_of
from carma.wire.api_types import UpdateRequest
from tests.unit.daemon.api_server import ALICE, BOB, DAEMON, PEOPLE, Served, serving

CAROL = 1003


@pytest.fixture
def served() -> Iterator[Served]:
    """A daemon that is root; carol is an administrator."""
    with serving(own_uid=0, settings=Settings(daemon=Daemon(admins=("carol",)))) as made:
        yield made


def alices(served: Served, **spec: Any) -> int:
    return served.client(ALICE).submit(served.request("sleep", "7", **spec)).ids[0]


def test_the_kernel_says_who_connected() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert read_peer(ours) == Peer(os.getpid(), os.geteuid(), os.getegid())


def test_a_name_is_looked_up_once_and_an_unknown_user_has_a_name_too() -> None:
    asked: list[int] = []

    def look_up(uid: int) -> str:
        asked.append(uid)
        return PEOPLE[uid]

    names = UserNames(look_up)
    assert [names.of(ALICE), names.of(ALICE), names.of(77), names.of(77)] == ["alice", "alice", "uid 77", "uid 77"]
    assert asked == [ALICE, 77, 77]  # an account may be made later


def test_a_users_name_or_number_gives_the_uid() -> None:
    assert uid_of("root") == 0
    assert uid_of("1234") == uid_of("uid 1234") == 1234
    assert uid_of("nobody-of-that-name") is None
    assert uid_of("a\0b") is None
    assert uid_of("9" * 50) is None


@pytest.mark.parametrize(
    ("own", "uid", "admin"),
    [(0, 0, True), (0, ALICE, False), (0, CAROL, True), (DAEMON, DAEMON, True), (DAEMON, 0, True)],
)
def test_administrators_are_root_the_daemons_user_and_those_named(own: int, uid: int, admin: bool) -> None:
    authenticator = Authenticator(("carol",), own_uid=own, names=UserNames(PEOPLE.__getitem__))
    assert authenticator.identify(Peer(1, uid, uid)).admin == admin


def test_only_administrators_pass_as_such() -> None:
    require_admin(Identity(uid=0, gid=0, name="root", admin=True), "drain")
    with pytest.raises(errors.NotAllowed, match=r"drain.*alice"):
        require_admin(Identity(uid=ALICE, gid=ALICE, name="alice"), "drain")


def test_a_daemon_that_is_not_root_serves_its_own_user_and_root_only() -> None:
    with serving() as served:
        with pytest.raises(errors.NotAllowed, match=r"carmad.*alice") as caught:
            served.client(ALICE)
        assert "carma up" in caught.value.hint
        assert served.client(0).server().you_are_admin


def test_the_submitter_is_the_peer_whatever_the_request_says(served: Served) -> None:
    task = alices(served, environment={"PATH": "/bin", "USER": "root", "LOGNAME": "bob"})
    view = served.client(0).task(task)
    assert (view.user, view.uid) == ("alice", ALICE)


def test_others_see_that_a_task_is_there_and_not_what_it_runs(served: Served) -> None:
    task = alices(served, comment="my secret", gpu_memory_mib=2_000)
    served.estimated(task)
    served.end(served.place(task), Failed(1, "password=hunter2"))
    bob = served.client(BOB)
    view = bob.task(task)
    assert (view.user, view.state, view.exit_code, view.gpu_memory_mib) == ("alice", "finished", 1, 2_000)
    assert (view.name, view.command, view.directory, view.comment) == ("-", ("-",), "-", "")
    assert view.attempts[0].stdout == ""
    told = [line.text for line in bob.story(task)]
    shown = repr((view, bob.history(user="all"), told))
    assert not any(secret in shown for secret in ("hunter2", "secret", "sleep"))
    assert "hunter2" in repr(served.client(ALICE).task(task))
    assert "hunter2" in repr(served.client(CAROL).task(task))


def test_a_list_shows_the_callers_own_tasks_by_default(served: Served) -> None:
    task = alices(served)
    bob = served.client(BOB)
    assert bob.tasks() == []
    assert [view.id for view in bob.tasks(user="all")] == [task]
    assert [view.id for view in bob.tasks(user=str(ALICE))] == [task]


def test_only_the_owner_may_change_a_task(served: Served) -> None:
    task = alices(served)
    bob = served.client(BOB)
    for verb in (
        lambda: bob.cancel(task),
        lambda: bob.hold(task),
        lambda: bob.release(task),
        lambda: bob.retry(task),
        lambda: bob.update(task, UpdateRequest(name="x")),
        lambda: list(bob.logs(task)),
    ):
        with pytest.raises(errors.NotAllowed, match=r"alice.*bob") as caught:
            verb()
        assert caught.value.exit_code == 4
    assert len(served.store.story(TaskId(task))) == 1  # nothing but the submission happened
    with pytest.raises(errors.NotFound):
        bob.cancel(99)


def test_an_administrator_may_and_the_story_says_who_it_was(served: Served) -> None:
    task = alices(served)
    served.client(CAROL).cancel(task)
    event = served.store.load().events[-1]
    assert isinstance(event, StopRequested)
    assert served.client(ALICE).task(task).reason == "cancelled by carol"


def test_the_reason_of_a_stop_is_hidden_from_other_users(served: Served) -> None:
    task = alices(served)
    served.estimated(task)
    served.place(task)
    served.client(ALICE).cancel(task, reason="the secret experiment is over")
    assert "secret" in served.client(ALICE).task(task).reason
    assert served.client(BOB).task(task).reason == "is being stopped: cancelled by alice"


def test_what_concerns_all_is_for_administrators(served: Served) -> None:
    bob = served.client(BOB)
    for verb in (bob.drain, bob.resume, bob.shutdown):
        with pytest.raises(errors.NotAllowed, match="for administrators"):
            verb()
    assert not served.shell.stopping.is_set()
    assert not served.shell.state.drained


def test_only_administrators_raise_a_priority_above_0(served: Served) -> None:
    alice = served.client(ALICE)
    with pytest.raises(errors.NotAllowed, match="priority 1"):
        alice.submit(served.request(priority=1))
    task = alice.submit(served.request(priority=-3)).ids[0]
    assert alice.update(task, UpdateRequest(priority=0)).priority == 0
    with pytest.raises(errors.NotAllowed, match="priority"):
        alice.update(task, UpdateRequest(priority=5))
    assert served.client(CAROL).update(task, UpdateRequest(priority=5)).priority == 5
    assert alice.update(task, UpdateRequest(priority=4)).priority == 4  # stepping back is always allowed
