"""`trace`: the main estimator. It replays the events of a trial run through a model of the allocator.

Memory outside of the allocator (workspaces, the context) is added. Demand is predicted from the model's layers. It
refuses without two optimizer steps, and for an allocator that it does not model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from carma.core.model.units import show_mib
from carma.core.model.values import Demand, Estimate, Gpu, NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.protocol import Context, Trial, Trials
from carma.trial.replay import card_constants as constants
from carma.trial.replay.bound import FootprintBound, bound_for
from carma.trial.replay.footprint import MIB, NoFootprint, TrialFootprint, figure
from carma.trial.replay.library_memory import nccl_bytes, with_attention
from carma.trial.report import TrialReport

LEAST_STEPS = 2  # the first allocates the optimizer's state, the second runs with it
MANY_READS = 50  # invented values per step, above which the script may have taken another branch


class TraceEstimator:
    name = "trace"
    quick = False

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
        try:
            found = figure(trial, request, self._folders)
        except NoFootprint as why:
            return self._refuse(str(why))
        bound = bound_for(found.footprint_bytes, found.spread, found.group, self._level)
        return _answer(trial, found, bound, request.gpus[0])

    def _refuse(self, reason: str) -> NoEstimate:
        return NoEstimate(source=self.name, reason=reason)


def why_not(report: TrialReport) -> str | None:
    """A sentence that says why a report gives no figure; None if it gives one."""
    if report.stop != "steps":
        return report.reason or "the trial run did not get as far as its optimizer steps"
    if report.steps < LEAST_STEPS:
        return f"the script took only {report.steps} optimizer step, and memory is stable after the second"
    if not report.parameters_bytes:
        return "the parameters of the optimizer are not on a GPU"
    return None


def _doubts(report: TrialReport, found: TrialFootprint) -> list[str]:
    doubts: list[str] = []
    if found.replayed.grows:
        doubts.append("memory still grew in the last step of the trial run; the task may need more")
    if report.made_up_reads > MANY_READS * max(1, report.steps):
        doubts.append(f"the script read {report.made_up_reads} values from the GPU, which were invented")
    if found.replayed.over_limit:
        doubts.append(
            "the script needs more memory than its own limit (the memory fraction of PyTorch): the figure is what it "
            "held until then, and the task will run out of memory"
        )
    if found.group == "guessed":
        doubts.append("some sizes depend on values that only a GPU computes; the largest possible sizes were used")
    if found.group == "benchmark":
        doubts.append("cudnn.benchmark is on: memory in the first step depends on the free memory of the GPU")
    if nccl := nccl_bytes(report):
        doubts.append(f"NCCL was not measured: {_mib(nccl)} MiB are added for it, as reported on an A100")
    return doubts


def _answer(trial: Trial, found: TrialFootprint, bound: FootprintBound, gpu: Gpu) -> Estimate:
    report, peaks = trial.report, found.replayed.peaks
    warnings = [*_doubts(report, found), *report.warnings, *bound.warnings, *found.warnings]
    footprint = _mib(found.footprint_bytes)
    demand = _demand(trial, gpu)
    if footprint > gpu.memory_mib:
        warnings.insert(0, f"it does not fit: {gpu.name} has {show_mib(gpu.memory_mib)}")
    return Estimate(
        footprint_mib=footprint,
        upper_mib=max(footprint, _mib(bound.upper_bytes)),
        source=TraceEstimator.name,
        level=bound.level,
        allocated_mib=_mib(peaks.allocated_bytes),
        reserved_mib=_mib(found.footprint_bytes - found.outside_bytes),
        demand=demand,
        demand_predicted=demand is not None,
        gpu_model=gpu.name,
        steps_seen=report.steps,
        parts_mib=_parts(report, found),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _demand(trial: Trial, gpu: Gpu) -> Demand | None:
    from carma.trial.demand.prediction import demand_of  # imports numpy

    described = trial.report.described
    return None if described is None else demand_of(with_attention(described, trial), gpu.name)


def _parts(report: TrialReport, found: TrialFootprint) -> dict[str, int]:
    """The parts of the footprint; their sum is the footprint except for rounding."""
    replayed = found.replayed
    allocated = replayed.peaks.allocated_bytes
    known = report.parameters_bytes + report.gradients_bytes + report.optimizer_bytes + replayed.scratch_bytes
    nccl = nccl_bytes(report)
    parts = {
        "weights": _mib(report.parameters_bytes),
        "gradients": _mib(report.gradients_bytes),
        "optimizer_state": _mib(report.optimizer_bytes),
        "workspaces": _mib(replayed.scratch_bytes),
        "activations": max(0, _mib(allocated - known)),
        "fragmentation": _mib(found.footprint_bytes - found.outside_bytes - allocated),
        "context": _mib(found.outside_bytes - nccl),
    }
    return {**parts, "nccl": _mib(nccl)} if nccl else parts


def _mib(size: float) -> int:
    return round(size / MIB)


def make(context: Context) -> TraceEstimator:
    return TraceEstimator(context.trials, context.rules.memory.level, constants.folders(os.environ))
