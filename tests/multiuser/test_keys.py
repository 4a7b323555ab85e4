"""The kernel's keyrings: a task has a session keyring of its own.

A process that inherits a session keyring may read its keys: Kerberos tickets, passwords of network drives, disk keys.
"""

from __future__ import annotations

import secrets
import shutil

import pytest

from tests.harness import until
from tests.multiuser.keys import SESSION_KEYRING, keyring_calls, with_a_session_key
from tests.multiuser.people import ROOT, Person
from tests.multiuser.serving import ended, output_of, resting_root_daemon, shell


@pytest.fixture(scope="module")
def calls() -> tuple[int, int]:
    found = keyring_calls()
    try:
        ROOT.act(lambda: with_a_session_key("carma-test", *found))
    except OSError as error:
        pytest.skip(f"there are no keyrings here: {error.strerror}")
    return found


def prelude(mark: str, calls: tuple[int, int]) -> str:
    """Code for the daemon's process."""
    return f"from tests.multiuser.keys import with_a_session_key; with_a_session_key({mark!r}, *{calls})"


def test_a_task_does_not_get_the_keys_of_the_daemons_session(alice: Person, calls: tuple[int, int]) -> None:
    """A daemon that root starts in a login session has the keys of that session."""
    mark = f"mark{secrets.token_hex(8)}"
    with resting_root_daemon() as daemon:
        daemon.prelude = prelude(mark, calls)
        daemon.start()
        assert mark not in output_of(alice, daemon, "cat /proc/keys")


def test_a_task_does_not_see_the_keys_of_another_users_task(alice: Person, bob: Person, calls: tuple[int, int]) -> None:
    """Under systemd the daemon has a session keyring of its own. Tasks that inherit it have one in common."""
    if shutil.which("perl", path="/usr/bin:/bin") is None:
        pytest.skip("perl, which makes the system call in the task, is not installed")
    mark = f"mark{secrets.token_hex(8)}"
    texts = f'my ($kind, $name, $text) = ("user", "{mark}", "secret");'
    call = f"{texts} exit(syscall({calls[0]}, $kind, $name, $text, 6, {SESSION_KEYRING}) > 0 ? 0 : 9)"
    ready = bob.home / f"ready-{mark}"
    with resting_root_daemon() as daemon:
        daemon.prelude = prelude("of-the-daemon", calls)
        daemon.start()
        task = shell(bob, daemon, f"perl -e '{call}' || exit 9; touch {ready}; sleep 600")
        until(lambda: ready.exists() or daemon.client.task(task).state == "finished", "the key is there")
        assert ready.exists(), ended(daemon, task)
        assert mark not in output_of(alice, daemon, "cat /proc/keys")
