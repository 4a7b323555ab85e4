"""Puts the tables of estimators into the documentation, from the files of results: `python -m
lab.tools.estimator_tables`.

`--check` writes nothing and says whether they are up to date. A table stands between two remarks of a page,
`<!-- estimators: … -->` and `<!-- end -->`. Where its file of results is not there, nothing may stand between them: no
figure without a measurement.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from carma_lab.bench.memory.comparison_file import Comparison, read
from carma_lab.bench.memory.figures import Summary
from carma_lab.bench.memory.published18 import PUBLISHED
from tools.markdown import filled, renew, table

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
    return f"{_folded(said)}\n\n{table(HEAD, map(_line, comparison.estimators))}"


def published18(comparison: Comparison) -> str:
    """The published models one by one, and how far each column is off."""
    rows = {row.case: row for row in comparison.rows if row.estimator == BEST}
    lines = []
    for one in PUBLISHED:
        row = rows.get(one.run.id)
        ours = (None, None) if row is None else (row.estimated_mib, row.bound_mib)
        figures = (
            one.measured_mib,
            one.measured_later_mib,
            one.gpumemnet_mib,
            one.fake_tensor_mib,
            one.horus_mib,
            *ours,
        )
        lines.append((f"{one.name}, {one.batch}", *map(_mib, figures)))
    off = [
        (
            each.name,
            each.against,
            str(each.models),
            f"{_mib(each.mean_mib)} MiB",
            _percent(each.median),
            str(each.under),
        )
        for each in comparison.published
    ]
    said = (
        f"The 18 models of the published evaluation, in MiB; ours for an {comparison.gpu}, by trial runs of the "
        "authors' settings on made-up data. The authors measured twice, 5 to 26 % apart, with versions that are not "
        "known:"
    )
    return f"{_folded(said)}\n\n{table(MODELS, lines)}\n{table(OFF, off)}"


def headline(comparison: Comparison) -> str:
    """One sentence for the README."""
    (best,) = [one for one in comparison.estimators if one.name == BEST]
    return (
        _folded(
            f"**Memory.** Estimates of {best.answered} of {best.cases} training runs measured on an {comparison.gpu}: "
            f"median error {_percent(best.error_median)}, 90th percentile {_percent(best.error_p90)}; the "
            f"{100 * comparison.level:g} % bound held for {_percent(best.bound_holds_share)}."
        )
        + "\n"
    )


class Place(NamedTuple):
    page: str
    mark: str
    file: str  # of the results
    make: Callable[[Comparison], str]


PLACES = (
    Place("README.md", "estimate", "estimators.json", headline),
    Place("docs/results.md", "estimators", "estimators.json", estimators),
    Place("docs/memory.md", "published18", "published18.json", published18),
)


def pages(root: Path = ROOT, results: Path = RESULTS) -> dict[Path, str]:
    """Every page that has such a table, as it should be."""
    made: dict[Path, str] = {}
    for place in PLACES:
        page, file = root / place.page, results / place.file
        text = made.get(page) or page.read_text(encoding="utf-8")
        made[page] = filled(text, place.mark, f"\n{place.make(read(file))}\n" if file.exists() else "")
    return made


def main(arguments: list[str]) -> int:
    return renew("lab.tools.estimator_tables", __doc__, arguments, pages)


def _line(one: Summary) -> tuple[str, ...]:
    return (
        f"`{one.name}`",
        f"{one.answered} of {one.cases}",
        _percent(one.error_median),
        _percent(one.error_p90),
        _percent(one.under_by_5_percent_share),
        _percent(one.bound_holds_share),
        _percent(one.overbooked_median, "+"),
        "-" if one.took_median_s is None else f"{one.took_median_s:.1f}",
    )


def _folded(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _percent(part: float | None, sign: str = "") -> str:
    return "-" if part is None else f"{100 * part:{sign}.1f} %"


def _mib(mib: float | None) -> str:
    return "-" if mib is None else f"{mib:,.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
