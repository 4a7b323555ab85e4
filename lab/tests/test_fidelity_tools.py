"""The tools that record runs for `carma simulate --fidelity`: what they submit, and what they know of tasks alone."""

from __future__ import annotations

import pytest

from carma.errors import Refused
from carma_lab.bench.gpu import environment
from lab.tools import fidelity_virtual
from tests.docs.markdown import ROOT


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
