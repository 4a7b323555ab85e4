"""Puts the figures of the data set into its card, gpumemnet/datasets/README.md: `python -m lab.tools.dataset_card`.

`--check` writes nothing and says whether it is up to date. Figures stand between two comments of the page. A missing
file of the data set has no figures: no figure without a measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpumemnet import FAMILIES
from gpumemnet.dataset.describe import Family, describe, figure
from gpumemnet.dataset.schema import COLUMNS
from gpumemnet.dataset.table import read
from tools.markdown import filled, renew, table

ROOT = Path(__file__).parents[2]
CARD = ROOT / "gpumemnet" / "datasets" / "README.md"
RANGES = ("layers", "batch", "parameters", "activations", "allocated_mib", "footprint_mib", "context_mib", "step_ms")
TYPES = {
    "word": "string", "whole": "int32", "big": "int64", "number": "float64", "switch": "bool",
    "wholes": "list of int32", "bigs": "list of int64", "words": "list of string", "switches": "list of bool",
    "shapes": "list of lists of int32",
}  # fmt: skip


def columns() -> str:
    rows = [
        (f"`{one.name}`", TYPES[one.kind] + (", may be null" if one.optional else ""), one.unit, one.about)
        for one in COLUMNS
    ]
    return table(("column", "type", "unit", "what it is"), rows)


def figures(families: Sequence[Family]) -> str:
    counts = [
        (one.family, f"{one.rows:,}", f"{one.oom:,}", f"{one.active:,}", ", ".join(one.dates), on)
        for one in families
        for on in ["; ".join(", ".join(f"{name} {value}" for name, value in gpu.items()) for gpu in one.measured_on)]
    ]
    classes = [
        (one.family, width, " ".join(f"{count:,}" for count in counted))
        for one in families
        for width, counted in one.classes.items()
    ]
    ranges = [
        (one.family, each.name, *map(figure, (each.least, each.p10, each.median, each.p90, each.most)), each.unit)
        for one in families
        for each in one.ranges
        if each.name in RANGES
    ]
    shares = [
        (one.family, name, ", ".join(f"{word} {100 * share:.0f} %" for word, share in of.items()))
        for one in families
        for name, of in one.shares.items()
    ]
    return "\n".join((
        table(("family", "runs", "out of memory", "with activity", "measured", "on"), counts),
        table(("family", "quantity", "least", "p10", "median", "p90", "most", "unit"), ranges),
        table(("family", "class width", "runs in each class, from 0 on"), classes),
        table(("family", "setting", "share of the runs"), shares),
    ))  # fmt: skip


def page(card: Path = CARD, folder: str = "h200") -> str:
    """The card as it should be."""
    files = [card.parent / folder / f"{family}.parquet" for family in FAMILIES]
    families = [describe(read(file)) for file in files if file.exists()]
    text = filled(card.read_text(encoding="utf-8"), "columns", f"\n{columns()}\n")
    return filled(text, "figures", f"\n{figures(families)}\n" if families else "")


if __name__ == "__main__":
    sys.exit(renew("lab.tools.dataset_card", __doc__, sys.argv[1:], lambda: {CARD: page()}))
