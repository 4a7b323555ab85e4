"""What is learned from: of each measured training run its features, its layer graph and its footprint.

Features come from `estimate.gpumemnet.features`, as in serving, so that what is learned is what is asked later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carma.errors import Refused, Usage
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import Described
from gpumemnet.serving.features import PLACE, Family, Features, features

Floats = NDArray[np.float32]
Wholes = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Origin:
    """Where samples come from: what the facts beside a model tell."""

    data_sha256: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    date: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows that are not learned from, by the reason


@dataclass(frozen=True)
class Samples:
    """One family's runs, row by row. Kinds, tokens and edges are lists, for each model has its own number of layers."""

    family: Family
    shapes: tuple[str, ...]  # what the generator meant each to be: residual, pyramid …
    scalars: Floats
    kinds: tuple[Wholes, ...]
    tokens: tuple[Floats, ...]
    edges: tuple[Wholes, ...]  # [2, edges] each: from, to
    footprint_mib: Numbers
    origin: Origin = Origin()
    ways: tuple[str, ...] = ()  # how each was trained (`features.way_of`)

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, rows: Wholes) -> Samples:
        return Samples(
            family=self.family,
            shapes=tuple(self.shapes[row] for row in rows),
            scalars=self.scalars[rows],
            kinds=tuple(self.kinds[row] for row in rows),
            tokens=tuple(self.tokens[row] for row in rows),
            edges=tuple(self.edges[row] for row in rows),
            footprint_mib=self.footprint_mib[rows],
            origin=self.origin,
            ways=tuple(self.ways[row] for row in rows) if self.ways else (),
        )

    @property
    def guess_mib(self) -> Numbers:
        """What the plain arithmetic says; the learners correct it."""
        guess: Numbers = np.exp2(self.scalars[:, PLACE["guess_mib"]].astype(np.float64)) - 1.0
        return guess

    @property
    def layer_counts(self) -> Wholes:
        return np.array([len(kinds) for kinds in self.kinds], np.int64)


@dataclass(frozen=True)
class Run:
    """One row before it becomes a part of Samples."""

    described: Described
    shape: str
    footprint_mib: float
    edges: Wholes


def chain(layers: int) -> Wholes:
    """Each layer feeds the next: where nobody tells the graph."""
    places = np.arange(layers, dtype=np.int64)
    return np.stack([places[:-1], places[1:]])


def gather(family: Family, runs: Sequence[Run], origin: Origin) -> Samples:
    """Runs whose description tells too little are left out, and counted."""
    kept: list[tuple[Run, Features]] = []
    left_out = dict(origin.left_out)
    for run in runs:
        try:
            kept.append((run, features(run.described)))
        except CannotTell as why:
            left_out[str(why)] = left_out.get(str(why), 0) + 1
    if not kept:
        raise Usage(f"there is no run to learn from in the {family} data", "carma dataset pack writes such files.")
    return Samples(
        family=family,
        shapes=tuple(run.shape for run, _ in kept),
        scalars=np.stack([found.scalars for _, found in kept]),
        kinds=tuple(found.kinds for _, found in kept),
        tokens=tuple(found.tokens for _, found in kept),
        edges=tuple(run.edges for run, _ in kept),
        footprint_mib=np.array([run.footprint_mib for run, _ in kept]),
        origin=Origin(**{**vars(origin), "left_out": left_out}),
        ways=tuple(found.way for _, found in kept),
    )


def sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}") from error


def read_tables(paths: Sequence[Path]) -> dict[Family, Samples]:
    """The samples of each family. Two files of one family are refused: a run could be in both."""
    found: dict[Family, Samples] = {}
    for path in paths:
        samples = read_table(path)
        if samples.family in found:
            raise Usage(
                f"{path} is a second file of the family {samples.family}", "carma dataset pack makes one of two."
            )
        found[samples.family] = samples
    return found


def read_table(path: Path) -> Samples:
    from gpumemnet.dataset.table import read

    table = read(path)
    family: Family = table.family  # type: ignore[assignment]  # `read` has checked it
    footprints, oom = table["footprint_mib"], table["oom"]
    usable = np.isfinite(footprints) & (oom == 0)
    if not usable.any():
        raise Refused(f"{path} has no row with a measured footprint", "carma dataset collect measures.")
    edges = table.edges
    runs = []
    for row in np.flatnonzero(usable).tolist():
        span = slice(edges.offsets[row], edges.offsets[row + 1])
        graph = np.stack([edges.source[span], edges.target[span]])
        runs.append(Run(table.described(row), table.configs[row].shape, float(footprints[row]), graph))
    reasons = {
        "out of memory": int((oom != 0).sum()),
        "not measured": int((~np.isfinite(footprints) & (oom == 0)).sum()),
    }
    head = table.heads[-1] if table.heads else {}
    return gather(family, runs, Origin(
        data_sha256={path.name: sha256(path)},
        **{name: str(head.get(name, "")) for name in ("gpu", "driver", "torch", "cuda", "date")},
        left_out={reason: count for reason, count in reasons.items() if count},
    ))  # fmt: skip
