"""Fork bombs, the time limit, and processes that try to outlive the sandbox or to end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.trial.sandbox import GRACE_S, SandboxLimits
from tests.boxes import PATIENCE_S, SandboxVariant, marker, one_at_a_time, processes_with, wait_until
from tests.sandbox.conftest import Guard
from tests.sandbox.programs import FORK_BOMB, ORPHANS, THREAD_BOMB, Python

LIMIT = 200
OWN = 16  # processes and threads of the sandbox itself
RLIMIT = LIMIT * 5 // 4 + 16  # RLIMIT_NPROC is above the limit (box/command.py)
LATE_S = 10.0  # beyond what is guaranteed, for a machine that is busy


@pytest.fixture(autouse=True)
def one_bomb_at_a_time() -> Iterator[None]:
    """Two bombs at once would keep a sandbox from starting."""
    with one_at_a_time("bomb"):
        yield


@pytest.mark.parametrize("bomb", [FORK_BOMB, THREAD_BOMB], ids=["fork", "threads"])
def test_a_bomb_is_ended_and_never_exceeds_the_limit(
    variant: SandboxVariant, folder: Path, python: Python, guard: Guard, bomb: str
) -> None:
    limits = SandboxLimits(seconds=PATIENCE_S, processes=LIMIT)
    ended = variant.run("", folder, command=python.command(bomb), limits=limits)
    assert ended.status.ended == "processes", ended.status
    assert ended.seconds < PATIENCE_S
    counted = guard.peak()
    assert variant.sandbox.kernel_limits is not None
    if variant.sandbox.kernel_limits.complete:
        assert counted is None or counted <= LIMIT + OWN
    elif variant.owner.uid != 0:  # RLIMIT_NPROC does not apply to root: there only the supervisor counts
        assert counted is None or counted <= RLIMIT + OWN
    wait_until(lambda: not guard.members(), "a process outlived the sandbox")


@pytest.mark.parametrize("bomb", [FORK_BOMB, ORPHANS], ids=["fork", "orphans"])
def test_a_bomb_does_not_delay_the_time_limit(
    variant: SandboxVariant, folder: Path, python: Python, guard: Guard, bomb: str
) -> None:
    limits = SandboxLimits(seconds=2, processes=100_000)  # only the guard limits processes
    ended = variant.run("", folder, command=python.command(bomb), limits=limits)
    assert ended.status.ended in ("time", "processes"), ended.status
    assert ended.seconds < limits.seconds + GRACE_S + LATE_S
    wait_until(lambda: not guard.members(), "a process outlived the sandbox")


@pytest.mark.parametrize(
    "script",
    [
        "(setsid sh -c 'trap \"\" TERM HUP INT; sleep {}' &) & exit 0",
        "sleep {} & kill -STOP $!; exit 0",
        "sh -c 'sh -c \"sleep {} &\" &' & exit 0",
    ],
    ids=["own session", "stopped", "orphan"],
)
def test_no_process_outlives_the_sandbox(variant: SandboxVariant, folder: Path, script: str) -> None:
    word = marker()
    assert variant.run(script.format(word), folder).status.ended == "exit"
    wait_until(lambda: not processes_with(word), "a process outlived the sandbox")


@pytest.mark.parametrize("kernel_limits", ["any"], indirect=True)
def test_the_command_cannot_signal_the_first_process(variant: SandboxVariant, folder: Path) -> None:
    signals = "for name in INT TERM KILL STOP HUP; do kill -$name 1; done"
    ended = variant.run(f"{signals}; sleep 0.2; {signals}; echo end; exit 7", folder)
    assert (ended.status.ended, ended.status.code) == ("exit", 7)
    assert ended.status.stdout == "end\n"


@pytest.mark.parametrize("kernel_limits", ["any"], indirect=True)
def test_the_command_is_niced_and_the_first_to_be_killed_for_memory(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run("cut -d' ' -f19 /proc/self/stat; cat /proc/self/oom_score_adj", folder)
    niceness, score = ended.status.stdout.split()
    assert int(niceness) >= 10
    assert int(score) == 1000
