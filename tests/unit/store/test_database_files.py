"""A store whose files are removed or replaced while it is open, and the locks that keep two daemons apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.events import GpuDrained
from carma.errors import AlreadyRunning, StoreError
from carma.store import database_files as files
from carma.store import lock
from carma.store.lock import HomeLock
from carma.store.sqlite import SqliteStore

NOBODY = 65534
EVENT = GpuDrained(1.0, None, "x")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "carma.db"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    try:
        yield store
    finally:
        store.close()


def remove_home(path: Path) -> None:
    shutil.rmtree(path.parent)


def move_home(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def remove_database(path: Path) -> None:
    path.unlink()


def replace_database(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def remove_log(path: Path) -> None:
    files.log_of(path).unlink()


@pytest.mark.parametrize("change", [remove_home, move_home, remove_database, replace_database, remove_log])
def test_a_store_notices_that_its_files_are_gone(path: Path, change: object) -> None:
    assert callable(change)
    with opened(path) as store:
        store.append([EVENT])
        assert store.in_place()
        change(path)
        assert not store.in_place()
        with pytest.raises(StoreError, match="removed or replaced"):
            store.append([EVENT])


def test_a_database_that_is_put_back_is_used_again(path: Path) -> None:
    with opened(path) as store:
        path.rename(path.with_name("away"))
        with pytest.raises(StoreError, match="removed or replaced"):
            store.append([EVENT])
        path.with_name("away").rename(path)
        assert store.in_place()
        assert store.append([EVENT]) == 1


def test_what_is_committed_while_the_file_is_taken_away_is_not_acknowledged(path: Path) -> None:
    with opened(path) as store:

        def commit() -> None:
            with store._database.writing("test") as connection:
                connection.execute("UPDATE meta SET value = 77")
                path.rename(path.with_name("away"))

        with pytest.raises(StoreError, match="removed or replaced"):
            commit()
        path.with_name("away").rename(path)
        assert not store.in_place()  # the file has a commit that this process does not know: for good
        with pytest.raises(StoreError, match="removed or replaced"):
            store.append([EVENT])


def test_a_log_that_is_removed_while_the_store_is_open_costs_nothing(path: Path) -> None:
    with opened(path) as store:
        store.append([EVENT])
        files.log_of(path).unlink()
    with opened(path) as store:
        assert store.load().events == (EVENT,)


def test_a_new_home_is_not_served_beside_the_daemon_of_the_one_that_was_deleted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SqliteStore(path)
    remove_home(path)
    path.parent.mkdir()
    with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}\b"):
        HomeLock(path.with_name("carma.db.lock"), name_patience_s=0.0)
    monkeypatch.setattr(lock, "_NAME_PAUSE_S", 0.0)
    monkeypatch.setattr(lock, "_holder_of_name", lambda _name: old.close())  # it ends while the new one waits
    SqliteStore(path).close()


@pytest.mark.parametrize("lives", [False, True])
def test_only_a_lock_that_a_killed_daemon_has_left_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """A process that it was just starting may hold the lock a little longer."""
    path.parent.mkdir()
    daemon = subprocess.Popen(["true"])
    daemon.wait()
    file = path.with_name("carma.db.lock")
    file.write_text(f"{os.getpid() if lives else daemon.pid} {socket.gethostname()}\n")
    held = os.open(file, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr("carma.store.lock.time.sleep", lambda _s: os.close(held))
    if lives:
        with pytest.raises(AlreadyRunning):
            HomeLock(file, patience_s=0.0)
        os.close(held)
    else:
        HomeLock(file, patience_s=0.0).release()


def test_the_end_of_the_old_daemon_leaves_the_files_of_the_new_one_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SqliteStore(path)
    old.append([EVENT])
    remove_home(path)
    monkeypatch.setattr(HomeLock, "_take_name", lambda _lock, _deadline_s: None)
    with opened(path) as new:
        new.append([EVENT, EVENT])
        old.close()
        assert new.in_place()
        new.append([EVENT])
        shutil.copytree(path.parent, tmp_path / "copy")
    with opened(tmp_path / "copy" / "carma.db") as copy:
        assert copy.load().sequence == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_user_cannot_keep_a_daemon_from_starting_by_taking_its_name(path: Path) -> None:
    path.parent.mkdir()
    names: list[bytes] = []

    class Recorded(socket.socket):
        def bind(self, address: object, /) -> None:
            assert isinstance(address, bytes)
            names.append(address)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("carma.store.lock.socket.socket", Recorded)
        HomeLock(path.with_name("carma.db.lock")).release()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind(names[0])
        os.seteuid(NOBODY)
        try:
            squatter.listen(0)  # the kernel records who listens
        finally:
            os.seteuid(0)
        with opened(path) as store:
            assert store.in_place()
