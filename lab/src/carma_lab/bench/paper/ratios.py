"""Rows as parts of exclusive GPUs, and their means over traces. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, fsum, log

from carma.core.model.values import Record
from carma_lab.bench.paper.cases import Row


class Ratio(Record, frozen=True, kw_only=True):
    """Exclusive GPUs on the same trace are 1; `slowdown` is against each task's run alone; counts are counts."""

    makespan: float
    completion: float
    completion_p95: float
    wait: float | None
    run: float
    energy: float | None
    slowdown: float | None
    slowdown_p95: float | None
    ooms: int
    failed: int


def ratio(row: Row, alone: Row) -> Ratio:
    return Ratio(
        makespan=row.makespan_s / alone.makespan_s,
        completion=row.completion_mean_s / alone.completion_mean_s,
        completion_p95=row.completion_p95_s / alone.completion_p95_s,
        wait=row.wait_mean_s / alone.wait_mean_s if alone.wait_mean_s > 0 else None,
        run=row.run_mean_s / alone.run_mean_s,
        energy=row.energy_j / alone.energy_j if row.energy_j is not None and alone.energy_j else None,
        slowdown=row.slowdown_mean,
        slowdown_p95=row.slowdown_p95,
        ooms=row.ooms,
        failed=row.failed,
    )


def over_traces(found: Iterable[Ratio]) -> Ratio:
    """Geometric means of what are ratios, sums of what is counted."""
    every = list(found)

    def mean(name: str) -> float | None:
        return geo_mean([getattr(one, name) for one in every])

    means = {name: mean(name) for name in Ratio.__struct_fields__ if name not in ("ooms", "failed")}
    return Ratio(**means, ooms=sum(one.ooms for one in every), failed=sum(one.failed for one in every))  # type: ignore[arg-type]  # only None where a part of it was


def geo_mean(values: Sequence[float | None]) -> float | None:
    """None where one is not known, or is 0: nothing waited at all."""
    known = [value for value in values if value is not None and value > 0]
    return exp(fsum(map(log, known)) / len(known)) if known and len(known) == len(values) else None
