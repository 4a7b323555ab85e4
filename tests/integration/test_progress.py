"""Optimizer steps of tasks in a real daemon: virtual tasks, and a PyTorch program with the import hook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carma.core.model.values import TaskSpec
from carma.wire.api_types import ProgressView, SubmitRequest
from tests.harness import Daemon, daemon_at_rest, serving, until, virtual
from tests.unit.launch.step_interpreter import write_stub_torch

TRAIN = "from torch.optim.optimizer import Optimizer\nfor _ in range(40): Optimizer().step()"
SETTLED = {"warmup__settle_s": 1.0, "gate__enabled": False, "monitor__period_s": 0.2, "window__min_samples": 1}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving(gpus=1, **SETTLED) as found:
        yield found


def train(daemon: Daemon, program: str = TRAIN, **spec: Any) -> int:
    """A program that finds a stub of torch."""
    write_stub_torch(daemon.home / "site")
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONPATH": str(daemon.home / "site")}
    command = (sys.executable, "-c", program)
    task = TaskSpec(command=command, directory=str(daemon.home), environment=environment, gpu_memory_mib=512, **spec)
    return daemon.client.submit(SubmitRequest(spec=task)).ids[0]


def progress(daemon: Daemon, task: int) -> ProgressView:
    return daemon.client.task(task).progress


def carma(daemon: Daemon, *words: str) -> str:
    environment = {**os.environ, "CARMA_HOME": str(daemon.home)}
    done = subprocess.run([sys.executable, "-m", "carma", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_and_the_measured_slowdown_are_shown_while_a_task_runs_and_in_history(daemon: Daemon) -> None:
    endless = virtual(1000, 1e6, "--steps-per-s", "50", sm=0.9)
    task = daemon.submit(*endless, gpu_memory_mib=2000)
    until(lambda: progress(daemon, task).alone_steps_per_s is not None, "its rate alone is known")
    other = daemon.submit(*endless, gpu_memory_mib=2000)
    until(lambda: (progress(daemon, task).slowdown or 0.0) > 1.1, "its neighbour slows it down")
    assert not progress(daemon, task).inferred
    (gpu,) = daemon.client.gpus()
    assert gpu.progress[task].slowdown is not None
    assert "steps/s, slowdown " in carma(daemon, "show", str(task))
    assert re.search(rf"\b{task}:\d+\.\d", carma(daemon, "gpus", "--wide"))
    daemon.client.cancel(task)
    daemon.wait(task)
    ended = progress(daemon, task)
    assert ended.steps is not None
    assert ended.steps_per_s is not None
    rows = carma(daemon, "history", "--csv", "--format", "id,steps,rate,slowdown").splitlines()
    assert rows == ["id,steps,rate,slowdown", f"{task},{ended.steps},{ended.steps_per_s},{ended.slowdown}"]
    assert " SLOWDOWN " in carma(daemon, "history", "--wide")
    daemon.client.cancel(other)
    daemon.wait(other)


def test_a_later_run_of_the_command_is_compared_with_the_earlier_one_alone(daemon: Daemon) -> None:
    """Also if the daemon was restarted in between."""
    gate = daemon.home / "gate"
    command = virtual(1000, 0.1, "--steps-per-s", "50", "--gate", str(gate), sm=0.9)
    first = daemon.submit(*command, gpu_memory_mib=2000)
    until(lambda: progress(daemon, first).alone_steps_per_s is not None, "its rate alone is known")
    daemon.stop()
    daemon.start()
    assert progress(daemon, first).alone_steps_per_s is not None
    gate.touch()
    ended = daemon.wait(first)
    assert ended.outcome == {"kind": "succeeded"}
    gate.unlink()
    again = daemon.submit(*command, gpu_memory_mib=2000)
    daemon.until_state(again, "running")
    assert ended.progress.alone_steps_per_s is not None
    assert progress(daemon, again).alone_steps_per_s == ended.progress.alone_steps_per_s


def test_a_program_with_the_import_hook_is_counted_to_its_last_step(daemon: Daemon) -> None:
    view = daemon.wait(train(daemon))
    assert view.outcome == {"kind": "succeeded"}
    assert view.progress.steps == 40
    steps = daemon.paths.log_dir / f"{view.id}.1" / "steps.bin"
    until(lambda: not steps.exists(), "the file of its steps is removed")


def test_a_task_submitted_without_counting_has_no_hook(daemon: Daemon) -> None:
    view = daemon.wait(train(daemon, progress=False))
    assert view.outcome == {"kind": "succeeded"}
    assert view.progress.steps is None


def test_the_administrator_can_switch_the_counting_off() -> None:
    with daemon_at_rest(gpus=1, launch__progress="false") as daemon:
        daemon.start()
        view = daemon.wait(train(daemon, f"import os\nprint(os.environ['PYTHONPATH'])\n{TRAIN}"))
        assert view.outcome == {"kind": "succeeded"}
        assert view.progress.steps is None
        assert Path(view.attempts[0].stdout).read_text() == f"{daemon.home / 'site'}\n"
