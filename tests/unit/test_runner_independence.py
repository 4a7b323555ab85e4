"""A test run does not depend on how it was started (conftest.py), and CI runs it once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import python_path

ROOT = Path(__file__).parents[2]
# Starts a process as tests do, in a Python that was started with ignored signals, no stdin and an odd environment.
START = "trap '' INT HUP QUIT TERM USR1; umask 077; exec \"$@\" <&-"
LOOK = "grep -E 'Sig(Ign|Blk)' /proc/self/status; umask; env"
SHOW = f"import conftest, subprocess; subprocess.run(['sh', '-c', {LOOK!r}])"
ODD = {
    "CARMA_HOME": "/nowhere",
    "CARMA_CRASH_SEED": "7",
    "SLURM_JOB_ID": "5",
    "COLUMNS": "40",
    "NO_COLOR": "1",
    "LC_ALL": "C",
    "LANG": "de_DE",
    "TZ": "America/New_York",
    "XDG_STATE_HOME": "/nowhere",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines about a process that was started by such a run."""
    environment = {**os.environ, **ODD, "PYTHONPATH": python_path(ROOT), "TMPDIR": str(tmp_path_factory.mktemp("t"))}
    del environment["HOME"]
    command = ["sh", "-c", START, "sh", sys.executable, "-c", SHOW]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_no_signal_is_ignored_or_blocked_in_what_a_test_starts(shown: list[str]) -> None:
    masks = {name: int(mask, 16) for name, _, mask in (line.partition(":") for line in shown if line.startswith("Sig"))}
    names = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)
    assert [number for number in names if masks["SigIgn"] >> (number - 1) & 1] == []
    assert masks["SigBlk"] == 0


def test_umask_environment_and_directories_are_always_the_same(shown: list[str]) -> None:
    found = dict(line.split("=", 1) for line in shown if "=" in line)
    assert "0022" in shown
    assert found.keys().isdisjoint(ODD.keys() - {"CARMA_CRASH_SEED", "LANG", "TZ"})
    assert (found["CARMA_CRASH_SEED"], found["LANG"], found["TZ"]) == ("7", "C.UTF-8", "UTC")
    assert found["TMPDIR"] == "/tmp"
    assert found["HOME"].startswith("/tmp/carma-test-home-")


def test_ci_runs_the_tests_once() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.count("bin/pytest") == 1
    assert "--last-failed" not in script
