"""Runs a learned model: one onnxruntime session for each file, created when it is first needed. Never imports torch.

Several threads may run a session at once. Creating it takes tens of milliseconds, so it is kept.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from carma.errors import PluginError
from carma.paths import find_paths
from carma.trial.cards import card_for
from carma.trial.layers.kinds import KINDS
from gpumemnet import Family
from gpumemnet.serving.features import Features
from gpumemnet.serving.model_facts import GRAPH, SHIPPED, Facts, Kind, read_pair, stem

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS = 1  # for a model of some hundred layers a second thread costs more than it saves


class _Session(Protocol):
    def run(self, outputs: list[str], fed: dict[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]: ...


class Model:
    """An ONNX graph and its facts."""

    def __init__(self, file: Path, facts: Facts, graph: bytes) -> None:
        self.file, self.facts = file, facts
        self._session = _session(file, graph)

    def provenance(self) -> str:
        """The name of the model and its data, for the answer."""
        learned = self.facts.learned
        where = "comes with CARMA" if self.file.parent == SHIPPED else f"in {self.file.parent}"
        return f"the model {self.facts.name}, learned from {learned.rows:,} runs on {learned.gpu} ({where})"

    def quantiles_mib(self, features: Features) -> tuple[float, ...]:
        """Quantiles of the footprint, as `facts.quantiles` names them; ascending."""
        (found,) = self._session.run(["quantiles"], _fed(features, self.facts.kind))
        row = np.maximum.accumulate(found[0].astype(np.float64))
        if row.shape != (len(self.facts.quantiles),) or not np.isfinite(row).all():
            raise PluginError(
                f"{self.file} gives {row.tolist()}, which is no figure for each of its quantiles",
                "Make it again with carma train.",
            )
        return tuple(row.tolist())


def _fed(features: Features, kind: Kind) -> dict[str, NDArray[np.generic]]:
    fed: dict[str, NDArray[np.generic]] = {"scalars": features.scalars[None]}
    if kind == "transformer":
        layers = merge(features.kinds, features.tokens)
        fed |= {"kinds": layers.kinds[None], "tokens": layers.tokens[None], "weights": layers.weights[None]}
    return fed


def check_runtime() -> None:
    """Called when the estimator is created, so that a server does not start with a source that can never answer."""
    try:
        runtime()
    except ImportError as error:
        raise PluginError(
            f"gpumemnet needs onnxruntime, which cannot be imported: {error}", "pip install onnxruntime"
        ) from error


def runtime() -> ModuleType:
    """onnxruntime without telemetry. If that is not disabled before the import, it stores a name for the machine and
    events in the user's home directory, and sends them (its Privacy.md)."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    found: ModuleType = importlib.import_module("onnxruntime")
    return found


def _session(file: Path, graph: bytes) -> _Session:
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    try:
        made: _Session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise PluginError(f"{file} cannot be run: {error}", "Reinstall carma, or run carma train.") from error
    return made


_lock = threading.Lock()
_made: dict[tuple[Path, int], Model] = {}
FOLDER = "gpumemnet"  # in a data directory
SYSTEM = Path("/var/lib/carma") / FOLDER  # installed by root for every user of the server


def own_folder(environ: Mapping[str, str]) -> Path:
    """The directory of a user's own models, also of root: `carma train --install` writes there."""
    if environ.get("CARMA_HOME"):
        return find_paths(environ).state_dir / FOLDER
    given, home = environ.get("XDG_DATA_HOME", ""), environ.get("HOME", "")
    data = Path(given) if os.path.isabs(given) else Path(home or Path.home()) / ".local" / "share"
    return data / "carma" / FOLDER


def folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Directories of models in order: the user's own, the server's, those that come with CARMA."""
    return tuple(dict.fromkeys((own_folder(environ), SYSTEM, SHIPPED)))


def candidates(family: Family, kind: Kind, gpu: str, folders: Sequence[Path]) -> tuple[list[Model], list[str]]:
    """The models for a family of networks, first those learned on this GPU, then by directory; and the errors of the
    others."""
    found, broken = [], []
    for file in (folder / f"{stem(family, kind)}.json" for folder in folders):
        if file.is_file():
            try:
                with _lock:
                    found.append(_model(file))
            except PluginError as why:
                broken.append(str(why))
    card = card_for(gpu) if gpu else None
    found.sort(key=lambda model: card is None or card_for(model.facts.learned.gpu) is not card)
    return found, broken


def load(family: Family, kind: Kind, gpu: str, folders: Sequence[Path]) -> Model | None:
    """The first of them; None if there is no model of that family."""
    found, broken = candidates(family, kind, gpu, folders)
    if broken and not found:
        raise PluginError(broken[0], "Make it again with carma train.")
    return found[0] if found else None


def _model(file: Path) -> Model:
    """A changed file is read again."""
    key = (file, file.stat().st_mtime_ns)
    if key not in _made:
        _made[key] = Model(file.with_suffix(GRAPH), *read_pair(file))
    return _made[key]


ABSENT = len(KINDS)  # the kind before the first layer and after the last
NEAR = 3  # before, itself, after


@dataclass(frozen=True)
class Merged:
    """The distinct layers. `tokens` of an absent neighbour are 0."""

    kinds: NDArray[np.int64]  # [layers, NEAR]
    tokens: NDArray[np.float32]  # [layers, NEAR, T]
    weights: NDArray[np.float32]  # number of each


def merge(kinds: NDArray[np.int64], tokens: NDArray[np.float32]) -> Merged:
    """Uses bytes in a dictionary: numpy's `unique` takes ten times as long for rows of floats."""
    rows = np.concatenate([kinds[:, None].astype(np.float32), tokens], axis=1)
    raw, size = rows.tobytes(), rows.shape[1] * rows.itemsize
    seen: dict[bytes, int] = {}
    numbers = [seen.setdefault(raw[begin : begin + size], len(seen) + 1) for begin in range(0, len(raw), size)]
    around = np.array([0, *numbers, 0], np.int64)
    count = len(seen) + 1
    near = (around[:-2] * count + around[1:-1]) * count + around[2:]
    _, first, weights = np.unique(near, return_index=True, return_counts=True)
    places = first[:, None] + np.arange(NEAR)
    padded = np.pad(kinds, 1, constant_values=ABSENT)
    sizes = np.pad(tokens, ((1, 1), (0, 0)))
    return Merged(padded[places], sizes[places], weights.astype(np.float32))
