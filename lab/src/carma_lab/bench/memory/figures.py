"""Errors of estimates, summarised. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from msgspec.structs import replace

from carma.core.model.values import Record
from carma.demo.figures import percentile
from carma.trial.replay.bound import Score, Scores, bound_for


def scores_of(rows: Iterable[Row], source: str = "") -> Scores:
    """What bounds rest on: of each run that was replayed, its family, its group, its error and its replays' spread."""
    scores = [
        Score(row.family, row.group, round(math.log(row.measured_mib / row.replayed_mib), 5), round(row.spread, 5))
        for row in rows
        if row.replayed_mib is not None
    ]
    return Scores(source=source, cases=tuple(sorted(scores, key=lambda one: (one.group, one.family, one.score))))


def left_out_bounds(rows: Sequence[Row], level: float) -> tuple[Row, ...]:
    """The rows with point and bound as for a family that was never measured."""
    known = scores_of(rows)
    return tuple(_judged(row, without_family(known, row.family), level) for row in rows)


def without_family(scores: Scores, family: str) -> Scores:
    """A case is never compared with its own family."""
    return replace(scores, cases=tuple(case for case in scores.cases if case.family != family))


def _judged(row: Row, scores: Scores, level: float) -> Row:
    if row.replayed_mib is None:
        return row
    bound = bound_for(row.replayed_mib, row.spread, row.group, level, scores)
    return replace(row, estimated_mib=row.replayed_mib, bound_mib=bound.upper_bytes)


_NUMBER = re.compile(r"\d[\d,.]*")
UNDER_BY = 0.05  # an estimate that is too small by more than this is the mistake that hurts others


class Row(Record, frozen=True, kw_only=True):
    """The answer of one estimator for one measured run, in MiB: an estimate, or the reason for none."""

    case: str
    family: str
    estimator: str
    measured_mib: float
    took_s: float
    estimated_mib: float | None = None
    bound_mib: float | None = None  # None: the estimator gives none
    measured_reserved_mib: float | None = None
    reserved_mib: float | None = None
    measured_allocated_mib: float | None = None
    allocated_mib: float | None = None
    replayed_mib: float | None = None  # a trial run's figure, by `fold`'s model
    spread: float = 0.0  # of its replays
    fold: str = ""  # the model of cuDNN's workspaces that it was replayed with; "": the shipped one
    group: str = ""  # the kind of run whose past errors its bound rests on
    refused: str | None = None
    network: str = ""  # what the model is made of: "cnn", "transformer", "mlp"; "": none of these, or unknown

    @property
    def is_known(self) -> bool:
        """The shipped model of cuDNN's workspaces has learnt from runs like this one: no case of an unseen family."""
        return not self.fold and self.group.startswith(("conv", "benchmark"))

    @property
    def error(self) -> float | None:
        """Relative error of the footprint; below zero if the estimate is too small."""
        return None if self.estimated_mib is None else self.estimated_mib / self.measured_mib - 1.0


class Summary(Record, frozen=True, kw_only=True):
    """Shares and errors as parts of one. None where there is nothing to sum up."""

    name: str
    cases: int
    answered: int
    refused: int
    error_median: float | None = None  # without its sign, as the next
    error_p90: float | None = None
    error_worst: float | None = None  # with its sign
    under_share: float | None = None
    under_by_5_percent_share: float | None = None
    bound_holds_share: float | None = None
    overbooked_median: float | None = None  # by the bound, or by the estimate where there is none
    took_median_s: float | None = None


class Refusal(Record, frozen=True):
    """Runs that an estimator refused for the same reason, but for the numbers in it."""

    estimator: str
    runs: int
    reason: str  # of the first of them
    families: tuple[str, ...]


def summarise(name: str, rows: Sequence[Row]) -> Summary:
    errors = [row.error for row in rows if row.error is not None]
    took_median_s = median(row.took_s for row in rows) if rows else None
    if not errors:
        return Summary(name=name, cases=len(rows), answered=0, refused=len(rows), took_median_s=took_median_s)
    sizes = [abs(error) for error in errors]
    held = [row.bound_mib >= row.measured_mib for row in rows if row.bound_mib is not None]
    return Summary(
        name=name,
        cases=len(rows),
        answered=len(errors),
        refused=len(rows) - len(errors),
        error_median=median(sizes),
        error_p90=percentile(sizes, 90),
        error_worst=max(errors, key=abs),
        under_share=_share(error < 0 for error in errors),
        under_by_5_percent_share=_share(error < -UNDER_BY for error in errors),
        bound_holds_share=_share(held) if held else None,
        overbooked_median=median(over for row in rows if (over := _overbooked(row)) is not None),
        took_median_s=took_median_s,
    )


def by_estimator(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """One summary for each estimator, in the order of their first rows."""
    return _parted(rows, lambda row: row.estimator)


def by_family(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """The families in the order of their names."""
    return _parted(sorted(rows, key=lambda row: row.family), lambda row: row.family)


def by_network(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """Each estimator on each kind of network; nothing where no run's is known."""
    known = sorted((row for row in rows if row.network), key=lambda row: row.network)
    return _parted(known, lambda row: f"{row.network}: {row.estimator}")


def refusals(rows: Sequence[Row]) -> tuple[Refusal, ...]:
    """The most frequent first, by estimator."""
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.refused is not None:
            parts.setdefault((row.estimator, _plain(row.refused)), []).append(row)
    found = (
        Refusal(estimator, len(part), part[0].refused or "", tuple(sorted({row.family for row in part})))
        for (estimator, _), part in parts.items()
    )
    return tuple(sorted(found, key=lambda one: (one.estimator, -one.runs, one.reason)))


def _plain(reason: str) -> str:
    """The first of several reasons, without its numbers."""
    return _NUMBER.sub("#", reason.partition(";")[0])


def _parted(rows: Iterable[Row], name: Callable[[Row], str]) -> tuple[Summary, ...]:
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(name(row), []).append(row)
    return tuple(summarise(title, part) for title, part in parts.items())


def _overbooked(row: Row) -> float | None:
    booked = row.estimated_mib if row.bound_mib is None else row.bound_mib
    return None if booked is None else booked / row.measured_mib - 1.0


def _share(truths: Iterable[bool]) -> float:
    counted = list(truths)
    return sum(counted) / len(counted)
