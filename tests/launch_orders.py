"""Orders, waiting and tidying up for the tests that start real processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

from carma.core.model.outcome import Outcome
from carma.core.model.settings import Stopping
from carma.core.model.values import AttemptKey, Booking, GpuId, Owner, Placement, TaskId, TaskSpec
from carma.core.ports import Found, Launcher, LaunchOrder
from carma.launch import procfs
from carma.launch.attempt_files import AttemptFiles
from carma.launch.process import ProcessLauncher

LIMIT_S = 180.0


def key(task: int = 1, attempt: int = 1) -> AttemptKey:
    return AttemptKey(TaskId(task), attempt)


def order_of(
    spec: TaskSpec, task: int = 1, attempt: int = 1, *, owner: Owner | None = None, gpus: tuple[str, ...] = ("GPU-0a",)
) -> LaunchOrder:
    placement = Placement(gpus=tuple(GpuId(gpu) for gpu in gpus), booking=Booking(memory_mib=4096, source="declared"))
    whose = owner if owner is not None else Owner(os.geteuid(), os.getegid(), "me")
    grace_s = Stopping().grace_of(spec)
    return LaunchOrder(key=key(task, attempt), owner=whose, spec=spec, placement=placement, gpus=(), grace_s=grace_s)


def spec_of(*command: str, directory: str | Path = "/", **more: object) -> TaskSpec:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    fields = {"command": command, "directory": str(directory), "environment": environment, "grace_s": 5.0, **more}
    return TaskSpec(**fields)  # type: ignore[arg-type]


def shell(script: str, directory: str | Path = "/", **more: object) -> TaskSpec:
    return spec_of("/bin/sh", "-c", script, directory=directory, **more)


def until_file(path: Path, *, code: int = 0) -> str:
    """A script that runs until a file appears."""
    return f"while [ ! -e {shlex.quote(str(path))} ]; do sleep 0.02; done; exit {code}"


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.01)


def look(launcher: Launcher, which: AttemptKey) -> Found:
    (found,) = launcher.poll([which])
    return found


def until_running(launcher: Launcher, which: AttemptKey) -> int:
    until(lambda: look(launcher, which).pid is not None)
    pid = look(launcher, which).pid
    assert pid is not None
    return pid


def until_ended(launcher: Launcher, which: AttemptKey) -> Outcome:
    until(lambda: look(launcher, which).outcome is not None)
    outcome = look(launcher, which).outcome
    assert outcome is not None
    return outcome


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
    """End whatever the attempts in this directory left, runners last, and wait for them."""
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
