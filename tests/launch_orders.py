"""Orders, waiting and clean-up for tests that start real processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from pathlib import Path

from carma import procfs
from carma.core.model.values import AttemptKey, TaskSpec
from carma.launch.attempt_files import AttemptFiles
from carma.launch.process import ProcessLauncher
from carma.testing.launcher_contract import key, until


def spec_of(*command: str, directory: str | Path = "/", **more: object) -> TaskSpec:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    fields = {"command": command, "directory": str(directory), "environment": environment, "grace_s": 5.0, **more}
    return TaskSpec(**fields)  # type: ignore[arg-type]


def shell(script: str, directory: str | Path = "/", **more: object) -> TaskSpec:
    return spec_of("/bin/sh", "-c", script, directory=directory, **more)


def until_file(path: Path, *, code: int = 0) -> str:
    """A script that runs until a file appears."""
    return f"while [ ! -e {shlex.quote(str(path))} ]; do sleep 0.02; done; exit {code}"


def read_pid(path: Path) -> int:
    """A pid that a process writes into a file."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def gone(pid: int) -> bool:
    found = procfs.process(pid)
    return found is None or found.ended


def runner_of(directory: Path, which: AttemptKey) -> int:
    files = AttemptFiles(directory)
    until(lambda: files.claim(which) is not None)
    claim = files.claim(which)
    assert claim is not None
    return claim.pid


def tidy(directory: Path) -> None:
    """End all processes of the attempts in this directory, runners last, and wait for them."""
    launcher = ProcessLauncher(directory, run_as_submitter=False)
    files = AttemptFiles(directory)
    for name in os.listdir(directory) if directory.exists() else []:
        task, _, attempt = name.partition(".")
        which = key(int(task), int(attempt))
        launcher.signal(which, signal.SIGKILL)
        claim = files.claim(which)
        if claim is None or claim.boot_id != procfs.boot_id():
            continue
        with contextlib.suppress(AssertionError):
            until(lambda claim=claim: not procfs.alive(claim.pid, claim.start_ticks))  # type: ignore[misc]
