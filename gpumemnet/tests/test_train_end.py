"""`carma train` ends with all its processes; these are real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_collect_program import LIMIT_S, is_alive, wait_for

# Two endless jobs in the verb's own processes.
PROGRAM = """
import multiprocessing, os, sys, time
from pathlib import Path
from gpumemnet.training import cross_validation

cross_validation.make_deterministic = lambda: None  # in every process: it would import torch, which takes seconds

def job(folder):
    global held
    held = multiprocessing.get_context("spawn").Lock()  # as libraries do; it is left behind by one that is killed
    Path(folder, str(os.getpid())).touch()
    time.sleep(6000)

def learn():
    with cross_validation.workers({}) as pool:
        for future in [pool.submit(job, sys.argv[1]) for _ in range(2)]:
            future.result()

if __name__ == "__main__":
    from carma.cli.error_output import guarded
    sys.exit(guarded(learn))
"""


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """One that has two processes at work, and those."""
    program, marks = tmp_path / "program.py", tmp_path / "marks"
    program.write_text(PROGRAM)
    marks.mkdir()
    # A group of its own, so that a Ctrl-C reaches all of it as it does on a terminal.
    process = subprocess.Popen(
        [sys.executable, str(program), str(marks)], stderr=subprocess.PIPE, text=True, process_group=0
    )
    behind: list[int] = []
    try:
        wait_for(lambda: len(list(marks.iterdir())) == 2)
        behind += [int(each.name) for each in marks.iterdir()]
        yield process, behind
    finally:
        for pid in filter(is_alive, behind):  # left behind: what is tested here
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_no_process_learns_after_it_has_ended(
    learning: tuple[subprocess.Popen[str], list[int]], how: signal.Signals, code: int
) -> None:
    process, behind = learning
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    process.wait(LIMIT_S)
    wait_for(lambda: not any(map(is_alive, behind)))
    _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (code, "")


def test_a_killed_process_is_an_error(learning: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, behind = learning
    os.kill(behind[0], signal.SIGKILL)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "carma: a process that was learning was killed" in said
    assert "short of memory" in said
    wait_for(lambda: not is_alive(behind[1]))
