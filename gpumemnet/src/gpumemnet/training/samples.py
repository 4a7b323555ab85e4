"""The data to learn from: features, layer graph and footprint of each measured run, and the scale of the target.

Features come from `gpumemnet.serving.features`, as in serving. The learners predict
z = log((footprint − base) / (guess + room)), with `base` a little (`room`) below the least footprint of the data, which
is that of a process without tensors. An error of z is about a relative error of the tensors' memory. For the smallest
models, where the allocator's 2 MiB are several times the guess, the room limits z.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carma.errors import Refused, Usage
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import Described, Layer
from gpumemnet import Family
from gpumemnet.serving.features import PLACE, Features, features
from gpumemnet.serving.model_facts import LearnedFrom

Floats = NDArray[np.float32]
Wholes = NDArray[np.int64]
Numbers = NDArray[np.float64]


HEAD_FIELDS = ("gpu", "driver", "torch", "cuda", "date")  # of a measurement, as in the facts of a model


@dataclass(frozen=True)
class Samples:
    """One family's runs. Kinds, tokens and edges are tuples, because models differ in their number of layers."""

    family: Family
    shapes: tuple[str, ...]  # kind of network in the generator: residual, pyramid …
    scalars: Floats
    kinds: tuple[Wholes, ...]
    tokens: tuple[Floats, ...]
    edges: tuple[Wholes, ...]  # [2, edges] each: from, to
    footprint_mib: Numbers
    origin: LearnedFrom
    left_out: Mapping[str, int]  # rows that are left out, by reason
    ways: tuple[str, ...] = ()  # how each was trained (`features.way_of`)

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, rows: Wholes) -> Samples:
        columns = {name: getattr(self, name) for name in ("shapes", "kinds", "tokens", "edges", "ways")}
        taken: dict[str, Any] = {name: tuple(one[row] for row in rows) for name, one in columns.items() if one}
        return replace(self, scalars=self.scalars[rows], footprint_mib=self.footprint_mib[rows], **taken)

    @property
    def guess_mib(self) -> Numbers:
        """The estimate of the plain arithmetic, which the learners correct."""
        guess: Numbers = np.exp2(self.scalars[:, PLACE["guess_mib"]].astype(np.float64)) - 1.0
        return guess

    @property
    def layer_counts(self) -> Wholes:
        return np.array([len(kinds) for kinds in self.kinds], np.int64)


@dataclass(frozen=True)
class Run:
    """One row of Samples."""

    described: Described
    shape: str
    footprint_mib: float
    edges: Wholes


def chain(layers: int) -> Wholes:
    """Each layer feeds the next: for data without a graph."""
    places = np.arange(layers, dtype=np.int64)
    return np.stack([places[:-1], places[1:]])


def gather(family: Family, runs: Sequence[Run], origin: LearnedFrom, left_out: Mapping[str, int]) -> Samples:
    """Runs with incomplete descriptions are left out and counted."""
    kept: list[tuple[Run, Features]] = []
    reasons = Counter(left_out)
    for run in runs:
        try:
            kept.append((run, features(run.described)))
        except CannotTell as why:
            reasons[str(why)] += 1
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
        origin=origin,
        left_out={reason: count for reason, count in reasons.items() if count},
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
        if found.setdefault(samples.family, samples) is not samples:
            second = f"{path} is a second file of the family {samples.family}"
            raise Usage(second, "carma dataset pack makes one of two.")
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
    measured_on: dict[str, Any] = {name: str(head.get(name, "")) for name in HEAD_FIELDS}
    origin = LearnedFrom(data_sha256={path.name: sha256(path)}, rows=len(table), **measured_on)
    return gather(family, runs, origin, reasons)


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
MEDIAN = QUANTILES.index(0.5)
ROOM_MIB = 64.0


@dataclass(frozen=True)
class Scale:
    base_mib: float
    room_mib: float = ROOM_MIB

    @classmethod
    def of(cls, samples: Samples) -> Scale:
        return cls(float(samples.footprint_mib.min()) - ROOM_MIB)

    def to_z(self, samples: Samples) -> Numbers:
        z: Numbers = np.log((samples.footprint_mib - self.base_mib) / (samples.guess_mib + self.room_mib))
        return z

    def to_mib(self, z: Numbers, samples: Samples) -> Numbers:
        """Quantiles in MiB: one row for each sample."""
        mib: Numbers = self.base_mib + np.exp(z) * (samples.guess_mib + self.room_mib)[:, None]
        return mib


_KINDS = {"linear": "Linear", "batch_normalization": "BatchNorm1d", "dropout": "Dropout"}
_INPUT = re.compile(r"input:(\d+)_")
_SHAPE = re.compile(r"arch:([a-z]+)_")
HINT = "It is Datasets/MLP/mlp_data_step2.csv of the public GPUMemNet repository."


def read_public(path: Path) -> Samples:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            runs = [_run(row) for row in csv.DictReader(file)]
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", HINT) from error
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise Usage(f"{path} is not the public MLP data: {type(error).__name__}: {error}", HINT) from error
    origin = LearnedFrom(data_sha256={path.name: sha256(path)}, rows=len(runs), gpu="NVIDIA A100 40GB")
    return gather("mlp", runs, origin, {})


def _run(row: Mapping[str, str]) -> Run:
    batch = int(row["Batch Size"])
    layers = tuple(
        Layer(kind=_KINDS.get(kind, kind), output=(batch, width), parameters=parameters)
        for kind, width, parameters in ast.literal_eval(row["Activations-Params"])
    )
    width, shape = _INPUT.search(row["Filename"]), _SHAPE.search(row["Filename"])
    if width is None or shape is None:
        raise ValueError(f"no input or shape in the name {row['Filename']!r}")
    described = Described(
        layers=layers,
        batch=batch,
        parameters=int(row["Total Parameters"]),
        input=(batch, int(width[1])),
        optimizer="Adam",
        optimizer_slots=2,
    )
    return Run(described, shape[1], float(row["Max GPU Memory (MiB)"]), chain(len(layers)))
