"""Runs a learned model: one onnxruntime session for each file, made at the first question. Never torch.

A session may be run by several threads at once; making it takes some tens of milliseconds, so it is kept.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from carma.errors import PluginError
from carma.paths import find_paths
from carma.trial.cards import card_for
from gpumemnet.serving.features import Family, Features
from gpumemnet.serving.merged_layers import merge
from gpumemnet.serving.model_facts import SHIPPED, Facts, Kind, stem
from gpumemnet.serving.model_files import GRAPH, read_pair

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS = 1  # for one model of some hundred layers a second thread costs more than it does


class _Session(Protocol):
    def run(self, outputs: list[str], fed: dict[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]: ...


class Model:
    """A graph and its facts."""

    def __init__(self, file: Path, facts: Facts, graph: bytes) -> None:
        self.file, self.facts = file, facts
        self._session = _session(file, graph)

    def told(self) -> str:
        """Which one it is."""
        learned = self.facts.learned
        where = "comes with CARMA" if self.file.parent == SHIPPED else f"in {self.file.parent}"
        return f"the model {self.facts.name}, learned from {learned.rows:,} runs on {learned.gpu} ({where})"

    def quantiles_mib(self, features: Features) -> tuple[float, ...]:
        """Of the footprint, as `facts.quantiles` names them; ascending."""
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
    """Said when the estimator is made, so that a server does not start with a source that can never answer."""
    try:
        runtime()
    except ImportError as error:
        raise PluginError(
            f"gpumemnet needs onnxruntime, which cannot be imported: {error}", "pip install onnxruntime"
        ) from error


def runtime() -> ModuleType:
    """onnxruntime, without what it would tell its makers: unless told not to before it is imported, it keeps a name
    for the machine and events below the user's home, and sends them (its Privacy.md)."""
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
SYSTEM = Path("/var/lib/carma") / FOLDER  # what root installed serves every user of the machine


def own_folder(environ: Mapping[str, str]) -> Path:
    """Where a user's own models lie, root's too: `carma train --install` writes there."""
    if environ.get("CARMA_HOME"):
        return find_paths(environ).state_dir / FOLDER
    given, home = environ.get("XDG_DATA_HOME", ""), environ.get("HOME", "")
    data = Path(given) if os.path.isabs(given) else Path(home or Path.home()) / ".local" / "share"
    return data / "carma" / FOLDER


def folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where models are looked for: the user's own, the machine's, those that come with CARMA."""
    return tuple(dict.fromkeys((own_folder(environ), SYSTEM, SHIPPED)))


def candidates(family: Family, kind: Kind, gpu: str, folders: Sequence[Path]) -> tuple[list[Model], list[str]]:
    """The models of a family of networks, those that were learned on this card first, then by folder; and why others
    cannot be asked."""
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
    """The first of them. None: nobody has learned that family."""
    found, broken = candidates(family, kind, gpu, folders)
    if broken and not found:
        raise PluginError(broken[0], "Make it again with carma train.")
    return found[0] if found else None


def _model(file: Path) -> Model:
    """Learned anew, it is read anew."""
    key = (file, file.stat().st_mtime_ns)
    if key not in _made:
        _made[key] = Model(file.with_suffix(GRAPH), *read_pair(file))
    return _made[key]
