"""Shared by the published estimators: how a figure becomes an answer, and what a description must contain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod

from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.layers.description import Described
from carma.trial.protocol import Trials

MIB = 1 << 20
# Memory of a process outside the allocator's segments: context, kernels, library handles. Methods that count it
# measure it on their own GPU. Here it is one rounded figure for all GPUs, about that of training runs on an H200
# with torch 2.11 (`outside` in lab/results/h200/memory/truth.jsonl); on other GPUs it differs.
CONTEXT_MIB = 760

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


class OfModel(ABC):
    """A formula over a model's description."""

    name: str

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        described = self._trials.describe(request)
        if isinstance(described, NoEstimate):
            return under(self.name, described)
        return self.of(described, request.spec.gpus)

    @abstractmethod
    def of(self, described: Described, gpus: int) -> Estimate | NoEstimate:
        """The method itself, for each of `gpus` GPUs."""


def answer(
    source: str,
    parts_bytes: Mapping[str, int],
    *,
    fixed_mib: Mapping[str, int] | None = None,
    reserved_bytes: int | None = None,
    warnings: tuple[str, ...] = (),
    steps_seen: int | None = None,
) -> Estimate | NoEstimate:
    """The sum of the parts. `upper_mib` is the estimate itself: no published method has a bound."""
    fixed = dict(fixed_mib or {})
    total = round(sum(parts_bytes.values()) / MIB) + sum(fixed.values())
    if total < 1:
        return NoEstimate(source=source, reason="the method finds no memory that this command would take")
    return Estimate(
        footprint_mib=total,
        upper_mib=total,
        source=source,
        reserved_mib=None if reserved_bytes is None else round(reserved_bytes / MIB),
        steps_seen=steps_seen,
        parts_mib={name: round(part / MIB) for name, part in parts_bytes.items()} | fixed,
        warnings=warnings,
    )


def under(source: str, refusal: NoEstimate) -> NoEstimate:
    """A refusal of the trial run, with the name of this estimator."""
    return NoEstimate(source=source, reason=refusal.reason)


def parameters_of(described: Described) -> int:
    if described.parameters is not None:
        return described.parameters
    return sum(layer.parameters for layer in described.layers)


def numel(shape: tuple[int, ...]) -> int:
    return prod(shape) if shape else 0


def no_outputs(described: Described) -> str | None:
    """Why activations cannot be counted, or None. A single layer without a shape is usual (a list of modules)."""
    if any(layer.output for layer in described.layers):
        return None
    return (
        "the summary does not contain the shapes of the layers' outputs (print(model) never does); use a torchsummary "
        "or torchinfo table, set the shape of one sample with --input, or use a trial run of the command"
    )


def cut_off(described: Described) -> tuple[str, ...]:
    """A warning if a table was printed with too small a depth: deeper layers are not counted."""
    hidden = [layer for layer in described.layers if layer.kind in _CONTAINERS and layer.parameters > 0]
    if not hidden:
        return ()
    return (f"the summary stops above the layers of {len(hidden)} blocks; their inner activations are not counted",)
