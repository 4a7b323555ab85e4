"""Writes the shipped models: learned from all rows of a family, as ONNX with their facts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from carma.errors import PluginError
from carma.trial.layers.kinds import KINDS
from gpumemnet.directories import cannot_write, make_folder, sync_folder, write_whole
from gpumemnet.serving.features import FEATURES
from gpumemnet.serving.model_facts import (
    GRAPH,
    NEXT,
    Bound,
    Facts,
    Kind,
    digest,
    encode_facts,
    read_facts,
    stem,
)
from gpumemnet.training import SERVED, WIDTHS_GB
from gpumemnet.training.accuracy_report import Entry
from gpumemnet.training.cross_validation import held, make_deterministic
from gpumemnet.training.ensemble import Learned, at_level, learn
from gpumemnet.training.export import export
from gpumemnet.training.learners import LEARNERS
from gpumemnet.training.samples import QUANTILES, Samples
from gpumemnet.training.scores import shares, to_classes

Scores = Mapping[str, dict[str, float]]


def make_held(data: str, learner: str, out: str, seed: int, scores: Scores | None) -> str:
    """Calls `make` with the samples of that name, in a process of the pool."""
    return str(make(held(data), learner, Path(out), seed, scores))


def make(samples: Samples, learner: str, out: Path, seed: int, scores: Scores | None = None) -> Path:
    """Scores are those of the folds if there are any; else each row is judged by the member that left it out."""
    make_deterministic()
    kind = SERVED[learner]
    learned = learn(LEARNERS[learner].fit, samples, LEARNERS[learner].members, seed, WIDTHS_GB[samples.family][0])
    found = scores or _unseen(learned, samples)
    file = out / f"{stem(samples.family, kind)}.json"
    make_folder(out)
    write_pair(facts(samples, kind, learned, seed, found), export(learned), file)
    return file.with_suffix(GRAPH)


def facts(samples: Samples, kind: Kind, learned: Learned, seed: int, scores: Scores) -> Facts:
    columns = zip(FEATURES, samples.scalars.T, strict=True)
    seen = [sum(bool((kinds == number).any()) for kinds in samples.kinds) for number in range(len(KINDS))]
    return Facts(
        name=stem(samples.family, kind),
        family=samples.family,
        kind=kind,
        quantiles=QUANTILES,
        operating_point=learned.operating_point,
        class_widths_gb=WIDTHS_GB[samples.family],
        base_mib=round(learned.scale.base_mib, 1),
        ranges={name: (float(column.min()), float(column.max())) for name, column in columns},
        ways=tuple(sorted(set(samples.ways))),
        kinds_seen={name: count for name, count in zip(KINDS, seen, strict=True) if count},
        most_layers=int(samples.layer_counts.max()),
        bounds={str(level): Bound(quantile=level, factor=round(one, 5)) for level, one in learned.factors.items()},
        learned=replace(samples.origin, rows=len(samples), seed=seed),
        scores=dict(scores),
    )


def _unseen(learned: Learned, samples: Samples) -> Scores:
    found, truth = at_level(learned.unseen_mib, learned.operating_point), samples.footprint_mib
    widths = WIDTHS_GB[samples.family]
    return {f"{width}GB": shares(to_classes(found, width), to_classes(truth, width)) for width in widths}


def scores_of(entries: Sequence[Entry], data: str, learner: str) -> Scores | None:
    """Scores of the folds, by class width, at the operating point; None if the learner was not evaluated."""
    for entry in entries:
        if (entry.data, entry.learner, entry.protocol) == (data, learner, "folds"):
            wanted = [one.classes for one in entry.judged if one.point == "operating" and not one.classes.top_merged]
            return {
                f"{one.width_gb}GB": {"accuracy": one.accuracy, "under": one.under, "over": one.over} for one in wanted
            }
    return None


def write_pair(facts: Facts, graph: bytes, file: Path) -> None:
    """`file` is that of the facts. Written in the order of `read_pair`: whenever this is interrupted, one of the models
    is valid."""
    new, its_place = file.with_suffix(NEXT), file.with_suffix(GRAPH)
    try:
        _finish(file)
        write_whole(new, graph)
        try:
            write_whole(file, encode_facts(replace(facts, graph_sha256=digest(graph))))
        finally:
            if not _finish(file):
                new.unlink(missing_ok=True)
        sync_folder(file.parent)
    except OSError as error:
        raise cannot_write(its_place, error) from error


def _finish(file: Path) -> bool:
    """Renames a new graph that the facts name, now or after an interruption; returns whether there was one."""
    new = file.with_suffix(NEXT)
    with contextlib.suppress(FileNotFoundError, PluginError):
        if digest(new.read_bytes()) == read_facts(file).graph_sha256:
            os.replace(new, file.with_suffix(GRAPH))
            return True
    return False
