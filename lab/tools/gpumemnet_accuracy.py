"""The accuracy of GPUMemNet as Markdown tables, from a report of `carma train --evaluate`. Pure.

The tables compare with the publication. Its accuracies are those of the paper's table; its shares of classes that were
too low follow from the confusion matrices in the authors' repository (itu-rad/GPUMemNet, Ensemble/k_fold_results).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma_lab.bench.results_file import percent
from gpumemnet.training import NAMES, SERVED, WIDTHS_GB
from gpumemnet.training.accuracy_report import Entry, Judged, Report
from gpumemnet.training.main import PUBLIC
from gpumemnet.training.scores import Classes
from tools.markdown import table

DATA = {"mlp": "MLP", "cnn": "CNN", "transformer": "Transformer", PUBLIC: "MLP, public (A100)"}
ANSWERS = ("operating", "class")  # the class that an estimator answers with; a classifier knows no other
ESTIMATORS = {"mlp-based": "`gpumemnet`", "transformer-based": "`gpumemnet-transformer`"}
POINTS = {"median": "the median", "operating": "chosen", "careful": "careful"}
ABSENT = "-"


class Row(NamedTuple):
    family: str
    learner: str
    width_gb: int
    accuracy: float
    under: float | None
    aim: float  # of ours


FILE = Path(__file__).with_name("gpumemnet_published.csv")
PUBLISHED = [
    msgspec.convert([text or None for text in row], Row, strict=False)
    for row in list(csv.reader(FILE.read_text(encoding="utf-8").splitlines()))[1:]
]
UNDER_AIM = 0.01
OF_CLASSES_GB = {"mlp": 2, "cnn": 8, "transformer": 8}  # where each class has a line


def short(report: Report) -> str:
    """One line for each shipped model: the accuracy that a user can expect."""
    lines = []
    for entry in _served(report):
        judged = _answer(entry, WIDTHS_GB[entry.family][0])
        if entry.data != PUBLIC and judged and entry.errors:
            held = {bound.level: bound.held for bound in entry.bounds}
            errors = (percent(entry.errors.median_share), percent(entry.errors.mean_share), percent(held.get(0.99)))
            shown = (DATA[entry.data], ESTIMATORS[entry.learner], f"{entry.rows:,}")
            lines.append((*shown, *errors, *_shares(judged.classes)[:2]))
    head = ("networks", "estimator", "runs", "median error", "mean error", "99 % bound held", "class right", "too low")
    return table(head, lines)


def published(report: Report) -> str:
    """The published results and ours, by the same classes: 40 GB and more are one."""
    found = {(entry.data, entry.learner): entry for entry in report.entries if entry.protocol == "folds"}
    lines = []
    for row in PUBLISHED:
        own, same = found.get((row.family, row.learner)), found.get((PUBLIC, row.learner))
        lines.append((
            DATA[row.family],
            row.learner,
            f"{row.width_gb} GB",
            _pair(row.accuracy, row.under),
            _compared(same if row.family == "mlp" else None, row.width_gb),
            _compared(own, row.width_gb),
            _pair(row.aim, UNDER_AIM),
        ))  # fmt: skip
    return table(("networks", "estimator", "class", "published", "ours, public data", "ours, H200", "aim"), lines)


def learners(report: Report) -> str:
    """Every learner on the same folds; the classes above 40 GB are counted separately."""
    lines = []
    for entry in _ordered(report):
        for width in WIDTHS_GB[entry.family]:
            if judged := _answer(entry, width):
                error = entry.errors
                lines.append((
                    DATA[entry.data],
                    entry.learner,
                    f"{width} GB",
                    *_shares(judged.classes),
                    f"{judged.classes.macro_f1:.2f}",
                    ABSENT if error is None else f"{error.mean_mib:,.0f} MiB",
                    ABSENT if error is None else percent(error.median_share),
                ))  # fmt: skip
    head = ("networks", "learner", "class", "right", "too low", "too high", "macro F1", "mean error", "median error")
    return table(head, lines)


def points(report: Report) -> str:
    """The accuracy at each operating point."""
    lines = []
    for entry in _served(report):
        for judged in entry.judged:
            one = judged.classes
            if one.width_gb == WIDTHS_GB[entry.family][0] and not one.top_merged:
                lines.append((DATA[entry.data], entry.learner, POINTS[judged.point], *_shares(one)))
    return table(("networks", "estimator", "operating point", "right", "too low", "too high"), lines)


def shapes(report: Report) -> str:
    """The accuracy on shapes of networks that were left out, and the worst shape."""
    lines = []
    for entry in _ordered(report, "shapes"):
        if judged := _answer(entry, WIDTHS_GB[entry.family][0]):
            worst, (accuracy, under) = min(judged.of_split.items(), key=lambda item: item[1][0])
            most = f"{worst}: {percent(accuracy)} right, {percent(under)} too low"
            width = f"{judged.classes.width_gb} GB"
            lines.append((DATA[entry.data], entry.learner, width, *_shares(judged.classes), most))
    head = ("networks", "learner", "class", "right", "too low", "too high", "the worst shape")
    said = "Each shape of networks, predicted by models that have never seen it, at the chosen operating point:"
    return f"{said}\n\n{table(head, lines)}" if lines else ""


def bounds(report: Report) -> str:
    lines = [
        (DATA[entry.data], entry.learner, percent(one.level), percent(one.held), f"+{percent(one.over_share)}")
        for entry in _served(report)
        for one in entry.bounds
    ]
    return table(("networks", "estimator", "level", "held for", "mean excess over the footprint"), lines)


def classes(report: Report) -> str:
    """Precision and recall of each class, for the shipped estimators."""
    lines = []
    for entry in _served(report):
        judged = _compared_of(entry, OF_CLASSES_GB[entry.family])
        if entry.data != PUBLIC and judged:
            for one in judged.classes.by_class:
                name = _class_name(judged.classes, one.from_gb)
                figures = (f"{one.rows:,}", percent(one.precision), percent(one.recall), f"{one.f1:.2f}")
                lines.append((DATA[entry.data], entry.learner, name, *figures))
    return table(("networks", "estimator", "class", "runs", "precision", "recall", "F1"), lines)


def data(report: Report) -> str:
    """The training data."""
    parts = []
    for name, one in report.data.items():
        least, most = one.footprints_mib
        figures = (f"{one.rows:,}", one.gpu, f"{least:,.0f} to {most:,.0f} MiB", _left(one.left_out))
        parts.append((DATA.get(name, name), *figures))
    return table(("networks", "runs", "GPU", "footprints", "left out"), parts)


def _left(left_out: Mapping[str, int]) -> str:
    return "; ".join(f"{count:,}: {reason}" for reason, count in left_out.items()) or ABSENT


def _ordered(report: Report, protocol: str = "folds") -> Iterator[Entry]:
    """The public data comes last; the learners of each data set are in the order of NAMES."""
    known = [entry for entry in report.entries if entry.protocol == protocol and entry.data in DATA]
    return iter(sorted(known, key=lambda entry: (tuple(DATA).index(entry.data), NAMES.index(entry.learner))))


def _served(report: Report) -> Iterator[Entry]:
    return (entry for entry in _ordered(report) if entry.learner in SERVED)


def _answer(entry: Entry, width_gb: int, *, merged: bool = False) -> Judged | None:
    for judged in entry.judged:
        if judged.point in ANSWERS and (judged.classes.width_gb, judged.classes.top_merged) == (width_gb, merged):
            return judged
    return None


def _compared_of(entry: Entry, width_gb: int) -> Judged | None:
    """Comparison as published: footprints of 40 GB and more are one class."""
    return _answer(entry, width_gb, merged=True) or _answer(entry, width_gb)


def _compared(entry: Entry | None, width_gb: int) -> str:
    judged = None if entry is None else _compared_of(entry, width_gb)
    return ABSENT if judged is None else _pair(judged.classes.accuracy, judged.classes.under)


def _pair(accuracy: float, under: float | None) -> str:
    return percent(accuracy) + ("" if under is None else f", {percent(under)} too low")


def _shares(one: Classes) -> tuple[str, str, str]:
    return percent(one.accuracy), percent(one.under), percent(one.over)


def _class_name(judged: Classes, from_gb: int) -> str:
    is_last = judged.top_merged and from_gb == judged.by_class[-1].from_gb
    return f"{from_gb} GB and more" if is_last else f"{from_gb}–{from_gb + judged.width_gb} GB"
