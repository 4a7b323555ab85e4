"""The file of a comparison of estimators, and its printed form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma_lab.bench.machine import Machine
from carma_lab.bench.memory.figures import Refusal, Row, Summary
from carma_lab.bench.memory.published18 import PUBLISHED, Off, Published
from carma_lab.bench.results_file import percent, print_table, say, shown

HEAD = ("answered", "refused", "median", "p90", "worst", "under > 5 %", "under", "bound holds", "over-booked", "time")


class Comparison(Record, frozen=True, kw_only=True):
    """What the file holds. `judged` are the main estimator's rows on families that were left out."""

    command: str
    source: str  # where the measured values are from
    gpu: str
    measured_on: dict[str, str]
    seed: int
    level: float
    caution: str = ""  # what the figures do not show
    whole: bool  # every case that was wanted was asked about
    versions: dict[str, str]
    machine: Machine
    estimators: tuple[Summary, ...]
    families: tuple[Summary, ...]
    networks: tuple[Summary, ...] = ()  # each estimator on each kind of network
    refusals: tuple[Refusal, ...] = ()
    published: tuple[Off, ...] = ()
    rows: tuple[Row, ...]
    judged: tuple[Row, ...]


def read(path: Path) -> Comparison:
    return msgspec.json.decode(path.read_bytes(), type=Comparison)


def print_comparison(comparison: Comparison, main: str) -> None:
    runs = len({row.case for row in comparison.rows})
    title = f"Footprint on an {comparison.gpu}, {runs} measured runs; errors against the measured value"
    print_table(title, ("estimator", *HEAD), map(_line, comparison.estimators))
    if comparison.families:
        say("")
        title = f"{main} by family, each judged by the errors of all others; bounds at {100 * comparison.level:g} %"
        print_table(title, ("family", *HEAD), map(_line, comparison.families))
    if comparison.networks:
        say("")
        print_table("By the kind of network", ("network: estimator", *HEAD), map(_line, comparison.networks))
    print_refusals(comparison.refusals)
    if comparison.caution:
        say(f"\nBeware: {comparison.caution}.")


def print_refusals(refusals: Sequence[Refusal]) -> None:
    """Why, in the words of the first of each kind; all of them are in the file."""
    if not refusals:
        return
    say("\nRefusals")
    for one in refusals:
        runs = "1 run" if one.runs == 1 else f"{one.runs} runs, as"
        say(f"  {one.estimator}, {runs}: {one.reason}")


def print_published(comparison: Comparison, main: str) -> None:
    rows = {row.case: row for row in comparison.rows if row.estimator == main}
    columns = ("model, batch", "measured", "later", "GPUMemNet", "Fake Tensor", "Horus", "ours", "bound", "off by")
    lines: list[Sequence[str]] = [_published_line(one, rows.get(one.run.id)) for one in PUBLISHED]
    print_table(f"The 18 published models, MiB; ours for an {comparison.gpu}", (*columns, "off later"), lines)
    say("")
    lines = [
        (off.name, off.against, str(off.models), f"{off.mean_mib:,.0f} MiB", percent(off.median), str(off.under))
        for off in comparison.published
    ]
    print_table("Errors", ("estimator", "against", "models", "mean", "median", "under"), lines)
    for row in rows.values():
        if row.refused:
            say(f"{row.case}: no estimate: {row.refused}")


def _published_line(one: Published, row: Row | None) -> Sequence[str]:
    estimated = None if row is None else row.estimated_mib
    later = one.measured_later_mib
    return (
        f"{one.name}, {one.batch}",
        f"{one.measured_mib:,}",
        shown(later, ",.0f"),
        f"{one.gpumemnet_mib:,}",
        shown(one.fake_tensor_mib, ",.0f"),
        f"{one.horus_mib:,}",
        shown(estimated, ",.0f"),
        shown(None if row is None else row.bound_mib, ",.0f"),
        percent(None if row is None else row.error, "+"),
        percent(None if estimated is None or later is None else estimated / later - 1, "+"),
    )


def _line(summary: Summary) -> Sequence[str]:
    return (
        summary.name,
        str(summary.answered),
        str(summary.refused),
        percent(summary.error_median),
        percent(summary.error_p90),
        percent(summary.error_worst, "+"),
        percent(summary.under_by_5_percent_share),
        percent(summary.under_share),
        percent(summary.bound_holds_share),
        percent(summary.overbooked_median, "+"),
        f"{shown(summary.took_median_s, '.1f')} s",
    )
