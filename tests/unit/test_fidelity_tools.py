"""The tools that record runs for `carma simulate --fidelity`: what they submit, and what they know of tasks alone."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from carma.bench.gpu.trial_shapes import SHAPES
from carma.errors import Refused
from carma.sim.record import Run
from tests.docs.markdown import ROOT
from tests.unit.report_made import run, task
from tools import fidelity_gpu, fidelity_virtual
from tools.fidelity_gpu import TABLE, Recorded, alone_in, made_up, memory_mib


def recorded(*words: str) -> Recorded:
    return Recorded(fidelity_gpu._parser().parse_args(["--out", "nowhere", *words]))


def test_the_shipped_table_knows_every_task_alone() -> None:
    table = alone_in(ROOT / TABLE)
    assert {shape.workload for shape in SHAPES} <= set(table)
    for alone in table.values():
        assert alone.steps_per_s > 0.0
        assert 0.0 <= alone.demand.sm_active <= 1.0
        assert alone.demand.power is not None
    assert alone_in(Path("missing.json")) == {}


def test_tasks_train_for_the_seconds_that_were_asked_for() -> None:
    real, dry = recorded("--seconds", "40"), recorded("--seconds", "40", "--dry-run")
    for shape in SHAPES:
        assert real.steps(shape) == pytest.approx(40 * shape.steps / shape.virtual.seconds, abs=1)
        assert dry.steps(shape) == 4_000
        assert memory_mib(shape) > (shape.declared_mib or 0)
    assert len(recorded("--tasks", "3").shapes) == 3


def test_solo_times_are_those_of_the_table_after_what_it_took_to_get_ready() -> None:
    made, first = recorded("--dry-run"), SHAPES[0].workload
    made.logs = {first: [{"what": "ready", "at": 1_000.2}, {"what": "done", "at": 1_004.2}]}
    one = task(1, 0.0, 10.0, 60.0, name=first)
    whole: Run = run(one)
    found = made.known(whole, made_up())
    # From its placement at 10 (no first use is known) to 20: four seconds of a clock that is ten times as fast.
    assert found[first].seconds == pytest.approx(10.0 + made.steps(SHAPES[0]) * 0.01)
    assert found[first].from_first_use
    assert set(found) == {first}, "of tasks without a log nothing is known"


def test_the_virtual_trace_is_the_same_each_time_and_the_one_that_was_recorded() -> None:
    from carma.traces import read

    once, again = fidelity_virtual.trace(), fidelity_virtual.trace()
    assert once == again
    assert read(ROOT / "results" / "simulation" / "fidelity" / "virtual.csv").tasks == once.tasks
    settings = fidelity_virtual.settings_of("unknown", 10.0, 0.2)
    assert settings.settings == {"memory": {"sources": []}, "monitor": {"period_s": 0.2}}


def test_a_python_without_torch_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Refused, match="torch and torchvision"):
        fidelity_gpu._check(argparse.Namespace(dry_run=False))
    fidelity_gpu._check(argparse.Namespace(dry_run=True))
