"""Every process of a paused attempt stands still: those that fork meanwhile, and those that left their parents."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import cgroups, procfs
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.launch.process import ProcessLauncher
from carma.testing.launcher_contract import key, order_of, until, until_ended, until_running
from tests.launch_orders import gone, shell, tidy

# Counts into a file of its name for ten minutes, while it starts and ends children all the time.
COUNTS = """
import os, pathlib, sys, time
name, count, ends_at = sys.argv[1], 0, time.monotonic() + 600.0
if name == "escaped":
    os.setsid()
while time.monotonic() < ends_at:
    count += 1
    pathlib.Path(name + ".new").write_text(str(count))
    os.replace(name + ".new", name)
    if os.fork() == 0:
        time.sleep(0.002)
        os._exit(0)
    if count % 50 == 0:
        time.sleep(0.01)
    os.waitpid(-1, os.WNOHANG)
"""
NAMES = ("inner", "escaped")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[ProcessLauncher]:
    yield ProcessLauncher(tmp_path / "attempts", run_as_submitter=False)
    tidy(tmp_path / "attempts")


@pytest.fixture
def freezing(tmp_path: Path) -> Iterator[ProcessLauncher]:
    """A launcher whose attempts have cgroups of version 2, in a hierarchy that is mounted for the test."""
    root = tempfile.mkdtemp()
    mounted = subprocess.run(["mount", "-t", "cgroup2", "none", root], capture_output=True, check=False)
    if mounted.returncode != 0:
        os.rmdir(root)
        pytest.skip(f"cgroups of version 2 cannot be mounted: {mounted.stderr.decode()}")
    base = os.path.join(root, f"test-{secrets.token_hex(6)}")
    os.mkdir(base)
    groups = AttemptCgroups(cgroups.Cgroups(2, {"": base}, frozenset()), tmp_path / "attempts")
    try:
        yield ProcessLauncher(tmp_path / "attempts", run_as_submitter=False, groups=groups)
    finally:
        tidy(tmp_path / "attempts")
        groups.remove(key())
        os.rmdir(base)
        subprocess.run(["umount", root], check=False)
        os.rmdir(root)


def begin(launcher: ProcessLauncher, tmp_path: Path) -> int:
    program = f"{sys.executable} -c '{COUNTS}'"
    launcher.launch(order_of(shell(f"{program} inner & ({program} escaped &) ; wait", tmp_path)))
    until(lambda: all((tmp_path / name).exists() for name in NAMES))
    return until_running(launcher, key())


def counts(tmp_path: Path) -> list[int]:
    return [int((tmp_path / name).read_text()) for name in NAMES]


def stand_still(tmp_path: Path) -> bool:
    before = counts(tmp_path)
    for _ in range(20):  # each look gives a running process time for hundreds of counts
        time.sleep(0.01)
        if counts(tmp_path) != before:
            return False
    return True


def test_a_tree_that_forks_stands_still_and_goes_on(launcher: ProcessLauncher, tmp_path: Path) -> None:
    begin(launcher, tmp_path)
    until(lambda: launcher.pause(key()))
    assert {procfs.process(pid).state for pid in launcher.pids([key()])} == {"T"}  # type: ignore[union-attr]
    assert stand_still(tmp_path)
    before = counts(tmp_path)
    another = ProcessLauncher(tmp_path / "attempts", run_as_submitter=False)
    assert another.unpause(key()), "a later daemon continues it"
    until(lambda: all(now > then for now, then in zip(counts(tmp_path), before, strict=True)))


def test_a_process_that_one_look_misses_stands_still_too(
    launcher: ProcessLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at /proc takes time: a process that is started meanwhile is in the next one."""
    begin(launcher, tmp_path)
    hidden, whole = max(launcher.pids([key()])), procfs.processes
    looks: list[int] = []

    def processes() -> dict[int, procfs.Process]:
        looks.append(1)
        return {pid: one for pid, one in whole().items() if pid != hidden or len(looks) > 2}

    monkeypatch.setattr(procfs, "processes", processes)
    until(lambda: launcher.pause(key()))
    assert stand_still(tmp_path)


def test_a_process_that_was_stopped_by_its_user_is_left_alone(launcher: ProcessLauncher, tmp_path: Path) -> None:
    pid = begin(launcher, tmp_path)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: procfs.process(pid).state == "T")  # type: ignore[union-attr]
    assert launcher.unpause(key()), "CARMA has not paused it"
    assert procfs.process(pid).state == "T"  # type: ignore[union-attr]


def test_a_paused_tree_that_is_killed_from_outside_ends_as_usual(launcher: ProcessLauncher, tmp_path: Path) -> None:
    pid = begin(launcher, tmp_path)
    until(lambda: launcher.pause(key()))
    pids = list(launcher.pids([key()]))
    os.kill(pid, signal.SIGKILL)
    assert "SIGKILL" in str(until_ended(launcher, key()))
    assert all(gone(one) for one in pids), "also what its command had started"


def test_a_cgroup_of_version_2_freezes_it_without_a_signal(freezing: ProcessLauncher, tmp_path: Path) -> None:
    begin(freezing, tmp_path)
    until(lambda: freezing.pause(key()))
    assert stand_still(tmp_path)
    assert "T" not in {procfs.process(pid).state for pid in freezing.pids([key()])}  # type: ignore[union-attr]
    before = counts(tmp_path)
    assert freezing.unpause(key())
    until(lambda: all(now > then for now, then in zip(counts(tmp_path), before, strict=True)))
    until(lambda: freezing.pause(key()))
    freezing.signal(key(), signal.SIGTERM)
    assert "SIGTERM" in str(until_ended(freezing, key())), "the runner is not frozen, and a stop ends the pause"
