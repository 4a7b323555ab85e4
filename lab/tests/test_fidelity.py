"""A real daemon's run, recorded and simulated again: real processes on virtual GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma_lab.runs.record import Run, read
from tests.harness import serving

# name, MiB, seconds alone, SM, DRAM; the virtual clock is 20 times as fast
TASKS = (
    ("large", 9_000, 240, 0.6, 0.3),
    ("middle", 6_000, 200, 0.4, 0.2),
    ("small", 2_000, 160, 0.2, 0.1),
    ("large", 9_000, 240, 0.6, 0.3),
    ("small", 2_000, 160, 0.2, 0.1),
    ("middle", 6_000, 200, 0.4, 0.2),
)
SPEED = 20


def told(*words: str | Path) -> str:
    result = CliRunner().invoke(carma, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All six at once on two GPUs, with a GPU that opens soon after a newcomer.

    The gate is off: these tasks together lie at its edge, where a sample that comes a little later lets a decision fall
    the other way, there or here, and all that follows with it (docs/simulation.md, "What is left, and why").
    """
    path = tmp_path_factory.mktemp("fidelity") / "run.json"
    given = {"virtual__speed": SPEED, "warmup__settle_s": 10, "gate__enabled": False, "monitor__period_s": 0.1}
    with serving(gpus=2, memory_mib=40_960, **given) as daemon, pytest.MonkeyPatch.context() as patch:
        ids = [
            daemon.submit(
                *(sys.executable, "-m", "carma.vgpu.virtual_task", "--seconds", str(seconds), "--memory-mib", str(mib)),
                *("--sm", str(sm), "--dram", str(dram), "--ramp-s", "10"),
                name=name,
                gpu_memory_mib=mib,
            )
            for name, mib, seconds, sm, dram in TASKS
        ]
        for number in ids:
            assert daemon.wait(number).outcome == {"kind": "succeeded"}
        patch.setenv("CARMA_HOME", str(daemon.home))
        told("run-report", "--save", path)
    return path


def test_the_file_tells_what_a_replay_needs(saved: Path) -> None:
    run: Run = read(saved)
    assert run.server is not None
    assert [(gpu.memory_mib, gpu.kind) for gpu in run.server.gpus] == [(40_960, "virtual")] * 2
    assert run.server.period_s == pytest.approx(0.1 * SPEED)
    assert run.about.settings["warmup.settle_s"] == "10.0"
    assert "placement.policy" not in run.about.settings
    for task, (name, mib, _, _, _) in zip(run.tasks, TASKS, strict=True):
        (one,) = task.attempts
        assert (task.name, one.memory_mib, task.asked and task.asked.estimate and task.asked.estimate.source) == (
            name,
            mib,
            "declared",
        )
        assert one.started_at is not None
        assert one.used_s is not None
        assert 0.0 < one.used_s <= one.ended_at - one.placed_at + run.server.period_s
        assert one.activity is not None
        assert one.ramp_s is not None


def test_the_simulator_comes_to_about_the_same(saved: Path) -> None:
    found = json.loads(told("simulate", "--fidelity", saved, "--json"))
    errors = {gap["figure"]: gap["error"] for gap in found["figures"]}
    assert abs(errors["makespan_s"]) < 0.15
    assert abs(errors["completion_mean_s"]) < 0.15
    assert found["task_median"] < 0.15
    assert errors["energy_j"] is not None
    assert set(found["solo"]) <= {"alone", "inferred"}
    for task, noted, (_, _, seconds, _, _) in zip(found["tasks"], read(saved).tasks, TASKS, strict=True):
        (one,) = noted.attempts
        assert one.started_at is not None
        start_s = max(0.0, one.first_use - one.started_at)  # an interpreter's start may take long on a busy machine
        assert task["solo_s"] == pytest.approx(seconds + start_s, rel=0.15), task


def test_without_neighbours_in_the_model_it_does_not(saved: Path, tmp_path: Path) -> None:
    """A replay with solo times that are wrong is far off: the test above can fail."""
    header = "name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active"
    rows = [f"{name},1,{mib},{2 * seconds},{sm},0.1,{dram}" for name, mib, seconds, sm, dram in TASKS[:3]]
    (tmp_path / "tasks.csv").write_text("\n".join([header, *rows, ""]))
    found = json.loads(told("simulate", "--fidelity", saved, "--solo", tmp_path / "tasks.csv", "--json"))
    assert found["met"] is False
    assert found["task_median"] > 0.4
