"""A home that is deleted under a running daemon, a database that is lost between two starts, a disk that is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.errors import StoreError, Unreachable
from tests.harness import LIMIT_S, Daemon, new_home, request, serving, until


def move_away(daemon: Daemon) -> Path:
    """Renames the home, so that its path no longer exists. The test still has access to its log and its processes."""
    moved = daemon.home.with_name(daemon.home.name + "-moved")
    daemon.home.rename(moved)
    return moved


def ended(daemon: Daemon) -> int:
    assert daemon.process is not None
    return daemon.process.wait(LIMIT_S)


def test_a_daemon_whose_home_is_removed_ends_with_an_error_and_its_tasks_keep_running() -> None:
    with serving(gpus=1, placement__policy="exclusive") as daemon:
        daemon.submit("sh", "-c", "echo $$ > pid; exec sleep 600")
        until(lambda: (daemon.home / "pid").exists() and (daemon.home / "pid").read_text() != "", "it runs")
        waiting = daemon.submit("sh", "-c", "touch started")
        assert daemon.client.task(waiting).state != "running"
        moved = move_away(daemon)
        try:
            with pytest.raises((StoreError, Unreachable)):  # Unreachable: it has ended already
                daemon.client.submit(request("true", directory="/"))
            assert ended(daemon) == 1
            log = (moved / "test-daemon.log").read_text()
            assert "was removed or replaced while the daemon ran" in log
            assert "Traceback" not in log
            os.kill(int((moved / "pid").read_text()), 0)  # the task goes on
            assert not (moved / "started").exists()
        finally:
            moved.rename(daemon.home)


def test_a_new_daemon_in_the_same_place_waits_for_the_old_one_which_starts_nothing_more() -> None:
    with serving(gpus=1, placement__policy="exclusive") as old, contextlib.ExitStack() as stack:
        old.submit("sh", "-c", "echo $$ > pid; exec sleep 600")
        until(lambda: (old.home / "pid").exists() and (old.home / "pid").read_text() != "", "it runs")
        for _ in range(3):
            old.submit("sh", "-c", "echo $CARMA_TASK_ID >> started")
        process = old.process
        assert process is not None
        moved = move_away(old)
        stack.callback(shutil.rmtree, moved, ignore_errors=True)
        old.home.mkdir(mode=0o700)
        os.kill(int((moved / "pid").read_text()), signal.SIGKILL)  # its GPU is free: the next would start
        new = Daemon(old.home, gpus=1)
        stack.callback(new.clean)
        new.start()
        assert process.wait(LIMIT_S) == 1  # it had ended before the new one served
        old.process = None
        assert new.client.server().queued == 0
        task = new.submit("sh", "-c", "echo new >> started")
        assert new.wait(task).exit_code == 0
        assert (new.home / "started").read_text() == "new\n"
        assert not (moved / "started").exists()
        assert new.stop() == 0


@pytest.mark.parametrize("loss", ["emptied", "no log", "removed"])
def test_a_database_that_was_lost_is_refused_until_it_is_given_up(loss: str) -> None:
    with serving(gpus=1) as daemon:
        done = daemon.submit("true")
        daemon.wait(done)
        daemon.kill()
        database = daemon.paths.database
        if loss == "emptied":
            database.write_bytes(b"")
        elif loss == "no log":
            database.with_name("carma.db-wal").unlink()
        else:
            for file in daemon.home.glob("carma.db*"):
                file.unlink()
        for _ in range(2):  # the refusal changes nothing
            assert daemon.spawn().wait(LIMIT_S) == 1
        assert "--new-database" in daemon.log
        assert "Traceback" not in daemon.log
        daemon.start("--new-database")
        assert daemon.client.history() == []
        assert daemon.submit("true") > done
        daemon.stop()
        daemon.start()


@contextlib.contextmanager
def tiny_disk(kib: int) -> Iterator[Path]:
    """A home on a file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with new_home() as home:
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(home)], check=False)
        if mount.returncode != 0:
            pytest.skip("no file system can be mounted here")
        home.chmod(0o700)
        try:
            yield home
        finally:
            subprocess.run(["umount", "-l", str(home)], check=True)


def fill(home: Path, free_kib: int) -> Path:
    """A file that leaves this much room on the disk."""
    ballast = home / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    os.truncate(ballast, ballast.stat().st_size - free_kib * 1024)
    return ballast


@pytest.mark.parametrize("free_kib", [0, 4, 16, 32])
@pytest.mark.parametrize("flags", [("up",), ("up", "--detach")])
def test_a_start_on_a_full_disk_says_what_failed_why_and_what_to_do(free_kib: int, flags: tuple[str, ...]) -> None:
    with tiny_disk(1024) as home:
        daemon = Daemon(home, gpus=1)
        ballast = fill(home, free_kib)
        with subprocess.Popen(
            [sys.executable, "-m", "carma", *flags], env=daemon.environ, stderr=subprocess.PIPE, text=True
        ) as up:
            assert up.stderr is not None
            said = "".join(iter(up.stderr.readline, "")) if flags[1:] else first_lines(up)
            code = up.wait(LIMIT_S)
        assert "Traceback" not in said
        assert "OSError" not in said
        if code not in (0, -signal.SIGTERM):
            assert str(home) in said
            assert "the disk is full" in said or "no space left" in said
            assert "hint: " in said
        ballast.unlink()
        try:
            if flags[1:] and code == 0:
                daemon.client.shutdown()
                daemon.drop_client()
                until(lambda: not daemon.paths.socket.exists(), "it has ended")
            daemon.start()  # nothing half made is in the way
            assert daemon.wait(daemon.submit("true")).exit_code == 0
            assert daemon.stop() == 0
        finally:
            daemon.clean()


def first_lines(up: subprocess.Popen[str]) -> str:
    """The daemon's output until it ends or serves; a serving daemon is then stopped."""
    assert up.stderr is not None
    said = ""
    for line in iter(up.stderr.readline, ""):
        said += line
        if " serves " in line:
            up.terminate()
    return said
