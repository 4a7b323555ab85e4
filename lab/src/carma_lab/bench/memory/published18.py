"""The 18 real models of the published evaluation: what was measured, and what each estimator predicted, in MiB.

The figures are those of itu-rad/GPUMemNet (Results_plotter_for_paper/data.csv; GPUMemNet's are the upper edges of its
bins), measured on an A100 of 40 GiB by nvidia-smi. Fake Tensor gave none for transformers. `measured_later_mib` is what
the same authors measured in September 2025 with the scripts of itu-rad/CARMA (workloads/ehsan-summary.csv), 5 to 26 %
less: with which versions of torch and CUDA either was made is not known, and no estimate can be near both. There XLNet
and GPT2-large ran on two GPUs, so their figures are left out; the first measurement of GPT2-large is so near to that
one that it was probably made on two GPUs as well. The settings are those of the authors' scripts (`zoo/published.py`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import msgspec

from carma.core.model.values import Record
from carma_lab.bench.memory.figures import Row
from carma_lab.bench.memory.measured import MIB, Measured

SOURCE = "itu-rad/GPUMemNet, Results_plotter_for_paper/data.csv; arXiv 2508.19073"
GPU = "a100-40gb"
SCRIPT = "published.py"


class Published(Record, frozen=True, kw_only=True):
    name: str
    model: str  # of zoo/published.py
    batch: int
    measured_mib: int
    measured_later_mib: int | None
    gpumemnet_mib: int
    fake_tensor_mib: int | None
    horus_mib: int

    @property
    def run(self) -> Measured:
        """The published case as a measured run. Allocated and reserved were not published."""
        return Measured(
            id=f"{self.model}.{self.batch}",
            family=self.model,
            argv=("--model", self.model, "--batch", str(self.batch)),
            footprint_peak=self.measured_mib * MIB,
            reserved_peak=0,
            allocated_peak=0,
        )


def _read() -> Iterator[Published]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield msgspec.convert({name: text or None for name, text in row.items()}, Published, strict=False)


PUBLISHED = tuple(_read())


class Off(Record, frozen=True, kw_only=True):
    """How far one of the table's columns is off one of the two measurements, over the models that both have."""

    name: str
    against: str
    models: int
    mean_mib: float
    median: float  # as a part of the measured value
    under: int


Figure = Callable[[Published], float | None]
AGAINST: dict[str, Figure] = {
    "measured": lambda one: one.measured_mib,
    "measured later": lambda one: one.measured_later_mib,
}


def errors(rows: Mapping[str, Row], others: Mapping[str, Mapping[str, Row]] | None = None) -> tuple[Off, ...]:
    """Errors of each column against each measurement; `rows` are the main estimator's answers by the run's name,
    `others` those of our other ones, by their names."""
    columns: dict[str, Figure] = {
        "ours": _said(rows),
        **{f"ours, {name}": _said(answers) for name, answers in (others or {}).items()},
        "GPUMemNet": lambda one: one.gpumemnet_mib,
        "Fake Tensor": lambda one: one.fake_tensor_mib,
        "Horus": lambda one: one.horus_mib,
    }
    found = (_off(name, predicted, against) for against in AGAINST for name, predicted in columns.items())
    return tuple(off for off in found if off is not None)


def _said(answers: Mapping[str, Row]) -> Figure:
    return lambda one: answers[one.run.id].estimated_mib if one.run.id in answers else None


def _off(name: str, predicted: Figure, against: str) -> Off | None:
    both = ((predicted(one), AGAINST[against](one)) for one in PUBLISHED)
    pairs = [(estimated, measured) for estimated, measured in both if estimated is not None and measured is not None]
    if not pairs:
        return None
    return Off(
        name=name,
        against=against,
        models=len(pairs),
        mean_mib=sum(abs(estimated - measured) for estimated, measured in pairs) / len(pairs),
        median=median(abs(estimated / measured - 1) for estimated, measured in pairs),
        under=sum(estimated < measured for estimated, measured in pairs),
    )
