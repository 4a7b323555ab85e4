"""The content of a data set in figures: counts, ranges, classes, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from carma.core.model.values import Record
from gpumemnet.dataset.schema import ACTIVITY
from gpumemnet.dataset.table import Numbers, Table, Wholes
from gpumemnet.training import WIDTHS_GB
from gpumemnet.training.scores import to_classes

UNITS = {"batch": "samples", "activations": "elements a sample", "activations_batch": "elements"}
MOST_COLOURS = 10  # more are not distinguishable: the last one includes all above it
MOST_COUNTS = 20  # maximum in a line of text
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
SHARED = ("shape", "optimizer", "precision", "loss")
SWITCHES = ("checkpointing", "channels_last")
COMMONEST = 12  # maximum number of kinds of layers
_HEAD_FIELDS = ("gpu", "driver", "torch", "cuda", "cudnn")


class Range(Record, frozen=True, kw_only=True):
    name: str
    unit: str
    least: float
    p10: float
    median: float
    p90: float
    most: float


class Family(Record, frozen=True, kw_only=True):
    family: str
    rows: int
    oom: int
    active: int  # rows with step time and activity
    measured_on: tuple[dict[str, str], ...]
    dates: tuple[str, ...]
    ranges: tuple[Range, ...]
    classes: dict[str, tuple[int, ...]]  # by width: runs in the first class, the second …; without those out of memory
    shares: dict[str, dict[str, float]]  # of the values of each setting
    kinds: dict[str, float]  # the most frequent layers: share of models that have one


def describe(table: Table) -> Family:
    return Family(
        family=table.family,
        rows=len(table),
        oom=int(table["oom"].sum()),
        active=int(np.isfinite(table["step_ms"]).sum()),
        measured_on=_measured_on(table),
        dates=tuple(sorted({str(head["date"])[:10] for head in table.heads if head.get("date")})),
        ranges=tuple(_range(name, unit, values) for name, unit, values in _quantities(table) if len(values)),
        classes={
            f"{width} GB": tuple(np.bincount(classes(table, width)).tolist())
            for width in sorted(WIDTHS_GB[table.family])
        },
        shares=_shares(table),
        kinds=_kinds(table),
    )


def sizes(table: Table) -> dict[str, Numbers]:
    """The plotted sizes of each row, with which activity is correlated with."""
    layers = table.layers
    sums = np.concatenate([[0.0], np.cumsum(layers.output.elements)])
    outputs = sums[layers.offsets[1:]] - sums[layers.offsets[:-1]]
    return {
        "layers": np.diff(layers.offsets).astype(np.float64),
        "batch": table["batch"],
        "parameters": table["parameters"],
        "activations": outputs / table["batch"],
        "activations_batch": outputs,
        "footprint_mib": table["footprint_mib"],
    }


def classes(table: Table, width_gb: int) -> Wholes:
    """The class of each row that did not run out of memory: k holds [k, k + 1) times the width."""
    return to_classes(table["footprint_mib"][table["oom"] == 0], width_gb)


def coloured(family: str, footprints: Numbers) -> tuple[Wholes, list[str]]:
    """The colour of each footprint, and the label of each colour."""
    width_gb = WIDTHS_GB[family][0]  # as published
    found = np.minimum(to_classes(footprints, width_gb), MOST_COLOURS - 1)
    count = int(found.max(initial=0)) + 1
    labels = [f"{each * width_gb} to {(each + 1) * width_gb} GB" for each in range(count)]
    if count == MOST_COLOURS:
        labels[-1] = f"{(count - 1) * width_gb} GB and more"
    return found, labels


def _quantities(table: Table) -> Iterator[tuple[str, str, Numbers]]:
    """Name, unit and values."""
    fits = table["oom"] == 0
    for name, values in sizes(table).items():
        if name != "footprint_mib":
            yield name, UNITS.get(name, ""), values
    for name in ("requested_mib", "allocated_mib", "reserved_mib", "footprint_mib", "context_mib"):
        yield name, "MiB", table[name][fits]
    yield "beside_reserved_mib", "MiB", (table["footprint_mib"] - table["reserved_mib"])[fits]
    for column in ACTIVITY:
        yield column.name, column.unit, table[column.name][np.isfinite(table[column.name])]


def _range(name: str, unit: str, values: Numbers) -> Range:
    least, p10, median, p90, most = np.quantile(values, QUANTILES).tolist()
    return Range(name=name, unit=unit, least=least, p10=p10, median=median, p90=p90, most=most)


def _shares(table: Table) -> dict[str, dict[str, float]]:
    counted = {name: Counter(str(value) for value in table.settings[name]) for name in SHARED}
    shares = {name: {word: count / len(table) for word, count in of.most_common()} for name, of in counted.items()}
    return shares | {name: {"on": float(table[name].mean())} for name in SWITCHES}


def _kinds(table: Table) -> dict[str, float]:
    layers = table.layers
    rows = np.repeat(np.arange(len(table)), np.diff(layers.offsets))
    pairs = np.unique(np.stack([rows, layers.kind], axis=1), axis=0)
    having = Counter(layers.kinds[kind] for kind in pairs[:, 1].tolist())
    return {kind: count / len(table) for kind, count in having.most_common(COMMONEST)}


def _measured_on(table: Table) -> tuple[dict[str, str], ...]:
    environments = [{name: str(head[name]) for name in _HEAD_FIELDS if head.get(name)} for head in table.heads]
    return tuple({repr(one): one for one in environments if one}.values())


def text(families: Sequence[Family]) -> str:
    return "\n\n".join(_text(family) for family in families)


def _text(one: Family) -> str:
    active = f", {one.active:,} with activity" if one.active else ""
    lines = [f"{one.family}: {one.rows:,} runs, {one.oom:,} out of memory{active}"]
    for place in one.measured_on:
        lines.append("  measured on " + ", ".join(f"{name} {value}" for name, value in place.items()))
    lines.append(f"  {'':22}{'least':>12}{'p10':>12}{'median':>12}{'p90':>12}{'most':>12}")
    for each in one.ranges:
        figures = "".join(f"{figure(value):>12}" for value in (each.least, each.p10, each.median, each.p90, each.most))
        lines.append(f"  {each.name:22}{figures}  {each.unit}".rstrip())
    for width, counts in one.classes.items():
        rest = sum(counts[MOST_COUNTS:])
        shown = " ".join(f"{count:,}" for count in counts[:MOST_COUNTS])
        lines.append(f"  classes of {width}: {shown}" + (f", and {rest:,} above" if rest else ""))
    for name, shares in (*one.shares.items(), ("models that have", one.kinds)):
        lines.append(f"  {name}: " + ", ".join(f"{word} {100 * share:.0f} %" for word, share in shares.items()))
    return "\n".join(lines)


def figure(value: float) -> str:
    """A short form for a column: 1,443 and 0.031 and 12.4M."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
