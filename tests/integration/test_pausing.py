"""A real daemon and a process that counts: paused it provably stands still, whatever happens to the daemon."""

from __future__ import annotations

import os
import signal
import sys
import time

from tests.harness import Daemon, daemon_at_rest, until

COUNTER = """
import os, pathlib, time
count = 0
while not pathlib.Path("enough").exists():
    count += 1
    pathlib.Path("count.new").write_text(str(count))
    os.replace("count.new", "count")
    time.sleep(0.001)
"""


def count_of(daemon: Daemon) -> int:
    file = daemon.home / "count"
    return int(file.read_text()) if file.exists() else 0


def stands_still(daemon: Daemon) -> bool:
    before = count_of(daemon)
    time.sleep(0.1)  # a running process counts a hundred in that time
    return count_of(daemon) == before


def goes_on(daemon: Daemon) -> None:
    before = count_of(daemon)
    until(lambda: count_of(daemon) > before, "it counts again")


def test_a_paused_process_stands_still_through_a_restart_and_goes_on() -> None:
    with daemon_at_rest(gpus=1) as daemon:
        daemon.start()
        task = daemon.submit(sys.executable, "-c", COUNTER, gpu_memory_mib=100, time_limit_s=3600.0)
        daemon.until_state(task, "running")
        goes_on(daemon)
        daemon.client.pause(task, reason="a demo")
        until(lambda: stands_still(daemon), "it stands still")
        before = count_of(daemon)
        daemon.kill()
        daemon.start()
        assert daemon.client.task(task).reason.endswith(": a demo")
        assert stands_still(daemon)
        assert count_of(daemon) == before, "also while no daemon ran"
        daemon.client.unpause(task)
        goes_on(daemon)
        daemon.client.pause(task)
        until(lambda: stands_still(daemon), "it stands still again")
        os.kill(daemon.client.task(task).attempts[-1].pid or 0, signal.SIGCONT)
        goes_on(daemon)
        until(lambda: stands_still(daemon), "its user's SIGCONT does not end the pause")
        (daemon.home / "enough").touch()
        daemon.client.unpause(task)
        view = daemon.wait(task)
        assert view.outcome == {"kind": "succeeded"}
        assert view.attempts[0].paused_s > 0.0
        assert view.ran_s is not None
        assert view.ended_at is not None
        assert view.started_at is not None
        assert abs(view.ran_s + view.attempts[0].paused_s - (view.ended_at - view.started_at)) < 0.01
        texts = [line.text for line in daemon.client.story(task)]
        assert sum("paused by" in text for text in texts) == sum("continued by" in text for text in texts) == 2
        (daemon.home / "enough").unlink()
        stopped = daemon.submit(sys.executable, "-c", COUNTER, gpu_memory_mib=100)
        daemon.until_state(stopped, "running")
        daemon.client.pause(stopped)
        until(lambda: stands_still(daemon), "it stands still")
        daemon.client.cancel(stopped)
        assert daemon.wait(stopped).outcome["kind"] == "cancelled"  # type: ignore[index]
