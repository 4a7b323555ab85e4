"""Confusion matrices as pictures: one figure for each data set and class width, one panel for each learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpumemnet.dataset.plots import save
from gpumemnet.training import NAMES
from gpumemnet.training.accuracy_report import Entry
from gpumemnet.training.scores import Classes

MOST_CLASSES = 24  # more would not be readable
Panel = tuple[str, Classes]


def draw(entries: Sequence[Entry], folder: Path) -> list[Path]:
    written: list[Path] = []
    for (data, width, merged), panels in _figures(entries).items():
        if max(len(classes.by_class) for _, classes in panels) <= MOST_CLASSES:
            name = f"confusion-{data}-{width}gb" + ("-40gb-and-more-merged" if merged else "")
            written += _draw(panels, data, folder / name)
    return written


def _figures(entries: Sequence[Entry]) -> dict[tuple[str, int, bool], list[Panel]]:
    """Confusion matrices of the folds at the operating point; a classifier has no other."""
    found: dict[tuple[str, int, bool], list[Panel]] = {}
    for entry in sorted(entries, key=lambda one: NAMES.index(one.learner)):
        for judged in entry.judged:
            if entry.protocol == "folds" and judged.point in ("operating", "class"):
                key = (entry.data, judged.classes.width_gb, judged.classes.top_merged)
                found.setdefault(key, []).append((entry.learner, judged.classes))
    return found


def _draw(panels: Sequence[Panel], data: str, path: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    side = 3.0 + 0.12 * max(len(classes.by_class) for _, classes in panels)
    figure, axes = plt.subplots(rows, columns, figsize=(side * columns, (side + 0.6) * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (learner, classes) in zip(axes.flat, panels, strict=False):
        _panel(axis, learner, classes)
    width = panels[0][1].width_gb
    figure.suptitle(f"{data}, classes of {width} GB: measured against answered, in runs", fontsize=11)
    figure.tight_layout()
    return list(save(plt, figure, path, dpi=130))


def _panel(axis: Any, learner: str, classes: Classes) -> None:
    counts = np.array(classes.confusion, float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    labels = [f"{one.from_gb}–{one.from_gb + classes.width_gb}" for one in classes.by_class]
    if classes.top_merged:
        labels[-1] = f"≥ {classes.by_class[-1].from_gb}"
    axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    size = 8 if len(labels) <= 10 else 5
    for (row, column), count in np.ndenumerate(counts):
        if count:
            ink = "white" if shares[row, column] > 0.6 else "black"
            axis.text(column, row, f"{int(count)}", ha="center", va="center", fontsize=size, color=ink)
    under, over = 100 * classes.under, 100 * classes.over
    text = f"{100 * classes.accuracy:.1f} % right, {under:.1f} % under, {over:.1f} % over"
    axis.set_title(f"{learner}\n{text}", fontsize=9)
    axis.set_xlabel("answered, GB", fontsize=8)
    axis.set_ylabel("measured, GB", fontsize=8)
