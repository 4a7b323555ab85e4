"""The footprint of a trial: its replayed events, memory outside the allocator, and the effect of uncertain workspaces.

Whether a workspace fits into a free block of the cache or needs a new segment depends on single bytes, and cuDNN's
figures are partly learnt. So a trial with convolutions is also replayed with slightly larger and smaller workspaces:
the larger of the first two footprints is the estimate, and the spread of the three is its uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from carma.core.model.values import Record
from carma.core.ports import EstimateRequest
from carma.trial.cards import card_for
from carma.trial.protocol import Trial
from carma.trial.replay import allocator_options, card_constants
from carma.trial.replay.allocator_options import AllocatorOptions
from carma.trial.replay.bound import group_of
from carma.trial.replay.conv_workspaces import convolutions_of
from carma.trial.replay.library_memory import blas_scratch, card_workspaces, outside_bytes
from carma.trial.replay.replay import Replayed, Scratch, Workspaces, replay
from carma.trial.report import Call, TrialReport, read_events

MIB = 1 << 20
LARGER, SMALLER = 1.06, 0.96  # factors of the workspaces in the other replays
HOPPER = (9, 0)  # the capability assumed for an unknown GPU
BY_AGE = (2, 14)  # torch's rule for free blocks of one size, from this version on (its pull request 183591)


class TrialFootprint(Record, frozen=True, kw_only=True):
    replayed: Replayed
    outside_bytes: int
    footprint_bytes: int
    spread: float  # log of the largest over the smallest footprint
    group: str
    warnings: tuple[str, ...] = ()


class NoFootprint(Exception):
    """Why there is no figure, as a sentence."""


def figure(
    trial: Trial, request: EstimateRequest, folders: Sequence[Path], convolutions: Workspaces | None = None
) -> TrialFootprint:
    """Footprint on the first of the request's GPUs. `convolutions` replaces the GPU's own model of cuDNN."""
    report, gpu, environment = trial.report, request.gpus[0], request.spec.environment
    options = _options(report, environment)
    if options.not_modelled:
        raise NoFootprint(options.not_modelled)
    found = card_constants.load(gpu.name, report.torch, folders)
    measured = found.constants if found is not None else None
    card = card_for(gpu.name)
    workspaces = card_workspaces(
        convolutions or convolutions_of(found.file if found is not None else None),
        blas_scratch(measured, card.capability if card is not None else HOPPER, environment),
    )
    replays = _replays(trial, options, workspaces, gpu.memory_mib * MIB)
    if replays[0].unmatched:
        raise NoFootprint(f"the trial's events contradict each other in {replays[0].unmatched} places")
    outside = outside_bytes(measured, report, read_events(trial.events))
    footprints = [each.peaks.reserved_bytes + outside for each in replays]
    return TrialFootprint(
        replayed=replays[0],
        outside_bytes=outside,
        footprint_bytes=max(footprints[:2]),
        spread=math.log(max(footprints) / min(footprints)),
        group=group_of(report),
        warnings=(*options.warnings, *(found.warnings if found is not None else ())),
    )


def _replays(trial: Trial, options: AllocatorOptions, workspaces: Workspaces, device_bytes: int) -> list[Replayed]:
    report, events = trial.report, list(read_events(trial.events))
    factors = (1.0, LARGER, SMALLER) if any(call.op.startswith("conv") for call in report.calls) else (1.0,)
    by_age = card_constants.version_of(report.torch) >= BY_AGE
    return [
        replay(
            events,
            report.calls,
            options,
            _scaled(workspaces, factor),
            marks=report.marks,
            device_bytes=device_bytes,
            by_age=by_age,
        )
        for factor in factors
    ]


def _scaled(workspaces: Workspaces, factor: float) -> Workspaces:
    def scaled(call: Call) -> Scratch:
        scratch = workspaces(call)
        return replace(scratch, transient_bytes=tuple(int(size * factor) for size in scratch.transient_bytes))

    return workspaces if factor == 1.0 else scaled


def _options(report: TrialReport, environment: Mapping[str, str]) -> AllocatorOptions:
    """Options of the allocator from the script's environment. Whether it caches at all is decided before the script
    begins."""
    return allocator_options.from_environment({**environment, allocator_options.NAMES[0]: report.allocator})
