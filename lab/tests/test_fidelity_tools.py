"""The tools that record runs for `carma simulate --fidelity`: what they submit, and what they know of tasks alone."""

from __future__ import annotations

import pytest

from carma.errors import Refused
from carma_lab.bench.gpu import environment
from carma_lab.bench.gpu.trial_shapes import SHAPES
from lab.tools import fidelity_gpu, fidelity_virtual
from lab.tools.fidelity_gpu import Recorder, memory_mib
from tests.docs.markdown import ROOT


def recorder(*words: str) -> Recorder:
    return Recorder(fidelity_gpu._parser().parse_args(["--out", "nowhere", *words]))


def test_tasks_train_for_the_seconds_that_were_asked_for() -> None:
    real, dry = recorder("--seconds", "40"), recorder("--seconds", "40", "--dry-run")
    for shape in SHAPES:
        assert real.steps(shape) == pytest.approx(40 * shape.steps / shape.virtual.seconds, abs=1)
        assert dry.steps(shape) == 4_000
        assert memory_mib(shape) > (shape.declared_mib or 0)
    assert len(recorder("--tasks", "3").shapes) == 3


def test_every_run_has_its_policy_and_samples_as_often_in_virtual_time() -> None:
    real, dry = recorder(), recorder("--dry-run")
    assert [real.settings(name).policy for name in fidelity_gpu.RUNS] == ["exclusive", "goodput", "magm", "magm"]
    assert real.settings("magm-open").settings["gate"] == {"enabled": False}
    assert "gate" not in real.settings("magm").settings
    assert (real.settings("magm").gpus, real.settings("magm").settings["monitor"]) == (0, {"period_s": 1.0})
    assert (dry.settings("magm").gpus, dry.settings("magm").settings["monitor"]) == (1, {"period_s": 0.1})


def test_the_virtual_trace_is_the_same_each_time_and_the_one_that_was_recorded() -> None:
    from carma.traces import read

    once, again = fidelity_virtual.trace(), fidelity_virtual.trace()
    assert once == again
    assert read(ROOT / "lab" / "results" / "simulation" / "fidelity" / "virtual.csv").tasks == once.tasks
    settings = fidelity_virtual.settings_of("unknown", 10.0, 0.2)
    assert settings.settings == {"memory": {"sources": []}, "monitor": {"period_s": 0.2}}


def test_a_python_without_torch_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Refused, match="torch and torchvision"):
        environment.check_torch("a hint")
