"""Published figures of the traces' tasks on A100s of 40 GB: alone (lab/results/a100/solo.csv) and in exclusive runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

SOLO = Path("lab/results/a100/solo.csv")
FIGURES = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power_w")
# Exclusive runs of other traces on four A100s, means over active samples, by GitHub ehsanyousefzadehasl/AEGIS
# (final_representative_evaluation_analysis).
EXCLUSIVE = {
    "philly": {"sm_active": 0.423, "sm_occupancy": 0.193, "dram_active": 0.262, "power_w": 218.0},
    "saturn": {"sm_active": 0.430, "sm_occupancy": 0.194, "dram_active": 0.252, "power_w": 213.0},
    "venus": {"sm_active": 0.605, "sm_occupancy": 0.269, "dram_active": 0.265, "power_w": 221.0},
}
RANGES = {
    figure: (min(run[figure] for run in EXCLUSIVE.values()), max(run[figure] for run in EXCLUSIVE.values()))
    for figure in EXCLUSIVE["philly"]
}


class Solo(NamedTuple):
    """One task. `figures` are means over the GPUs that do anything; what the file does not tell is not in there."""

    name: str
    figures: Mapping[str, float]
    gpus: int
    busy_gpus: int
    start_s: float | None


def read(path: Path = SOLO) -> dict[str, Solo]:
    return {solo.name: solo for solo in _solos(rows(path))}


def rows(path: Path = SOLO) -> list[dict[str, str]]:
    """One for each GPU of a task."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def works(row: Mapping[str, str]) -> bool:
    """Whether the task does anything on that GPU."""
    return float(row["sm_active"]) > 0.0


def _solos(table: list[dict[str, str]]) -> Iterator[Solo]:
    for name, found in groupby(table, key=lambda row: row["name"]):
        of_task = list(found)
        busy = [row for row in of_task if works(row)] or of_task
        yield Solo(
            name=name,
            figures={figure: fmean(float(row[figure]) for row in busy) for figure in FIGURES if busy[0].get(figure)},
            gpus=len(of_task),
            busy_gpus=len(busy),
            start_s=float(of_task[0]["start_s"]) if of_task[0].get("start_s") else None,
        )
