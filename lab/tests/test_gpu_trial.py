"""The trial on a virtual GPU, for real: private daemons, the command line, real processes; small and short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from carma_lab.bench.gpu import trial


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert "error" not in found, found
    return found


def test_tasks_an_oom_and_a_restart_are_shown_on_a_virtual_gpu(tmp_path: Path) -> None:
    trial.run(trial.Options(out=str(tmp_path), virtual=True, tasks=3, scale=0.2, limit_s=900.0, rungs=("framework",)))

    tasks = read(tmp_path / "tasks.json")
    assert (tasks["tasks_submitted"], tasks["tasks_succeeded"]) == (3, 3)
    for row in tasks["tasks"]:
        assert row["attempts"] == 1
        assert row["own"]["steps"] >= 100
        assert row["mechanism"] == "timeslice"
    declared = tasks["tasks"][0]
    assert [guard["limit_mib"] for guard in declared["guards"]] == [declared["declared_mib"]] * 2
    assert tasks["exclusive"]["tasks_succeeded"] == 3
    assert tasks["side_by_side"]["complete"]

    (oom,) = read(tmp_path / "oom.json")["rounds"]
    assert "error" not in oom, oom
    assert oom["everything_ended"]
    assert [(each["name"], each["outcome"]["kind"]) for each in oom["failed"]] == [("grower", "out_of_memory")]
    assert oom["grower"]["outcome"] == "succeeded"
    assert oom["grower"]["attempts"][1]["booking_mib"] > oom["sizes_mib"]["target"]
    assert [len(each["attempts"]) for each in oom["innocents"]] == [1, 1, 1]
    assert oom["shortfalls"] == []

    restart = read(tmp_path / "restart.json")
    assert all(row["kept"] for row in restart["daemon"]["tasks"]), restart["daemon"]
    assert restart["everything_ended"]
    assert restart["mps"] == {"skipped": "virtual GPUs have no MPS"}
    assert [row["outcome"] for row in restart["tasks"]] == ["succeeded"] * 4
    assert all(len(row["attempts"]) == 1 for row in restart["tasks"])
