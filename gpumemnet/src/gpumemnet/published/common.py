"""Shared by the published estimators: how a figure becomes an answer, and what a description must contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.layers.description import Described
from carma.trial.protocol import Context, Trials

MIB = 1 << 20
# Memory of a process outside the allocator's segments: context, kernels, library handles. Methods that count it
# measure it on their own GPU. Here it is one rounded figure for all GPUs, about that of training runs on an H200
# with torch 2.11 (`outside` in lab/results/h200/memory/truth.jsonl); on other GPUs it differs.
CONTEXT_MIB = 760

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


class Parts(NamedTuple):
    """The figures of one answer. The footprint is their sum."""

    bytes_of: Mapping[str, int]
    warnings: tuple[str, ...]
    fixed_mib: Mapping[str, int] = {}
    reserved_bytes: int | None = None
    steps_seen: int | None = None


Found = Parts | NoEstimate | str  # a text: why there is no figure


class Published:
    """A published method as an estimator."""

    def __init__(self, name: str, method: Callable[[Trials, EstimateRequest], Found], context: Context) -> None:
        self.name = name
        self._method, self._trials = method, context.trials

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        """`upper_mib` is the estimate itself: no published method has a bound."""
        found = self._method(self._trials, request)
        if isinstance(found, NoEstimate):
            return under(self.name, found)
        if isinstance(found, str):
            return NoEstimate(source=self.name, reason=found)
        total = round(sum(found.bytes_of.values()) / MIB) + sum(found.fixed_mib.values())
        if total < 1:
            return NoEstimate(source=self.name, reason="the method finds no memory that this command would take")
        return Estimate(
            footprint_mib=total,
            upper_mib=total,
            source=self.name,
            reserved_mib=None if found.reserved_bytes is None else round(found.reserved_bytes / MIB),
            steps_seen=found.steps_seen,
            parts_mib={**{name: round(part / MIB) for name, part in found.bytes_of.items()}, **found.fixed_mib},
            warnings=found.warnings,
        )


def of_model(formula: Callable[[Described, int], Found]) -> Callable[[Trials, EstimateRequest], Found]:
    """A method that needs the model's description and the number of GPUs; its figures are for each of them."""

    def method(trials: Trials, request: EstimateRequest) -> Found:
        described = trials.describe(request)
        return described if isinstance(described, NoEstimate) else formula(described, request.spec.gpus)

    return method


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
