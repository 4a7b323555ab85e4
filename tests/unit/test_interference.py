"""The interference study's parts that need no GPU: which groups are drawn, and that the measured tables can be read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from carma.bench.gpu.groups import draw
from carma.bench.gpu.interference import Options, Row, _write
from carma.bench.gpu.workloads import BY_NAME, WORKLOADS
from carma.monitor.nvml import NvmlSampler
from tests.scripted_nvml import Card, ScriptedNvml

RESULTS = Path(__file__).parents[2] / "results" / "h200"
SIZES = {2: 70, 3: 45, 4: 35}


def test_groups_are_distinct_of_the_sizes_asked_for_and_the_same_for_the_same_seed() -> None:
    names = [workload.name for workload in WORKLOADS]
    groups = draw(names, SIZES, 1)
    assert Counter(len(group) for group in groups) == SIZES
    assert len(set(groups)) == len(groups)
    assert all(len(set(group)) == len(group) for group in groups)
    assert draw(names, SIZES, 1) == groups
    assert draw(names, SIZES, 2) != groups


def test_a_table_says_how_it_was_made_and_can_be_read_back(tmp_path: Path) -> None:
    sampler = NvmlSampler(ScriptedNvml(Card("GPU-a")))
    row = Row(
        tasks=("a", "b"),
        percent=(100, 50),
        rates=(1.23456789, 2.0),
        sm_active=0.5,
        sm_occupancy=None,
        dram_active=0.1,
        gpu_util=1.0,
        power_w=300.0,
        energy_j=12.0,
        memory_used_mib=900,
    )
    options = Options(json=str(tmp_path / "table.json"))
    _write(options, [row, row], {"a": {"reserved_mib": 7, "torch": "2.11"}}, sampler)
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["driver"] == "580.159.04"
    assert table["torch"] == "2.11"
    assert table["command"].startswith("python -m carma.bench.gpu.interference")
    assert [row["rates"] for row in table["rows"]] == [[1.23457, 2.0]] * 2
    assert table["rows"][0]["sm_occupancy"] is None


def test_every_task_takes_part_about_equally() -> None:
    names = [workload.name for workload in WORKLOADS]
    parts = Counter(name for group in draw(names, SIZES, 3) for name in group)
    assert set(parts) == set(names)
    assert max(parts.values()) - min(parts.values()) <= 8


def test_fewer_groups_than_asked_for_when_there_are_no_more() -> None:
    assert sorted(draw(["a", "b", "c"], {2: 10}, 1)) == [("a", "b"), ("a", "c"), ("b", "c")]


@pytest.mark.parametrize("name", ["interference-mps.json", "interference-timeslice.json"])
def test_the_measured_tables_name_known_tasks_and_have_each_of_them_alone(name: str) -> None:
    table = json.loads((RESULTS / name).read_text())
    alone = {row["tasks"][0] for row in table["rows"] if len(row["tasks"]) == 1 and row["percent"] == [100]}
    assert alone == set(BY_NAME)
    for row in table["rows"]:
        assert set(row["tasks"]) <= set(BY_NAME)
        assert len(row["rates"]) == len(row["tasks"]) == len(row["percent"])
        assert all(rate > 0 for rate in row["rates"])
        assert 0 <= row["sm_active"] <= 1
    shared = [row for row in table["rows"] if len(row["tasks"]) > 1 and set(row["percent"]) == {100}]
    assert len(shared) >= (150 if table["mechanism"] == "mps" else 50)
