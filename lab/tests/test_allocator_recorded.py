"""The allocator's model against what torch's own allocator did on an H200: histories of twelve training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carma.trial.replay.allocator_options import AllocatorOptions
from carma_lab.bench.memory.zoo import history
from lab_fixtures.allocator_history import follow

RECORDED = Path(__file__).parents[2] / "lab" / "results" / "h200" / "memory"
RUNS = dict(history.unpack(record) for record in history.records((RECORDED / "histories.bin").read_bytes()))


def _measured() -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (RECORDED / "truth.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    return {row["id"]: row for row in rows}


MEASURED = _measured()


def test_the_recorded_runs_are_of_many_kinds() -> None:
    assert len(RUNS) == 12
    assert len({MEASURED[name]["family"] for name in RUNS}) == 12


@pytest.mark.parametrize("name", RUNS)
def test_the_model_reserves_what_torch_reserved_at_every_step(name: str) -> None:
    found = follow(RUNS[name], AllocatorOptions())
    assert found.differences == ()
    assert found.unknown_frees == 0
    assert found.peak_reserved_bytes == MEASURED[name]["reserved_peak"]
    assert found.peak_allocated_bytes == MEASURED[name]["allocated_peak"]
    assert len(RUNS[name]) == MEASURED[name]["events"]
