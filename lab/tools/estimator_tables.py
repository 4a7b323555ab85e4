"""Puts the tables of estimators into the documentation, from the files of results: `python -m
lab.tools.estimator_tables`.

`--check` writes nothing and says whether they are up to date. A table stands between two comments of a page, `<!--
estimators: … -->` and `<!-- end -->`. If its file of results is missing, it must be empty: no figure without a
measurement.
"""

from __future__ import annotations

import sys
from pathlib import Path

from carma_lab.bench.memory.comparison_file import Comparison, read
from carma_lab.bench.memory.figures import Summary
from carma_lab.bench.memory.published18 import PUBLISHED
from carma_lab.bench.results_file import percent, shown
from tools.markdown import folded, placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "h200" / "memory"
HEAD = (
    "estimator",
    "answered",
    "median error",
    "p90",
    "under by more than 5 %",
    "bound holds",
    "over-booked at the median",
    "seconds",
)
MODELS = ("model, batch", "measured", "measured later", "GPUMemNet", "Fake Tensor", "Horus", "ours", "our bound")
OFF = ("estimator", "against", "models", "mean error", "median error", "too small")
BEST = "trace"


def estimators(comparison: Comparison) -> str:
    """What every estimator said of the measured runs, with what a reader must know to judge it."""
    runs = len({row.case for row in comparison.rows})
    known = comparison.caution or (
        "Each family was judged by bounds, and by a model of cuDNN's workspaces, that do not know it"
    )
    said = (
        f"Estimates of {runs} training runs against the footprint that was measured on an {comparison.gpu} "
        "([the runs](../lab/results/h200/memory/README.md), [method](benches.md#memory)). Bounds are at "
        f"{100 * comparison.level:g} %; a formula has none, and is booked as it is. Seconds are those of one estimate "
        f"on {comparison.machine.cores} cores, with its trial run. {known}:"
    )
    return f"{folded(said)}\n\n{table(HEAD, map(_line, comparison.estimators))}"


def published18(comparison: Comparison) -> str:
    """The published models one by one, and how far each column is off."""
    rows = {row.case: row for row in comparison.rows if row.estimator == BEST}
    lines = []
    for one in PUBLISHED:
        row = rows.get(one.run.id)
        ours = (None, None) if row is None else (row.estimated_mib, row.bound_mib)
        published = (one.measured_mib, one.measured_later_mib, one.gpumemnet_mib, one.fake_tensor_mib, one.horus_mib)
        lines.append((f"{one.name}, {one.batch}", *(shown(mib, ",.0f") for mib in (*published, *ours))))
    off = [
        (one.name, one.against, str(one.models), f"{one.mean_mib:,.0f} MiB", percent(one.median), str(one.under))
        for one in comparison.published
    ]
    said = (
        f"The 18 models of the published evaluation, in MiB; ours for an {comparison.gpu}, by trial runs of the "
        "authors' settings on made-up data. The authors measured twice, 5 to 26 % apart, with versions that are not "
        "known:"
    )
    return f"{folded(said)}\n\n{table(MODELS, lines)}\n{table(OFF, off)}"


def headline(comparison: Comparison) -> str:
    """One sentence for the README."""
    (best,) = [one for one in comparison.estimators if one.name == BEST]
    said = (
        f"**Memory.** Estimates of {best.answered} of {best.cases} training runs measured on an {comparison.gpu}: "
        f"median error {percent(best.error_median)}, 90th percentile {percent(best.error_p90)}; the "
        f"{100 * comparison.level:g} % bound held for {percent(best.bound_holds_share)}."
    )
    return f"{folded(said)}\n"


PLACES = (  # page, mark, file of the results, what makes the text
    ("README.md", "estimate", "estimators.json", headline),
    ("docs/results.md", "estimators", "estimators.json", estimators),
    ("docs/memory.md", "published18", "published18.json", published18),
)


def pages(root: Path = ROOT, results: Path = RESULTS) -> dict[Path, str]:
    """Every page that has such a table, as it should be."""
    return placed(
        (root / page, mark, f"\n{make(read(results / file))}\n" if (results / file).exists() else "")
        for page, mark, file, make in PLACES
    )


def _line(one: Summary) -> tuple[str, ...]:
    return (
        f"`{one.name}`",
        f"{one.answered} of {one.cases}",
        percent(one.error_median),
        percent(one.error_p90),
        percent(one.under_by_5_percent_share),
        percent(one.bound_holds_share),
        percent(one.overbooked_median, "+"),
        shown(one.took_median_s, ".1f"),
    )


if __name__ == "__main__":
    sys.exit(renew("lab.tools.estimator_tables", __doc__, sys.argv[1:], pages))
