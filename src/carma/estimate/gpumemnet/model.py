"""Runs a learned model: one onnxruntime session for each file, made at the first question. Never torch.

A session may be run by several threads at once; making it takes some tens of milliseconds, so it is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from carma.errors import PluginError
from carma.estimate.cards import card_for
from carma.estimate.gpumemnet.facts import Facts, Kind, read_facts, stem
from carma.estimate.gpumemnet.features import Family, Features
from carma.estimate.gpumemnet.merged import merge

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS = 1  # for one model of some hundred layers a second thread costs more than it does


class _Session(Protocol):
    def run(self, outputs: list[str], fed: dict[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]: ...


class Model:
    """A graph and its facts."""

    def __init__(self, file: Path, facts: Facts) -> None:
        self.file, self.facts = file, facts
        self._session = _session(file)

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
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"gpumemnet needs onnxruntime, which cannot be imported: {error}", "pip install onnxruntime"
        ) from error


def _session(file: Path) -> _Session:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    try:
        made: _Session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise PluginError(f"{file} cannot be run: {error}", "Reinstall carma, or run carma train.") from error
    return made


_lock = threading.Lock()
_made: dict[Path, Model] = {}


def load(family: Family, kind: Kind, gpu: str, folders: Sequence[Path]) -> Model | None:
    """The model for a family of networks: one learned on this card first, else the nearest folder's. None: nobody
    has learned that family."""
    files = [folder / f"{stem(family, kind)}.json" for folder in folders]
    with _lock:
        found = [_model(file) for file in files if file.is_file()]
    same = (model for model in found if gpu and card_for(gpu) is card_for(model.facts.learned.gpu) is not None)
    return next(same, found[0] if found else None)


def _model(file: Path) -> Model:
    if file not in _made:
        _made[file] = Model(file.with_suffix(".onnx"), read_facts(file))
    return _made[file]
