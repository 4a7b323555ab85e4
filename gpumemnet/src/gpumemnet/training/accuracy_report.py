"""The results of the folds, as written to accuracy.json: the source of all figures in the documentation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from carma.core.model.values import Record
from gpumemnet.directories import make_folder, write_whole
from gpumemnet.training import PUBLISHED_WIDTHS_GB, WIDTHS_GB
from gpumemnet.training.cross_validation import Answers, Protocol
from gpumemnet.training.ensemble import POINTS, at_level
from gpumemnet.training.samples import MEDIAN, QUANTILES, Numbers, Samples
from gpumemnet.training.scores import Classes, Errors, Point, errors, judge, point, shares, to_classes

HINT = "--report names a directory that you may write to."


class Bound(Record, frozen=True, kw_only=True):
    level: float
    held: float  # share of rows with a footprint up to the bound
    over_share: float  # mean relative excess over the footprint


class Judged(Record, frozen=True, kw_only=True):
    """Classes by one operating point: the median, the chosen one, or the careful one (10 : 1)."""

    point: str
    classes: Classes
    of_split: dict[str, tuple[float, float]]  # accuracy and under-estimated share of each fold or shape


class Entry(Record, frozen=True, kw_only=True):
    data: str
    family: str
    learner: str
    protocol: Protocol
    rows: int
    judged: tuple[Judged, ...]
    errors: Errors | None  # of the median; a classifier has none
    coverage: dict[str, float]  # share of the rows below each quantile
    bounds: tuple[Bound, ...]
    curves: dict[str, tuple[Point, ...]]  # by class width
    took_s: float


class Data(Record, frozen=True, kw_only=True):
    rows: int
    gpu: str
    sha256: dict[str, str]
    left_out: dict[str, int]
    footprints_mib: tuple[float, float]  # minimum and maximum


class Report(Record, frozen=True, kw_only=True):
    command: str
    seed: int
    date: str
    versions: dict[str, str]
    cores: int
    data: dict[str, Data]
    entries: tuple[Entry, ...]


def entries(samples: Mapping[str, Samples], answers: Iterable[Answers]) -> tuple[Entry, ...]:
    ordered = sorted(answers, key=lambda one: (*_group(one), one.job.split.name))
    return tuple(_entry(list(parts), samples[data]) for (data, _, _), parts in itertools.groupby(ordered, _group))


def _group(answers: Answers) -> tuple[str, str, Protocol]:
    return answers.job.data, answers.job.learner, answers.job.protocol


def _entry(parts: Sequence[Answers], samples: Samples) -> Entry:
    job = parts[0].job
    rows = np.concatenate([part.job.split.judged for part in parts])
    truth = samples.footprint_mib[rows]
    quantiles = [part.quantiles_mib for part in parts if part.quantiles_mib is not None]
    found = np.concatenate(quantiles) if quantiles else None
    return Entry(
        data=job.data,
        family=samples.family,
        learner=job.learner,
        protocol=job.protocol,
        rows=len(rows),
        judged=tuple(_judged(parts, samples)),
        errors=None if found is None else errors(found[:, MEDIAN], truth),
        coverage={} if found is None else _coverage(found, truth),
        bounds=tuple(_bounds(parts, truth)),
        curves={} if found is None else _curves(found, truth, samples.family),
        took_s=round(sum(part.took_s for part in parts), 1),
    )


def _judged(parts: Sequence[Answers], samples: Samples) -> Iterable[Judged]:
    for name in parts[0].points_mib or ("class",):
        for width in PUBLISHED_WIDTHS_GB[samples.family] if name == "class" else WIDTHS_GB[samples.family]:
            found = [_classes(part, name, width) for part in parts]
            truth = [to_classes(samples.footprint_mib[part.job.split.judged], width) for part in parts]
            of_split = {}
            for part, one in zip(parts, map(shares, found, truth), strict=True):
                of_split[part.job.split.name] = (one["accuracy"], one["under"])
            for merged in (False, True) if max(map(np.max, truth)) * width > 40 else (False,):
                classes = judge(np.concatenate(truth), np.concatenate(found), width, merged=merged)
                yield Judged(point=name, classes=classes, of_split=of_split)


def _classes(part: Answers, name: str, width_gb: int) -> np.ndarray:
    return to_classes(part.points_mib[name], width_gb) if part.points_mib else part.classes[width_gb]


def _coverage(found: Numbers, truth: Numbers) -> dict[str, float]:
    return {str(level): float((truth <= found[:, place]).mean()) for place, level in enumerate(QUANTILES)}


def _bounds(parts: Sequence[Answers], truth: Numbers) -> Iterable[Bound]:
    for level in parts[0].bounds_mib:
        bound = np.concatenate([part.bounds_mib[level] for part in parts])
        yield Bound(level=level, held=float((truth <= bound).mean()), over_share=float((bound / truth - 1).mean()))


def _curves(found: Numbers, truth: Numbers, family: str) -> dict[str, tuple[Point, ...]]:
    return {
        f"{width}GB": tuple(point(at, at_level(found, at), truth, width) for at in POINTS[::3])
        for width in WIDTHS_GB[family]
    }


def about(samples: Samples) -> Data:
    return Data(
        rows=len(samples),
        gpu=samples.origin.gpu,
        sha256=samples.origin.data_sha256,
        left_out=dict(samples.left_out),
        footprints_mib=(float(samples.footprint_mib.min()), float(samples.footprint_mib.max())),
    )


def write(report: Report, path: Path) -> None:
    make_folder(path.parent, HINT)
    text = msgspec.json.encode(_rounded(msgspec.to_builtins(report)))
    write_whole(path, msgspec.json.format(text, indent=1) + b"\n")


def _rounded(value: object) -> object:
    """Rounds to five decimal places: more would be noise."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return round(value, 5) if isinstance(value, float) else value


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)
