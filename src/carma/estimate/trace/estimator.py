"""`trace`: the main estimator. A trial run with the GPU made up, its events replayed through the allocator's model, and
what lies outside added: workspaces, the context.

It refuses rather than guess: no figure without two optimizer steps, none where the allocator is not the one it models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from carma.core.model import Estimate, Gpu, NoEstimate
from carma.core.ports import EstimateRequest
from carma.core.units import show_mib
from carma.estimate.cards import card_for
from carma.estimate.protocol import Context, Trial, Trials
from carma.estimate.trace import allocator_options, constants
from carma.estimate.trace.blas_workspaces import blas_rules
from carma.estimate.trace.bound import Bound, Features, bound_for
from carma.estimate.trace.outside import outside_bytes, uses_cudnn
from carma.estimate.trace.replay import Replayed, replay
from carma.estimate.trace.report import Report, read_events
from carma.estimate.trace.workspaces import CardWorkspaces

MIB = 1 << 20
LEAST_STEPS = 2  # the first one makes the optimizer's state, the second one meets it
HOPPER = (9, 0)  # taken for a card that nobody knows
BY_AGE = (2, 14)  # torch's rule for free blocks of one size, from this version on (its pull request 183591)
MANY_READS = 50  # made-up values per step, from which on the script's own way may have been another


class Trace:
    name = "trace"

    def __init__(self, trials: Trials, level: float, folders: Sequence[Path]) -> None:
        self._trials, self._level, self._folders = trials, level, tuple(folders)

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        trial = self._trials.run(request)
        if isinstance(trial, NoEstimate):
            return NoEstimate(source=self.name, reason=trial.reason)
        if not request.gpus:
            return self._refuse("there is no GPU to estimate for")
        reason = why_not(trial.report)
        if reason is not None:
            return self._refuse(reason)
        return self._figure(trial, request)

    def _figure(self, trial: Trial, request: EstimateRequest) -> Estimate | NoEstimate:
        report, gpu = trial.report, request.gpus[0]
        options = _allocator(report, request.spec.environment)
        if options.not_modelled:
            return self._refuse(options.not_modelled)
        found = constants.load(gpu.name, report.torch, self._folders)
        measured = found.constants if found is not None else None
        events = list(read_events(trial.events))
        rules = blas_rules(measured, _capability(gpu), request.spec.environment)
        workspaces = CardWorkspaces.of(found.file if found is not None else None, rules)
        replayed = replay(
            events,
            report.calls,
            options,
            workspaces,
            marks=report.marks,
            device_bytes=gpu.memory_mib * MIB,
            by_age=_version(report.torch) >= BY_AGE,
        )
        if replayed.unmatched:
            return self._refuse(f"the trial's events contradict one another in {replayed.unmatched} places")
        outside = outside_bytes(measured, report, events)
        bound = bound_for(_features(report, replayed, outside), self._level)
        warnings = (*options.warnings, *report.warnings, *_doubts(report, replayed), *bound.warnings)
        if found is not None:
            warnings = (*warnings, *found.warnings)
        return _answer(report, replayed, outside, bound, gpu, warnings)

    def _refuse(self, reason: str) -> NoEstimate:
        return NoEstimate(source=self.name, reason=reason)


def why_not(report: Report) -> str | None:
    """Why a report is worth no figure, as a sentence."""
    if report.stop != "steps":
        return report.reason or "the trial run did not get as far as its optimizer steps"
    if report.steps < LEAST_STEPS:
        return f"only {report.steps} optimizer step was seen, and memory settles in the second"
    if not report.parameters_bytes:
        return "what the optimizer steps is not on a GPU"
    return None


def _allocator(report: Report, environment: Mapping[str, str]) -> allocator_options.AllocatorOptions:
    caching = environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING") is None
    return allocator_options.parse(report.allocator, caching=caching)


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _capability(gpu: Gpu) -> tuple[int, int]:
    card = card_for(gpu.name)
    return card.capability if card is not None else HOPPER


def _features(report: Report, replayed: Replayed, outside: int) -> Features:
    return Features(
        footprint_bytes=replayed.peaks.reserved_bytes + outside,
        reserved_bytes=replayed.peaks.reserved_bytes,
        allocated_bytes=replayed.peaks.allocated_bytes,
        scratch_bytes=replayed.scratch_bytes,
        cudnn=uses_cudnn(report),
        convolutions=tuple(call for call in report.calls if call.op.startswith("conv")),
        recurrent=any(call.op.startswith("rnn") for call in report.calls),
        flags=report.flags,
        grows=replayed.grows,
    )


def _doubts(report: Report, replayed: Replayed) -> list[str]:
    doubts: list[str] = []
    if replayed.grows:
        doubts.append("its memory still grew in the last step of the trial; it may take more")
    if report.made_up_reads > MANY_READS * max(1, report.steps):
        doubts.append(f"the script read {report.made_up_reads} values from the GPU, which were made up")
    if "guessed_sizes" in report.flags:
        doubts.append("some sizes depend on values that only a GPU knows; the largest possible were taken")
    if "benchmark" in report.flags:
        doubts.append("cudnn.benchmark is on: what its first step takes depends on how empty the card is")
    if report.unknown_ops:
        doubts.append(f"operators that a trial does not know were passed over: {', '.join(report.unknown_ops[:5])}")
    return doubts


def _answer(
    report: Report, replayed: Replayed, outside: int, bound: Bound, gpu: Gpu, warnings: tuple[str, ...]
) -> Estimate:
    footprint = _mib(bound.point_bytes)
    upper = max(footprint, _mib(bound.upper_bytes))
    if footprint > gpu.memory_mib:
        warnings = (f"it does not fit: {gpu.name} has {show_mib(gpu.memory_mib)}", *warnings)
    return Estimate(
        footprint_mib=footprint,
        upper_mib=upper,
        source=Trace.name,
        level=bound.level,
        allocated_mib=_mib(replayed.peaks.allocated_bytes),
        reserved_mib=_mib(replayed.peaks.reserved_bytes),
        gpu_model=gpu.name,
        steps_seen=report.steps,
        parts_mib=_parts(report, replayed, outside),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _parts(report: Report, replayed: Replayed, outside: int) -> dict[str, int]:
    """What the footprint is made of; they add up to it but for rounding."""
    peaks = replayed.peaks
    known = report.parameters_bytes + report.gradients_bytes + report.optimizer_bytes + replayed.scratch_bytes
    return {
        "weights": _mib(report.parameters_bytes),
        "gradients": _mib(report.gradients_bytes),
        "optimizer_state": _mib(report.optimizer_bytes),
        "workspaces": _mib(replayed.scratch_bytes),
        "activations": max(0, _mib(peaks.allocated_bytes - known)),
        "fragmentation": _mib(peaks.reserved_bytes - peaks.allocated_bytes),
        "context": _mib(outside),
    }


def _mib(size: float) -> int:
    return round(size / MIB)


def make(context: Context) -> Trace:
    return Trace(context.trials, context.rules.memory.level, constants.folders(os.environ))
