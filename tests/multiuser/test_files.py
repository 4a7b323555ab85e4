"""The daemon's own files: closed to users, in directories that no other user can exchange."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carma.client import Client
from carma.core.model.values import TaskSpec
from carma.errors import BadSettings, NotAllowed
from carma.wire.api_types import SubmitRequest
from tests.harness import LIMIT_S, Daemon, until
from tests.multiuser.people import PATH, ROOT, Person, run_cli
from tests.multiuser.serving import (
    ask_as,
    end_all_tasks,
    ended,
    pid_of,
    resting_root_daemon,
    root_daemon,
    shell,
    try_submit,
)


def everything_below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(place, name)


def is_virtual_gpu(path: Path) -> bool:
    """Tasks of all users share them; docs/security.md says what that means."""
    return "vgpu" in path.parts


@pytest.fixture
def unused_daemon() -> Iterator[Daemon]:
    """A daemon of this test only: in the shared daemon's directory other tests leave files that all users can open."""
    with root_daemon() as daemon:
        yield daemon
        end_all_tasks(daemon)


def test_no_file_of_the_daemon_can_be_opened_by_a_user(unused_daemon: Daemon, alice: Person, bob: Person) -> None:
    """While a task of another user runs and after another task of that user has ended."""
    daemon = unused_daemon
    ended(daemon, shell(bob, daemon, "echo done"))
    pid_of(daemon, shell(bob, daemon, "echo out; sleep 600"))
    harmless = {daemon.paths.pid_file, daemon.home / "test-daemon.log"}
    files = [path for path in everything_below(daemon.home) if not is_virtual_gpu(path) and path not in harmless]

    def opened() -> list[str]:
        found = []
        for path in files:
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_APPEND):
                with contextlib.suppress(OSError):
                    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
                    found.append(f"{path} {flags}")
        return [each for each in found if not os.path.isdir(each.split()[0])]

    assert daemon.paths.database in files
    assert alice.act(opened) == []


def test_no_directory_of_the_daemon_can_be_changed_by_a_user(unused_daemon: Daemon, alice: Person, bob: Person) -> None:
    daemon = unused_daemon
    ended(daemon, shell(bob, daemon, "echo done"))
    places = (daemon.home, *everything_below(daemon.home))
    folders = [path for path in places if path.is_dir() and not is_virtual_gpu(path)]

    def changed() -> list[str]:
        found = []
        for folder in folders:
            with contextlib.suppress(OSError):
                (folder / "mine").touch()
                found.append(str(folder))
        return found

    assert alice.act(changed) == []


def test_a_daemon_that_was_started_with_an_open_umask_leaves_nothing_open(alice: Person, bob: Person) -> None:
    """An administrator's shell may have any umask. A user who can write daemon.pid chooses what root's scripts kill."""
    with resting_root_daemon() as daemon:
        daemon.popen_options = {"umask": 0}
        daemon.start()
        for person in (alice, bob):
            assert ended(daemon, shell(person, daemon, "echo done", umask=0)).exit_code == 0
        found = [path for path in everything_below(daemon.home) if not is_virtual_gpu(path) and not path.is_symlink()]
        open_to_all = [path for path in found if path.stat().st_mode & stat.S_IWOTH and not path.is_socket()]
        assert open_to_all == []


def test_the_environment_of_a_task_is_kept_no_longer_than_it_runs(daemon: Daemon, bob: Person) -> None:
    """Except in the database, which only root can read: a task may be retried."""
    mark = f"mark{secrets.token_hex(8)}"
    task = shell(bob, daemon, "echo done", environment={"PATH": PATH, "API_KEY": mark})
    ended(daemon, task)

    def left() -> list[str]:
        files = [path for path in everything_below(daemon.paths.log_dir) if path.is_file()]
        return [str(path) for path in files if mark.encode() in path.read_bytes()]

    until(lambda: not left(), f"no file among the logs holds the environment, but {left()} does", limit_s=10.0)


def test_the_environment_of_a_running_task_is_readable_by_its_owner_only(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    mark = f"mark{secrets.token_hex(8)}"
    pid = pid_of(daemon, shell(bob, daemon, "sleep 600", environment={"PATH": PATH, "API_KEY": mark}))
    files = [path for path in everything_below(daemon.home) if path.is_file()] + [Path(f"/proc/{pid}/environ")]

    def read() -> list[str]:
        found = []
        for path in files:
            with contextlib.suppress(OSError):
                if mark.encode() in path.read_bytes():
                    found.append(str(path))
        return found

    assert alice.act(read) == []


# Where the daemon is put.


def own_it(home: Path, alice: Person, aside: Path) -> None:
    del aside
    alice.own(home)


def let_everybody_write(home: Path, alice: Person, aside: Path) -> None:
    del alice, aside
    home.chmod(0o777)


def let_her_group_write(home: Path, alice: Person, aside: Path) -> None:
    del aside
    os.chown(home, 0, alice.gid)
    home.chmod(0o775)


def put_a_link_there(home: Path, alice: Person, aside: Path) -> None:
    """Puts a link where root's directory will be, as in /tmp: it can lead to root's directory today and to hers
    tomorrow."""
    home.rmdir()
    aside.mkdir()
    alice.own_link(home, aside)


def own_the_logs(home: Path, alice: Person, aside: Path) -> None:
    del aside
    (home / "logs").mkdir()
    alice.own(home / "logs")


def put_a_link_for_the_logs(home: Path, alice: Person, aside: Path) -> None:
    aside.mkdir()
    alice.own_link(home / "logs", aside)


SQUATTING: dict[str, Callable[[Path, Person, Path], None]] = {
    function.__name__: function
    for function in (
        own_it,
        let_everybody_write,
        let_her_group_write,
        put_a_link_there,
        own_the_logs,
        put_a_link_for_the_logs,
    )
}


@pytest.mark.parametrize("squat", SQUATTING.values(), ids=SQUATTING.keys())
def test_root_does_not_start_in_a_directory_that_a_user_controls(
    alice: Person, squat: Callable[[Path, Person, Path], None]
) -> None:
    with resting_root_daemon() as daemon:
        aside = daemon.home.with_name(f"{daemon.home.name}-aside")
        log = daemon.home.with_name(f"{daemon.home.name}.log")
        try:
            squat(daemon.home, alice, aside)
            daemon.log_file = log
            assert daemon.spawn().wait(LIMIT_S) != 0
            assert not daemon.paths.socket.exists()
            assert not (daemon.home / "carma.db").exists()
        finally:
            log.unlink(missing_ok=True)
            if daemon.home.is_symlink():
                daemon.home.unlink()
            if aside.is_dir():
                aside.rmdir()


def test_root_does_not_start_below_a_directory_that_a_user_owns(alice: Person) -> None:
    """She could rename the daemon's directory and put one of her own in its place."""
    hers = alice.folder(f"hers-{secrets.token_hex(4)}", 0o755)
    inner = hers / "carma"
    inner.mkdir()
    daemon = Daemon(inner)
    try:
        assert daemon.spawn().wait(LIMIT_S) != 0
        assert not daemon.paths.database.exists()
    finally:
        daemon.clean()


# Sockets that are not the daemon's.


@pytest.mark.parametrize("victim", ["bob", "root"])
def test_a_users_socket_in_the_daemons_place_gets_nothing_from_others(alice: Person, bob: Person, victim: str) -> None:
    """CARMA_HOME names a directory in /tmp without a daemon: Alice starts one there, and another user submits."""
    place = alice.folder(f"fake-{secrets.token_hex(4)}", 0o755)
    address = place / "carma.sock"
    stolen = place / "stolen"

    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place / "new"))
            os.chmod(place / "new", 0o666)
            listener.listen()
            (place / "new").rename(address)
            connection, _ = listener.accept()
            with connection:
                stolen.write_bytes(connection.recv(1 << 20))
                connection.sendall(b"HTTP/1.1 201 Created\r\ncontent-length: 12\r\n\r\n" + b'{"ids": [1]}')

    def submit() -> None:
        with Client(address) as client:
            client.submit(SubmitRequest(spec=TaskSpec(command=("true",), directory="/", environment={"KEY": "secret"})))

    with alice.background(serve):
        until(address.exists, "the fake daemon listens")
        with pytest.raises(NotAllowed):
            (bob if victim == "bob" else ROOT).act(submit)
    assert not stolen.exists() or b"secret" not in stolen.read_bytes()


def test_a_user_cannot_start_a_second_daemon_on_the_directory_of_roots(daemon: Daemon, alice: Person) -> None:
    before = daemon.paths.database.stat().st_ino
    ran = run_cli(alice, daemon.home, "up")
    assert (ran.code, "belongs to user 0" in ran.err) == (BadSettings.exit_code, True), ran
    assert daemon.paths.database.stat().st_ino == before
    assert daemon.answers()


# Accounts.


def test_a_root_daemon_that_does_not_switch_users_runs_no_other_users_task(alice: Person) -> None:
    """It would run as root."""
    marker = alice.home / f"ran-{secrets.token_hex(4)}"
    with root_daemon(launch__run_as_submitter="no") as daemon:
        answer = try_submit(alice, daemon, "touch", str(marker))
        if answer.status == 201:
            assert ended(daemon, answer.json["ids"][0]).exit_code == 126
    assert not marker.exists()


def test_an_administrator_by_name_is_exactly_that_user(alice: Person, bob: Person) -> None:
    with root_daemon(daemon__admins=alice.name) as daemon:
        assert ask_as(alice, daemon, "GET", "/server").json["you_are_admin"] is True
        assert ask_as(bob, daemon, "GET", "/server").json["you_are_admin"] is False
        assert ask_as(bob, daemon, "POST", "/gpus/drain", {}).status == 403
