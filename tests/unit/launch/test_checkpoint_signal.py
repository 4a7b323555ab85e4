"""The processes of an attempt that get the request to save: the outermost with a handler, each once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.outcome import Succeeded
from carma.launch.process import ProcessLauncher
from carma.testing.launcher_contract import key, look, order_of, until, until_ended, until_running
from tests.launch_orders import shell, spec_of, tidy

# Notes each USR1 in a file of its own name; ends when a file `go` is there.
NOTES = """
import pathlib, signal, sys, time
name = sys.argv[1]
def note(*_):
    with open(name, "a") as file:
        file.write("x")
signal.signal(signal.SIGUSR1, note)
pathlib.Path("ready-" + name).touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""
# A child that was forked with the handler, as a data loader's worker is.
WORKER = """
import os, pathlib, signal, time
name = "main"
def note(*_):
    with open(name, "a") as file:
        file.write("x")
signal.signal(signal.SIGUSR1, note)
if os.fork() == 0:
    name = "worker"
pathlib.Path("ready-" + name).touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[ProcessLauncher]:
    yield ProcessLauncher(tmp_path / "attempts", run_as_submitter=False)
    tidy(tmp_path / "attempts")


def told(directory: Path, name: str) -> str:
    file = directory / name
    return file.read_text() if file.exists() else ""


def notes(name: str) -> str:
    return f"{sys.executable} -c '{NOTES}' {name}"


def test_a_shell_around_the_program_is_left_alone(launcher: ProcessLauncher, tmp_path: Path) -> None:
    """A shell has no handler and would be ended by the signal; the commands after the program would not run."""
    launcher.launch(order_of(shell(f"{notes('inner')}; echo after > after", tmp_path)))
    until_running(launcher, key())
    until((tmp_path / "ready-inner").exists)
    assert launcher.request_checkpoint(key(), signal.SIGUSR1, 1.0)
    until(lambda: told(tmp_path, "inner") == "x")
    (tmp_path / "go").touch()
    assert until_ended(launcher, key()) == Succeeded()
    assert (tmp_path / "after").exists()


def test_each_of_several_ranks_gets_the_signal(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell(f"{notes('a')} & {notes('b')} & wait", tmp_path)))
    until_running(launcher, key())
    until(lambda: (tmp_path / "ready-a").exists() and (tmp_path / "ready-b").exists())
    assert launcher.request_checkpoint(key(), signal.SIGUSR1, 1.0)
    until(lambda: told(tmp_path, "a") == told(tmp_path, "b") == "x")


def test_a_worker_with_its_parents_handler_gets_no_signal(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(spec_of(sys.executable, "-c", WORKER, directory=tmp_path)))
    until_running(launcher, key())
    until(lambda: (tmp_path / "ready-main").exists() and (tmp_path / "ready-worker").exists())
    assert launcher.request_checkpoint(key(), signal.SIGUSR1, 1.0)
    until(lambda: told(tmp_path, "main") == "x")
    assert told(tmp_path, "worker") == ""


def test_a_request_to_save_is_sent_once_also_after_a_daemon_restart(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell(f"exec {notes('inner')}", tmp_path)))
    until_running(launcher, key())
    until((tmp_path / "ready-inner").exists)
    assert launcher.request_checkpoint(key(), signal.SIGUSR1, 1.0)
    until(lambda: told(tmp_path, "inner") == "x")
    again = ProcessLauncher(tmp_path / "attempts", run_as_submitter=False)
    assert again.request_checkpoint(key(), signal.SIGUSR1, 1.0)
    assert again.request_checkpoint(key(), signal.SIGUSR1, 2.0), "another request"
    until(lambda: told(tmp_path, "inner") == "xx")
    (tmp_path / "go").touch()
    assert until_ended(again, key()) == Succeeded()
    assert told(tmp_path, "inner") == "xx"


def test_one_that_ignores_the_signal_does_not_listen(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell("trap '' USR1; : > ready; while :; do sleep 0.05; done", tmp_path)))
    until_running(launcher, key())
    until((tmp_path / "ready").exists)
    assert not launcher.request_checkpoint(key(), signal.SIGUSR1, 1.0)
    assert look(launcher, key()).outcome is None
