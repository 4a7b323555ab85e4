"""The facts beside each learned model: its data, its ranges, its accuracy. `carma train` writes them.

A model is two files, `FAMILY-KIND.onnx` and `FAMILY-KIND.json` (Facts). The ONNX graph takes unscaled features and
returns memory in MiB; all scaling is inside. The estimator refuses what lies outside of the ranges in the facts.

MLP-based: `scalars` float32 [n, S] -> `quantiles` float32 [n, Q].
Transformer-based: `scalars`, `kinds` int64 [n, L, 3], `tokens` float32 [n, L, 3, T], `weights` float32 [n, L] (how many
layers are equal; 0: padding) -> the same. Each layer comes with its two neighbours (`model.merge`).

S, T and the numbers of the kinds are those of `features`. The facts repeat them by name, so that a model that was
learned from other features is refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from carma.core.model.values import Record
from carma.errors import PluginError
from carma.trial.layers.kinds import KINDS
from gpumemnet import Family
from gpumemnet.serving.features import FEATURES, TOKEN

FORMAT = 1
Kind = Literal["mlp", "transformer"]
SHIPPED = Path(__file__).parent / "data"
GB_MIB = 1_000  # a GB of the class widths, as published


class LearnedFrom(Record, frozen=True, kw_only=True):
    """The measurements that the model was learned from. `gpu` is the driver's name of the GPU."""

    data_sha256: dict[str, str]  # by file name
    rows: int
    gpu: str
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    date: str = ""
    seed: int = 0


class Bound(Record, frozen=True, kw_only=True):
    """A bound that holds with a given probability on held-out data: one of the quantiles, times a factor."""

    quantile: float  # one of Facts.quantiles
    factor: float


class Facts(Record, frozen=True, kw_only=True):
    format: int = FORMAT
    name: str  # of the files: "cnn-mlp", "transformer-transformer" …
    family: Family  # the networks that it was learned from
    kind: Kind  # MLP-based or Transformer-based
    features: tuple[str, ...] = FEATURES  # columns of `scalars`
    tokens: tuple[str, ...] = TOKEN  # columns of `tokens`; unused by MLP-based models
    kinds: tuple[str, ...] = KINDS  # meaning of the numbers in `kinds`
    quantiles: tuple[float, ...]  # columns of the output, ascending; 0.5 is one of them
    operating_point: float  # the quantile whose class is the answer; it may lie between those of `quantiles`
    class_widths_gb: tuple[int, ...]  # 1 GB is 1,000 MiB; class k of width w holds [k·w, (k+1)·w)
    base_mib: float  # footprint of a process without tensors, as learned
    ranges: dict[str, tuple[float, float]]  # of each feature, on its own scale: minimum and maximum in the data
    ways: tuple[str, ...] = ()  # combinations of optimizer and number format in the data (`way_of`); empty: unknown
    kinds_seen: dict[str, int]  # number of models in the data that have each kind of layer
    most_layers: int
    bounds: dict[str, Bound] = {}  # by level: "0.9", "0.95", "0.99"
    learned: LearnedFrom
    graph_sha256: str = ""  # of the ONNX file beside it; "": unknown
    scores: dict[str, dict[str, float]] = {}  # on held-out folds, by class width ("8GB"): accuracy, under, over …

    def place(self, quantile: float) -> int:
        """The column of that quantile, or of the nearest."""
        return min(range(len(self.quantiles)), key=lambda place: abs(self.quantiles[place] - quantile))

    @property
    def width_gb(self) -> int:
        """The class width that is shown: the published one, which comes first."""
        return self.class_widths_gb[0]


def stem(family: Family, kind: Kind) -> str:
    return f"{family}-{kind}"


def read_facts(file: Path) -> Facts:
    try:
        facts = msgspec.json.decode(file.read_bytes(), type=Facts)
    except OSError as error:
        raise PluginError(f"{file} cannot be read: {error.strerror}", "Reinstall carma, or run carma train.") from error
    except msgspec.DecodeError as error:
        raise PluginError(
            f"{file} does not describe a learned model: {error}", "Make it again with carma train."
        ) from error
    if reason := _why_not(facts):
        raise PluginError(f"{file} cannot be used: {reason}", "Make it again with this version's carma train.")
    return facts


def _why_not(facts: Facts) -> str | None:
    """Errors that would otherwise not be noticed."""
    if facts.format != FORMAT or (facts.features, facts.tokens, facts.kinds) != (FEATURES, TOKEN, KINDS):
        return "its model was learned from other features than this version computes"
    if set(facts.ranges) != set(FEATURES):
        return "it does not tell the range of each feature"
    if 0.5 not in facts.quantiles or list(facts.quantiles) != sorted(facts.quantiles):
        return "its quantiles do not ascend, or the median is not among them"
    return None


def encode_facts(facts: Facts) -> bytes:
    return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"


GRAPH, NEXT = ".onnx", ".onnx.new"
LOOKS = 2  # both files may be replaced between reading the facts and the graph


def digest(graph: bytes) -> str:
    return hashlib.sha256(graph).hexdigest()


def read_pair(file: Path) -> tuple[Facts, bytes]:
    """The facts in `file`, and the graph that belongs to them."""
    for _ in range(LOOKS):
        facts = read_facts(file)
        for name in (GRAPH, NEXT) if facts.graph_sha256 else (GRAPH,):
            graph = _bytes(file.with_suffix(name))
            if graph is not None and facts.graph_sha256 in ("", digest(graph)):
                return facts, graph
    raise PluginError(
        f"{file.with_suffix(GRAPH)} is missing, or is not the graph that {file.name} was written with",
        "Copy both files of a model, or make it again with carma train.",
    )


def _bytes(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PluginError(
            f"{file} cannot be read: {error.strerror}", "Make it readable, or run carma train."
        ) from error
