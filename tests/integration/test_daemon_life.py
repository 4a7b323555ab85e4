"""Starting, serving and stopping: one daemon to a home, errors that say what to do, and nothing left in the way."""

from __future__ import annotations

import os
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import urllib.request

import pytest

from carma.client import Client
from carma.errors import StoreError, Unreachable
from tests.harness import LIMIT_S, Daemon, daemon_at_rest, processes_of, serving, until, virtual


def carma(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "carma", *arguments],
        env=daemon.environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_second_daemon_is_refused_and_the_first_keeps_running() -> None:
    with serving() as daemon:
        second = carma(daemon, "up")
        assert second.returncode == 1
        assert "already" in second.stderr
        assert "carma down" in second.stderr
        assert daemon.answers()


def test_a_stale_socket_is_replaced() -> None:
    with serving() as daemon:
        daemon.kill()
        assert daemon.paths.socket.exists()
        daemon.start()
        assert daemon.wait(daemon.submit("true")).exit_code == 0


def test_a_socket_that_is_removed_under_the_daemon_is_made_again() -> None:
    with serving() as daemon:
        mode = daemon.paths.socket.stat().st_mode
        daemon.paths.socket.unlink()
        until(daemon.paths.socket.exists, "the socket is back")
        daemon.drop_client()
        assert daemon.answers()
        assert daemon.paths.socket.stat().st_mode == mode
        until(lambda: "has been created again" in daemon.log, "the log says so")
        assert daemon.stop() == 0
        assert not daemon.paths.socket.exists()


def test_a_file_in_the_sockets_place_is_left_alone() -> None:
    with daemon_at_rest() as daemon:
        daemon.paths.socket.write_text("mine")
        assert daemon.spawn().wait(LIMIT_S) != 0
        assert "not a socket" in daemon.log
        assert daemon.paths.socket.read_text() == "mine"


def test_it_serves_metrics_and_sigterm_ends_it_cleanly() -> None:
    with serving(metrics__listen="127.0.0.1:0") as daemon:
        assert daemon.wait(daemon.submit("true")).exit_code == 0
        address = re.search(r"metrics are at (http://\S+)", daemon.log)
        assert address is not None
        with urllib.request.urlopen(address[1], timeout=LIMIT_S) as answer:
            assert 'carma_tasks_finished_total{outcome="succeeded"} 1.0' in answer.read().decode()
        assert daemon.paths.pid_file.read_text().strip() == str(daemon.process.pid if daemon.process else "")
        assert daemon.stop() == 0
        assert not daemon.paths.socket.exists()
        assert not daemon.paths.pid_file.exists()
        assert processes_of(daemon.home) == []


def test_an_open_stream_does_not_hold_up_the_end() -> None:
    with serving() as daemon, Client(daemon.paths.socket) as listener:
        events = listener.events()
        task = daemon.submit("true")
        assert next(event.task for event in events if event.event == "task_submitted") == task
        assert daemon.stop() == 0
        assert all(event.sequence for event in events)  # and it ends


def test_shutdown_with_cancel_stops_what_runs_and_keeps_what_waits() -> None:
    with serving(gpus=1, placement__policy="exclusive") as daemon:
        running = daemon.submit("sleep", "600")
        daemon.until_state(running, "running")
        waiting = daemon.submit("true")
        daemon.client.shutdown(cancel_running=True)
        daemon.drop_client()
        assert daemon.process is not None
        assert daemon.process.wait(LIMIT_S) == 0
        daemon.start()
        assert (daemon.wait(running).outcome or {})["kind"] == "cancelled"
        assert daemon.wait(waiting).exit_code == 0


def test_detached_it_returns_when_it_serves_and_logs_to_a_file() -> None:
    with daemon_at_rest() as daemon:
        started = carma(daemon, "up", "--detach")
        assert started.returncode == 0, started.stderr
        pid = daemon.client.server().pid
        assert str(pid) in started.stdout
        assert "serves 2 GPUs" in daemon.paths.daemon_log.read_text()
        assert os.getsid(pid) != os.getsid(0)
        again = carma(daemon, "up", "--detach")
        assert again.returncode == 1
        assert "already" in again.stderr
        assert carma(daemon, "down").returncode == 0
        with pytest.raises(Unreachable):
            daemon.client.server()


def test_detached_it_gives_the_error_of_a_start_that_failed() -> None:
    with daemon_at_rest() as daemon:
        daemon.paths.database.write_bytes(b"this is not a database, and long enough to be looked at " * 20)
        started = carma(daemon, "up", "--detach")
        assert started.returncode == 1
        assert str(daemon.paths.database) in started.stderr
        assert processes_of(daemon.home) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"placement__policy": "magmm"}, "magm"),
        ({"memory__sources": "declared,oracel"}, "oracel"),
        ({"gate__sm_activ": "0.5"}, "gate.sm_active"),
        ({"placement__gpus": "0,7"}, "placement.gpus names '7'"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_names_the_nearest(settings: dict[str, str], words: str) -> None:
    with daemon_at_rest(**settings) as daemon:
        assert daemon.spawn().wait(LIMIT_S) in (1, 2)
        assert words in daemon.log
        assert not daemon.paths.socket.exists()


def test_a_newer_database_is_refused_and_not_touched() -> None:
    with serving() as daemon:
        daemon.stop()
        with sqlite3.connect(daemon.paths.database) as connection:
            connection.execute("PRAGMA user_version = 999")
        connection.close()
        assert daemon.spawn().wait(LIMIT_S) == 1
        assert "newer" in daemon.log
        with sqlite3.connect(daemon.paths.database) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (999,)
        connection.close()


def test_a_full_disk_fails_the_submission_and_the_daemon_goes_on() -> None:
    with serving() as daemon:
        done = daemon.submit("true")
        daemon.wait(done)
        assert daemon.process is not None
        # A limit on the size of files stands for the disk: the database cannot grow any more.
        _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1024, hard))
        with pytest.raises(StoreError):
            daemon.submit("true")
        assert daemon.client.task(done).exit_code == 0
        assert daemon.client.gpus()
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert daemon.wait(daemon.submit("true")).exit_code == 0


def test_administrators_that_do_not_exist_are_named() -> None:
    with serving(daemon__admins="root,no-such-user-x") as daemon:
        assert "daemon.admins names 'no-such-user-x'" in daemon.log
        assert "'root'" not in daemon.log


def test_systemd_is_notified_of_the_start_and_of_the_stop() -> None:
    with daemon_at_rest() as daemon, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        address = str(daemon.home / "notify")
        receiver.bind(address)
        receiver.settimeout(LIMIT_S)
        daemon.environ["NOTIFY_SOCKET"] = address
        daemon.start()
        assert receiver.recv(100) == b"READY=1"
        daemon.stop()
        assert receiver.recv(100) == b"STOPPING=1"


def test_a_task_that_ignores_sigterm_is_killed_at_its_time_limit() -> None:
    with serving() as daemon:
        command = ("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
        task = daemon.submit(*command, time_limit_s=0.3, grace_s=0.2)
        view = daemon.wait(task)
        assert view.outcome == {"kind": "timed_out", "limit_s": 0.3}
        pid = view.attempts[0].pid
        until(lambda: not os.path.exists(f"/proc/{pid}"), "the process is gone")


def test_the_memory_of_a_task_is_the_next_estimate() -> None:
    with serving(monitor__period_s="0.05") as daemon:
        held = " ".join(virtual(3000, 600, "--ramp-s", "0"))
        command = ("sh", "-c", f"{held} & while ! [ -e go ]; do sleep 0.02; done; kill $!; wait; exit 0")
        first = daemon.submit(*command)
        until(lambda: (daemon.client.task(first).observed_mib or 0) >= 3000, "its memory is seen")
        (daemon.home / "go").touch()
        assert daemon.wait(first).estimate is None
        second = daemon.wait(daemon.submit(*command))
        assert second.estimate is not None
        assert second.estimate.source == "history"
        assert second.estimate.footprint_mib >= 3000
