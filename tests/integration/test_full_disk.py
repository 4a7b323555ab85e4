"""A daemon whose disk is full: running tasks can still be stopped, by their users and when it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.errors import StoreError
from tests.harness import Daemon, new_home, until


@pytest.fixture
def small() -> Iterator[Path]:
    """A home on a disk of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a small disk")
    with new_home() as home:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", str(home)], check=False)
        if mounted.returncode != 0:
            pytest.skip("no file system can be mounted here")
        try:
            yield home
        finally:
            subprocess.run(["umount", "-l", str(home)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_user_stops_a_running_task_and_the_stop_is_recorded_when_there_is_room(small: Path) -> None:
    daemon = Daemon(small, gpus=1)
    try:
        daemon.start()
        running = daemon.submit("sleep", "600")
        pid = daemon.until_state(running, "running").attempts[-1].pid
        assert pid is not None
        waiting = daemon.submit("sleep", "600", begin_at=time.time() + 86_400.0)
        fill(small / "fill")
        with pytest.raises(StoreError):
            daemon.client.cancel(waiting)
        assert "this is recorded later" in daemon.client.cancel(running).note
        until(lambda: not Path(f"/proc/{pid}").exists(), "the task has ended")
        assert daemon.client.task(running).state == "running", "its end cannot be stored either"
        (small / "fill").unlink()
        view = daemon.wait(running)
        assert view.outcome is not None
        assert view.outcome["kind"] == "cancelled"
    finally:
        daemon.clean()


def test_running_tasks_are_stopped_with_the_daemon_also_when_nothing_can_be_stored(small: Path) -> None:
    daemon = Daemon(small, gpus=1)
    try:
        daemon.start()
        task = daemon.submit("sleep", "600")
        pid = daemon.until_state(task, "running").attempts[-1].pid
        assert pid is not None
        fill(small / "fill")
        daemon.client.shutdown(cancel_running=True)
        assert daemon.process is not None
        daemon.process.wait(180)
        until(lambda: not Path(f"/proc/{pid}").exists(), "the task has ended")
        (small / "fill").unlink()
        daemon.start()
        assert daemon.wait(task).exit_code == 143
    finally:
        daemon.clean()
