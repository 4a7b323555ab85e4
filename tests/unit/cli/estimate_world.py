"""What the tests of `carma estimate` share: trials and estimators that were written down beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from carma.cli import estimate_request as estimating
from carma.cli import main
from carma.cli.checks.doctor_facts import Found
from carma.core.model.settings import Rules
from carma.core.model.values import Estimate, Gpu, GpuId, NoEstimate
from carma.core.ports import EstimateRequest, Estimator
from carma.errors import NoGpus
from carma.estimate.combination import make_estimator
from carma.trial.layers.description import Described
from carma.trial.protocol import Context, Trial, Trials
from carma.trial.report import TrialReport

LIMIT_S = 180.0
ANSWER = Estimate(
    footprint_mib=5_000,
    upper_mib=5_427,
    source="trace",
    level=0.99,
    allocated_mib=3_900,
    reserved_mib=4_240,
    steps_seen=3,
    parts_mib={"weights": 400, "optimizer_state": 800, "context": 760},
    warnings=("torch.compile was not followed",),
)
LOCAL = Gpu(id=GpuId("GPU-11112222"), index=0, name="NVIDIA A30", memory_mib=24_000)
SECOND = Gpu(id=GpuId("GPU-33334444"), index=1, name="NVIDIA Prototype", memory_mib=9_000)
NAMES = {
    *("estimator", "gpu", "allocated_mib", "reserved_mib", "footprint_mib", "bound_mib", "level", "steps_seen"),
    *("rests_on", "took_s", "warnings", "parts_mib", "demand", "demand_predicted"),
}


class ScriptedTrials:
    """Counts how often a command is really run."""

    def __init__(self, answer: Trial | NoEstimate) -> None:
        self.answer = answer
        self.runs: list[EstimateRequest] = []

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        self.runs.append(request)
        return self.answer

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:  # noqa: ARG002
        return Described(layers=(), batch=8)


class Scripted:
    """An estimator: what it says is decided by a function of its Context."""

    quick = False

    def __init__(self, name: str, context: Context, say: Callable[[Context, EstimateRequest], Any]) -> None:
        self.name = name
        self._context = context
        self._say = say

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        answer: Estimate | NoEstimate = self._say(self._context, request)
        return answer


class World:
    """The seams of the verb: estimators by name, trial runs, the GPUs of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials = ScriptedTrials(Trial(TrialReport(format=1, stop="steps", steps=3), b"", 1.0))
        self.trials_asked: list[tuple[Rules, int | None]] = []
        self.says: dict[str, Callable[[Context, EstimateRequest], Any]] = {"trace": lambda _c, _r: ANSWER}
        self.requests: list[EstimateRequest] = []
        self.here: tuple[Gpu, ...] = ()
        world = self

        class Machine:
            @property
            def found(self) -> Found:
                return Found(world.here) if world.here else Found(error=NoGpus("none"))

        def make_trials(rules: Rules, _environ: Mapping[str, str], steps: int | None) -> Trials:
            self.trials_asked.append((rules, steps))
            return self.trials

        real = make_estimator

        def make(name: str, context: Context) -> Estimator:
            return Scripted(name, context, self._heard(name)) if name in self.says else real(name, context)

        monkeypatch.setattr(estimating, "DoctorFacts", Machine)
        monkeypatch.setattr(estimating, "make_trials", make_trials)
        monkeypatch.setattr(estimating, "make_estimator", make)
        monkeypatch.setattr(estimating, "names", lambda _group: ("declared", "history", *sorted(self.says)))

    def _heard(self, name: str) -> Callable[[Context, EstimateRequest], Any]:
        def say(context: Context, request: EstimateRequest) -> Any:
            self.requests.append(request)
            return self.says[name](context, request)

        return say


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("CARMA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return World(monkeypatch)


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["estimate", *words]) == code
    return capsys.readouterr().out


def complained(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(["estimate", *words]) == code
    caught = capsys.readouterr()
    assert caught.out == ""
    return caught.err


def figures(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(printed(capsys, "--json", *words, code=code))


# What is asked
