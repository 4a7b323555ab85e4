"""Accuracy of classes and estimates against measurements. Pure."""

from __future__ import annotations

import numpy as np

from carma.core.model.values import Record
from gpumemnet.serving.model_facts import GB_MIB
from gpumemnet.training.samples import Numbers, Wholes

TOP_GB = 40  # the published data ends there: larger footprints and out-of-memory runs are one class


class ByClass(Record, frozen=True, kw_only=True):
    from_gb: int
    rows: int
    precision: float | None  # None if no row was put into the class
    recall: float | None
    f1: float


class Classes(Record, frozen=True, kw_only=True):
    width_gb: int
    top_merged: bool
    accuracy: float
    under: float  # share of rows whose class is too low
    over: float
    off_by_more: float  # by two classes or more
    macro_f1: float  # mean over the classes that occur
    by_class: tuple[ByClass, ...]
    confusion: tuple[tuple[int, ...], ...]  # rows: true classes; columns: answers; both as in by_class


class Errors(Record, frozen=True, kw_only=True):
    mean_mib: float
    mean_share: float
    median_share: float
    worst_under_mib: float
    worst_over_mib: float


class Point(Record, frozen=True, kw_only=True):
    """The result of an operating point, for one class width."""

    point: float
    accuracy: float
    under: float
    over: float


def to_classes(mib: Numbers, width_gb: int) -> Wholes:
    """Class k holds [k · width, (k + 1) · width)."""
    return np.floor(mib / (width_gb * GB_MIB)).astype(np.int64)


def top_merged(classes: Wholes, width_gb: int) -> Wholes:
    return np.minimum(classes, TOP_GB // width_gb)


def shares(found: Wholes, truth: Wholes) -> dict[str, float]:
    """Shares of the rows whose class is right, too low and too high."""
    right, under, over = (float(rows.mean()) for rows in (found == truth, found < truth, found > truth))
    return {"accuracy": right, "under": under, "over": over}


def judge(truth: Wholes, found: Wholes, width_gb: int, *, merged: bool) -> Classes:
    if merged:
        truth, found = top_merged(truth, width_gb), top_merged(found, width_gb)
    labels = np.unique(np.concatenate([truth, found]))
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion, (np.searchsorted(labels, truth), np.searchsorted(labels, found)), 1)
    by_class = tuple(_class(confusion, place, int(label) * width_gb) for place, label in enumerate(labels))
    return Classes(
        width_gb=width_gb,
        top_merged=merged,
        **shares(found, truth),
        off_by_more=float((np.abs(found - truth) > 1).mean()),
        macro_f1=float(np.mean([one.f1 for one in by_class if one.rows])),
        by_class=by_class,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )


def _class(confusion: Wholes, place: int, from_gb: int) -> ByClass:
    right, rows, answers = confusion[place, place], confusion[place].sum(), confusion[:, place].sum()
    return ByClass(
        from_gb=from_gb,
        rows=int(rows),
        precision=float(right / answers) if answers else None,
        recall=float(right / rows) if rows else None,
        f1=float(2 * right / (rows + answers)),
    )


def errors(found_mib: Numbers, truth_mib: Numbers) -> Errors:
    off = found_mib - truth_mib
    share = np.abs(off) / truth_mib
    return Errors(
        mean_mib=float(np.abs(off).mean()),
        mean_share=float(share.mean()),
        median_share=float(np.median(share)),
        worst_under_mib=float(off.min()),
        worst_over_mib=float(off.max()),
    )


def point(at: float, found_mib: Numbers, truth_mib: Numbers, width_gb: int) -> Point:
    return Point(point=at, **shares(to_classes(found_mib, width_gb), to_classes(truth_mib, width_gb)))
