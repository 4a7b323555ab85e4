"""Replays a trial with a model of cuDNN's workspaces that never saw the run's family.

The shipped model (`estimate/data/`) is learnt from the measured runs too. So an estimate of one of these runs that goes
by it says nothing of a family that nobody measured. For that, models are fitted without some families each
(`python -m tools.fit_workspaces … --without run:resnet … --out DIR/0.conv.json.gz`), and DIR/folds.json says which:
`{"0.conv.json.gz": ["resnet", "vgg"]}`.
"""

from __future__ import annotations

import gzip
import os
import re
from functools import lru_cache
from pathlib import Path

import msgspec

from carma.core.ports import EstimateRequest
from carma.errors import Usage
from carma.estimate.cards import card_for
from carma.estimate.protocol import Trial
from carma.estimate.trace import allocator_options, constants
from carma.estimate.trace.blas_workspaces import blas_rules
from carma.estimate.trace.conv_workspaces import ConvModel, ConvWorkspaces
from carma.estimate.trace.estimator import BY_AGE, HOPPER
from carma.estimate.trace.outside import outside_bytes
from carma.estimate.trace.replay import replay
from carma.estimate.trace.report import read_events
from carma.estimate.trace.workspaces import CardWorkspaces

MIB = 1 << 20
INDEX = "folds.json"


class Folds:
    """Which model was fitted without which families."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, list[str]])
        except (OSError, msgspec.MsgspecError) as error:
            raise Usage(f"{folder / INDEX} cannot be used: {error}", "It names the families of each file.") from error
        self._file = {family: name for name, families in index.items() for family in families}
        for name in index:
            if not (folder / name).is_file():
                raise Usage(f"{folder / name} is not there", f"{INDEX} names it.")

    def name(self, family: str) -> str:
        """The file whose model does not know the family; "" where every model does."""
        return self._file.get(family, "")

    def replayed_mib(self, family: str, trial: Trial, request: EstimateRequest) -> float | None:
        """The footprint before any correction; None where the family is in no fold."""
        name = self.name(family)
        return replayed_mib(trial, request, _workspaces(self._folder / name)) if name else None


@lru_cache(maxsize=16)
def _workspaces(file: Path) -> ConvWorkspaces:
    return ConvWorkspaces(msgspec.json.decode(gzip.decompress(file.read_bytes()), type=ConvModel))


def replayed_mib(trial: Trial, request: EstimateRequest, convolutions: ConvWorkspaces) -> float:
    """As `trace` replays it, but for the model of convolutions. A test holds the two together."""
    report, gpu = trial.report, request.gpus[0]
    caching = request.spec.environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING") is None
    found = constants.load(gpu.name, report.torch, constants.folders(os.environ))
    measured = None if found is None else found.constants
    card = card_for(gpu.name)
    rules = blas_rules(measured, HOPPER if card is None else card.capability, request.spec.environment)
    events = list(read_events(trial.events))
    replayed = replay(
        events,
        report.calls,
        allocator_options.parse(report.allocator, caching=caching),
        CardWorkspaces(convolutions, rules),
        marks=report.marks,
        device_bytes=gpu.memory_mib * MIB,
        by_age=_version(report.torch) >= BY_AGE,
    )
    return (replayed.peaks.reserved_bytes + outside_bytes(measured, report, events)) / MIB


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
