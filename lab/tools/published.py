"""What was published of the traces' tasks alone on an A100 40 GB: lab/results/a100/solo.csv, which names its source."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

SOLO = Path("lab/results/a100/solo.csv")
FIGURES = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power_w")


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
