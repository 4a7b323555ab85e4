"""A trial's events as a footprint: replayed, with what lies outside added, and how much hangs on workspaces.

Whether a workspace fits into a hole of the cache or needs a new segment is decided by bytes, and cuDNN's figures are
partly learnt. So a trial with convolutions is replayed with workspaces a little larger and smaller, too: the larger of
the first two footprints is taken, and how far the three lie apart says how sure it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from carma.core.model.values import Gpu, Record
from carma.core.ports import EstimateRequest
from carma.trial.cards import card_for
from carma.trial.protocol import Trial
from carma.trial.replay import allocator_options
from carma.trial.replay import card_constants as constants
from carma.trial.replay.bound import group_of
from carma.trial.replay.conv_workspaces import ConvWorkspaces
from carma.trial.replay.outside_tensors import outside_bytes
from carma.trial.replay.replay import Replayed, Scratch, Workspaces, replay
from carma.trial.replay.workspaces import CardWorkspaces, blas_rules
from carma.trial.report import Call, Event, Report, read_events

MIB = 1 << 20
LARGER, SMALLER = 1.06, 0.96  # what workspaces are also tried with
HOPPER = (9, 0)  # taken for a card that nobody knows
BY_AGE = (2, 14)  # torch's rule for free blocks of one size, from this version on (its pull request 183591)


class Figure(Record, frozen=True, kw_only=True):
    replayed: Replayed
    outside_bytes: int
    footprint_bytes: int
    spread: float  # log of the largest over the smallest footprint
    group: str
    warnings: tuple[str, ...] = ()


class NotFigured(Exception):
    """Why there is no figure, as a sentence."""


def figure(
    trial: Trial, request: EstimateRequest, folders: Sequence[Path], convolutions: ConvWorkspaces | None = None
) -> Figure:
    """For the first of the request's GPUs. `convolutions` stands in for the card's own model of cuDNN."""
    report, gpu, environment = trial.report, request.gpus[0], request.spec.environment
    options = _allocator(report, environment)
    if options.not_modelled:
        raise NotFigured(options.not_modelled)
    found = constants.load(gpu.name, report.torch, folders)
    measured = found.constants if found is not None else None
    rules = blas_rules(measured, _capability(gpu), environment)
    workspaces = (
        CardWorkspaces(convolutions, rules)
        if convolutions is not None
        else CardWorkspaces.of(found.file if found is not None else None, rules)
    )
    events = list(read_events(trial.events))
    replays = _replays(report, events, options, workspaces, gpu)
    if replays[0].unmatched:
        raise NotFigured(f"the trial's events contradict one another in {replays[0].unmatched} places")
    outside = outside_bytes(measured, report, events)
    reserved = [each.peaks.reserved_bytes + outside for each in replays]
    return Figure(
        replayed=replays[0],
        outside_bytes=outside,
        footprint_bytes=max(reserved[:2]),
        spread=math.log(max(reserved) / min(reserved)),
        group=group_of(report),
        warnings=(*options.warnings, *(found.warnings if found is not None else ())),
    )


def _replays(
    report: Report,
    events: Sequence[Event],
    options: allocator_options.AllocatorOptions,
    workspaces: CardWorkspaces,
    gpu: Gpu,
) -> list[Replayed]:
    factors = (1.0, LARGER, SMALLER) if any(call.op.startswith("conv") for call in report.calls) else (1.0,)
    return [
        replay(
            events,
            report.calls,
            options,
            _scaled(workspaces, factor),
            marks=report.marks,
            device_bytes=gpu.memory_mib * MIB,
            by_age=_version(report.torch) >= BY_AGE,
        )
        for factor in factors
    ]


def _scaled(workspaces: Workspaces, factor: float) -> Workspaces:
    def scaled(call: Call, thread: int, stream: int) -> Scratch:
        scratch = workspaces(call, thread, stream)
        if factor == 1.0 or not scratch.transient_bytes:
            return scratch
        sizes = tuple(int(size * factor) for size in scratch.transient_bytes)
        return Scratch(transient_bytes=sizes, trial_bytes=scratch.trial_bytes, kept=scratch.kept)

    return scaled


def _allocator(report: Report, environment: Mapping[str, str]) -> allocator_options.AllocatorOptions:
    """As the script's own environment had it; whether it caches at all is decided before the script begins."""
    return allocator_options.from_environment({**environment, allocator_options.NAMES[0]: report.allocator})


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _capability(gpu: Gpu) -> tuple[int, int]:
    card = card_for(gpu.name)
    return card.capability if card is not None else HOPPER
