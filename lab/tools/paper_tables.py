"""Writes the short table of the simulated experiments into docs/results.md.

    python -m lab.tools.paper_tables

They come from lab/results/simulation/paper.json. `--check` writes nothing and exits with 1 if a page is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carma_lab.bench.paper.cases import geo_mean
from carma_lab.bench.paper.published import PUBLISHED
from carma_lab.bench.paper.variants import FEW_GPUS
from tools.markdown import folded, placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "simulation" / "paper.json"
HEAD = ("policy", "makespan", "published", "completion, mean", "slowdown, mean", "energy", "OOMs", "Philly: makespan")
POLICIES = (
    ("MAGM, memory measured", "`magm` by the published rules in our queue, memory known"),
    ("MAGM, no estimate", "the same, memory not known"),
    ("Horus", "`horus`"),
    ("Lucid", "`lucid`"),
    ("MAGM, our defaults", "`magm`, our defaults"),
    ("goodput", "`goodput`, slowdown cap 1.25"),
    ("goodput, no cap", "`goodput` without a cap"),
)


def short(parts: dict[str, Any]) -> str:
    """Geometric means over the traces on four GPUs, and over the windows of Philly."""
    rows = [row for row in parts["limits"]["rows"] if row["gpus"] == FEW_GPUS]
    windows = _windows(parts)
    lines = [_line(name, words, rows, windows) for name, words in POLICIES]
    limits = ("the limit: no policy can beat it", _mean([row["bound"] for row in rows]), "", "", "", "", "")
    lines.append((*limits, _mean([row["bound"] for row in windows])))
    tasks = sum(row["tasks"] for row in rows)
    said = (
        f"The published experiments, simulated: {tasks} tasks of {len(rows)} published traces on {FEW_GPUS} A100s, and "
        f"{len(windows)} windows of the public Philly trace "
        "([all of it, aim by aim](../lab/results/simulation/README.md), "
        "[method](simulation.md)). Exclusive GPUs are 1; policies that predict know how busy each task is. "
        "The rows of `goodput` are of the version of 2026-11-18, before its cap became 1.5 and tasks of unknown demand "
        "typical ones; [the evaluation](goodput.md#evaluation) has the default. "
        "The row of our defaults knows run times from history "
        "([what that changed](simulation.md#run-times-from-history)):"
    )
    return f"{folded(said)}\n\n{table(HEAD, lines)}"


def _windows(parts: dict[str, Any]) -> Sequence[Any]:
    sizes = parts["philly"]["sizes"] if "philly" in parts else ()
    return next((size["rows"] for size in sizes if size["gpus"] == FEW_GPUS), ())


def _line(name: str, words: str, rows: Sequence[Any], windows: Sequence[Any]) -> tuple[str, ...]:
    found = [row["policies"][name] for row in rows]
    theirs = PUBLISHED.get(name)
    return (
        words,
        _mean([one["makespan"] for one in found]),
        "" if theirs is None else f"{theirs.makespan:.2f}",
        *(_mean([one[field] for one in found]) for field in ("completion", "slowdown", "energy")),
        str(sum(one["ooms"] for one in found)),
        _mean([row["policies"][name]["makespan"] for row in windows]),
    )


def _mean(values: Sequence[float]) -> str:
    mean = geo_mean(values)
    return "-" if mean is None else f"{mean:.2f}"


def pages(root: Path = ROOT, results: Path = RESULTS) -> dict[Path, str]:
    parts = json.loads(results.read_text(encoding="utf-8"))["parts"]
    return placed([(root / "docs" / "results.md", "paper", f"\n{short(parts)}\n")])


if __name__ == "__main__":
    sys.exit(renew("lab.tools.paper_tables", __doc__, sys.argv[1:], pages))
