"""Trial runs of real scripts with the real torch: each command is run once, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from carma.core.model.values import NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.trial.cards import as_gpu, find_card
from carma.trial.protocol import Trial
from carma.trial.report import ALLOC, FREE, read_events
from carma.trial.trial_reasons import kind_of
from carma.trial.trial_run import TrialRuns

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 300.0  # of a busy machine; a trial takes a few seconds


class Trying:
    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._cache = cache
        self._known: dict[tuple[tuple[str, ...], int], Trial | NoEstimate] = {}

    def folder(self) -> Path:
        """A fresh copy of the scripts."""
        made = self._folder / f"work{len(list(self._folder.iterdir()))}"
        shutil.copytree(SCRIPTS, made)
        return made

    def run(self, *command: str, gpus: int = 1) -> Trial | NoEstimate:
        key = (command, gpus)
        if key not in self._known:
            self._known[key] = self.run_in(self.folder(), *command, gpus=gpus)
        return self._known[key]

    def run_in(
        self,
        folder: Path,
        *command: str,
        gpus: int = 1,
        limit_s: float = LIMIT_S,
        environment: Mapping[str, str] | None = None,
    ) -> Trial | NoEstimate:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        variables = {"PATH": path, "HOME": str(folder), **(environment or {})}
        spec = TaskSpec(command=command, directory=str(folder), environment=variables, gpus=gpus)
        card = find_card("h200")
        assert card is not None
        owner = Owner(os.geteuid(), os.getegid(), "root" if os.geteuid() == 0 else "me")
        request = EstimateRequest(task=TaskId(1), owner=owner, spec=spec, gpus=(as_gpu(card),) * gpus)
        return TrialRuns(self._cache, limit_s=limit_s).run(request)

    def script(self, text: str, **options: float) -> Trial | NoEstimate:
        folder = self.folder()
        (folder / "train.py").write_text(text)
        return self.run_in(folder, sys.executable, "train.py", limit_s=options.get("limit_s", LIMIT_S))

    def stepped(self, *command: str, gpus: int = 1) -> Trial:
        """Whether the run reached its steps."""
        trial = self.run(*command, gpus=gpus)
        return stepped(trial)

    def python(self, *words: str, gpus: int = 1) -> Trial:
        return self.stepped(sys.executable, *words, gpus=gpus)


def stepped(trial: Trial | NoEstimate) -> Trial:
    assert isinstance(trial, Trial), trial.reason
    assert trial.report.stop == "steps", trial.report.reason
    assert trial.report.steps >= 2
    return trial


class Stop(NamedTuple):
    """Why there is no figure. `stop` is "none" for a run without a report, whose `cause` is its kind."""

    stop: str
    cause: str
    reason: str


def stopped(trial: Trial | NoEstimate) -> Stop:
    if isinstance(trial, NoEstimate):
        return Stop("none", kind_of(trial) or "", trial.reason)
    return Stop(trial.report.stop, trial.report.cause, trial.report.reason)


def peak_bytes(trial: Trial) -> int:
    """Peak of the bytes that tensors hold, in blocks of 512 bytes."""
    live: dict[int, int] = {}
    now = most = 0
    for event in read_events(trial.events):
        if event.kind == ALLOC:
            live[event.id] = -(-event.bytes // 512) * 512
            now += live[event.id]
            most = max(most, now)
        elif event.kind == FREE:
            now -= live.pop(event.id)
    return most
