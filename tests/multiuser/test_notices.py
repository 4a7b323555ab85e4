"""A notice is sent with the rights of its user, and another user does not see whom it goes to."""

from __future__ import annotations

from tests.harness import Daemon, until
from tests.multiuser.people import Person
from tests.multiuser.serving import ask_as, ended, shell


def test_a_command_runs_as_the_user_of_the_task(daemon: Daemon, bob: Person, alice: Person) -> None:
    line = "sh -c 'umask 077; id -u > told; id -G >> told'"
    task = shell(bob, daemon, "exit 3", notify={"targets": [line, "http://127.0.0.1:9/hook"], "on": ["failure"]})
    assert ended(daemon, task).exit_code == 3
    told = bob.home / "told"
    until(lambda: told.exists() and len(told.read_text().splitlines()) == 2, "the notice was sent")
    uid, groups = told.read_text().splitlines()
    assert int(uid) == bob.uid
    assert {int(group) for group in groups.split()} == set(bob.groups)
    assert told.stat().st_uid == bob.uid
    for path in (f"/tasks/{task}", f"/tasks/{task}/story"):
        seen = ask_as(alice, daemon, "GET", path)
        assert seen.status == 200
        assert b"told" not in seen.body
        assert b"hook" not in seen.body
