"""The collector on a real GPU: figures that agree with one another, memory and activity."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from carma.dataset import collect
from carma.dataset.config import Config, write_configs

MIB = 1 << 20


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    file = tmp_path / "configs.jsonl"
    write_configs([mlp(f"mlp-{width}", width) for width in (64, 1024, 4096)], file)
    return file


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
    tally = collect.collect(collect.Options(configs=configs, out=out, activity=activity), sys.executable)
    assert (tally.measured, tally.left) == (3, 0), tally
    rows = [json.loads(line) for line in (out / collect.ROWS).read_text().splitlines()]
    assert rows[0]["gpu"]
    assert rows[0]["driver"]
    return rows[1:]


def test_figures_of_memory_agree(configs: Path, tmp_path: Path) -> None:
    rows = {row["id"]: row for row in measured(configs, tmp_path / "out", activity=False)}
    for row in rows.values():
        assert 0 < row["requested_peak"] <= row["allocated_peak"] <= row["reserved_peak"]
        assert row["context"] > 50 * MIB
        assert row["footprint"] >= row["reserved_peak"] + row["context"]
        assert (row["steps"], row["finite"], row["retries"]) == (4, True, 0)
    assert rows["mlp-4096"]["allocated_peak"] > rows["mlp-64"]["allocated_peak"]


def test_a_run_alone_makes_the_card_work(configs: Path, tmp_path: Path) -> None:
    for row in measured(configs, tmp_path / "out", activity=True):
        assert row["step_ms"] > 0
        assert row["window_steps"] >= 3
        assert row["footprint"] >= row["reserved_peak"]
        assert row["sm_active"] is None or 0 < row["sm_active"] <= 1
        assert row["power_w"] is None or row["power_w"] > 10
