"""The collector on a real GPU: figures that agree with one another, memory and activity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.dataset import collect
from gpumemnet.dataset.config import Config
from gpumemnet.dataset.torch_interpreter import environment
from gpumemnet_fixtures.dataset_rows import write_configs

MIB = 1 << 20
INSIDE = collect.MAIN.parent
REST = """
import json, sys
sys.path.insert(0, sys.argv[1])
import loop, training_run, torch, activity
model = [{"op": "linear", "out": 64}, {"op": "act", "f": "gelu"}] * 4 + [{"op": "linear", "out": 10}]
config = {"id": "a", "family": "mlp", "batch": 1 << 18, "input": [64], "outputs": 10, "model": model}
one = training_run.TrainingRun(config, "cuda", 3, loop.random_numbers())
assert one.start() is None
row = one.train()
assert row["error"] is None and not row["oom"], row
held = [torch.cuda.memory_reserved()]
one.rest()
held.append(torch.cuda.memory_reserved())
activity.warm_up(one.training.step, one.meter.segments)
held.append(torch.cuda.memory_reserved())
one.release()
assert torch.cuda.memory_reserved() < held[1]
print(json.dumps(held))
"""


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    file = tmp_path / "configs.jsonl"
    return write_configs(file, *(mlp(f"mlp-{width}", width) for width in (64, 1024, 4096)))


def mlp(name: str, width: int) -> Config:
    model: tuple[dict[str, object], ...] = (
        {"op": "linear", "out": width},
        {"op": "act", "f": "relu"},
        {"op": "linear", "out": 10},
    )
    return Config(
        id=name, family="mlp", shape="uniform", batch=256, input=(512,), outputs=10, guess_mib=1000, model=model
    )


def measured(configs: Path, out: Path, activity: bool) -> list[dict[str, Any]]:
    tally = collect.collect(collect.CollectOptions(configs=configs, out=out, activity=activity), sys.executable)
    assert (tally.measured, tally.left) == (3, 0), tally
    rows = [json.loads(line) for line in (out / collect.ROWS).read_text().splitlines()]
    assert rows[0]["gpu"]
    assert rows[0]["driver"]
    return rows[1:]


def test_memory_figures_agree(configs: Path, tmp_path: Path) -> None:
    rows = {row["id"]: row for row in measured(configs, tmp_path / "out", activity=False)}
    for row in rows.values():
        assert 0 < row["requested_peak"] <= row["allocated_peak"] <= row["reserved_peak"]
        assert row["context"] > 50 * MIB
        assert row["footprint"] >= row["reserved_peak"] + row["context"]
        assert (row["steps"], row["finite"], row["retries"]) == (3, True, 0)
        assert row["ready_s"] + row["made_s"] + row["trained_s"] <= row["took_s"] + 0.1
    assert rows["mlp-4096"]["allocated_peak"] > rows["mlp-64"]["allocated_peak"]


def test_a_run_alone_keeps_the_gpu_busy(configs: Path, tmp_path: Path) -> None:
    before = {row["id"]: row for row in measured(configs, tmp_path / "before", activity=False)}
    for row in measured(configs, tmp_path / "out", activity=True):
        assert row["step_ms"] > 0
        assert row["window_steps"] >= 2
        assert row["sm_active"] is None or 0 < row["sm_active"] <= 1
        assert row["power_w"] is None or row["power_w"] > 10
        assert row["reserved_peak"] == before[row["id"]]["reserved_peak"]
        assert abs(row["footprint"] - before[row["id"]]["footprint"]) <= 64 * MIB  # read before it rested


def test_a_resting_run_releases_temporary_memory_and_can_continue() -> None:
    """In a process of its own: this one must not start CUDA."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    command = [sys.executable, "-c", REST, str(INSIDE)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    trained, rested, again = json.loads(ended.stdout)
    assert rested < trained / 2
    assert again > rested
