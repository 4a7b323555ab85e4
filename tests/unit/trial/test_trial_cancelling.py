"""Trial runs can be cancelled one by one, and leave no refusal behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carma.core.model.values import NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial.sandbox import Sandbox
from carma.trial.trial_run import TrialCancelled, TrialRuns

LIMIT_S = 180.0


class Box:
    """Replaces the sandbox's program: records that it began, and waits until it is ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = f"import os, time; open({str(folder)!r} + f'/{{os.getpid()}}', 'x').close(); time.sleep(600)"
        self.launcher = (sys.executable, "-I", "-S", "-c", program)

    def make(self, cache: Path) -> TrialRuns:
        return TrialRuns(cache, make_sandbox=lambda: Sandbox(self.launcher))

    def begun(self) -> list[Path]:
        return list(self.folder.iterdir())


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def ask(trials: TrialRuns, task: int, word: str) -> tuple[threading.Thread, list[object]]:
    said: list[object] = []
    spec = TaskSpec(command=("python", word), directory="/")
    request = EstimateRequest(task=TaskId(task), owner=Owner(0, 0, "root"), spec=spec, gpus=())

    def work() -> None:
        try:
            said.append(trials.run(request))
        except TrialCancelled as error:
            said.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, said


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "begun").mkdir()
    return Box(tmp_path / "begun")


def test_a_cancelled_trial_does_not_end_another(tmp_path: Path, box: Box) -> None:
    trials = box.make(tmp_path / "cache")
    one, said = ask(trials, 1, "one.py")
    other, others = ask(trials, 2, "other.py")
    until(lambda: len(box.begun()) == 2)
    trials.cancel(TaskId(1))
    one.join(LIMIT_S)
    assert [type(answer) for answer in said] == [TrialCancelled]
    assert other.is_alive()
    trials.cancel(TaskId(2))
    other.join(LIMIT_S)
    assert [type(answer) for answer in others] == [TrialCancelled]


def test_the_same_command_gets_another_trial_after_a_cancelled_one(tmp_path: Path, box: Box) -> None:
    trials = box.make(tmp_path / "cache")
    for task in (1, 2):
        thread, said = ask(trials, task, "same.py")
        until(lambda task=task: len(box.begun()) == task)  # type: ignore[misc]
        trials.cancel(TaskId(task))
        thread.join(LIMIT_S)
        assert [type(answer) for answer in said] == [TrialCancelled]


def test_cancelling_a_trial_that_does_not_run_has_no_effect(tmp_path: Path, box: Box) -> None:
    trials = box.make(tmp_path / "cache")
    trials.cancel(TaskId(7))
    spec = TaskSpec(command=(), directory="/")
    request = EstimateRequest(task=TaskId(7), owner=Owner(0, 0, "root"), spec=spec, gpus=())
    assert isinstance(trials.run(request), NoEstimate)


def test_a_trial_that_is_cancelled_before_it_reaches_its_sandbox_does_not_start(
    tmp_path: Path, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = box.make(tmp_path / "cache")

    def cancel_first(request: EstimateRequest) -> None:
        trials.cancel(request.task)

    monkeypatch.setattr("carma.trial.trial_run.fingerprint", cancel_first)
    thread, said = ask(trials, 1, "one.py")
    thread.join(LIMIT_S)
    assert [type(answer) for answer in said] == [TrialCancelled]
    assert box.begun() == []


def test_after_the_close_no_trial_starts(tmp_path: Path, box: Box) -> None:
    trials = box.make(tmp_path / "cache")
    trials.close()
    thread, said = ask(trials, 1, "one.py")
    thread.join(LIMIT_S)
    assert [type(answer) for answer in said] == [TrialCancelled]
    assert box.begun() == []
