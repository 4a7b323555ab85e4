"""What the same command took before: same user, same directory, same words, nothing dropped.

A changed argument (a batch size) is another command: a figure that is almost right is worse than a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from carma.core.model import Estimate, NoEstimate
from carma.core.ports import Archive, EstimateRequest, PastRun
from carma.estimate.protocol import Context

MARGIN_SHARE = 0.05  # above the most ever seen: runs differ a little (cuDNN's choice of algorithm, fragmentation)
MARGIN_MIB = 256
SURVIVED_S = 60.0  # an unfinished run shorter than this may have ended before its memory had grown


class History:
    name = "history"

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        spec = request.spec
        runs = self._archive.past_runs(uid=request.owner.uid, command=spec.command, directory=spec.directory)
        if not runs:
            return self._refuse("this command has not run in this directory before")
        measured = [run for run in runs if run.peak_mib]
        if not measured:
            return self._refuse(f"its memory was not seen in {_times(len(runs))}")
        telling = [run for run in measured if run.succeeded] or [run for run in measured if run.runtime_s >= SURVIVED_S]
        if not telling:
            return self._refuse(f"{_times(len(measured))} ended early (within {SURVIVED_S:g} s), which says too little")
        return _from_runs(telling, request)

    def _refuse(self, reason: str) -> NoEstimate:
        return NoEstimate(source=self.name, reason=reason)


def _from_runs(telling: Sequence[PastRun], request: EstimateRequest) -> Estimate:
    warnings: list[str] = []
    if not telling[0].succeeded:
        warnings.append(f"from {_times(len(telling))} that did not succeed; it may take more")
    models = {gpu.name for gpu in request.gpus}
    runs = [run for run in telling if run.gpu_model in models]
    if not runs:
        runs = list(telling)
        warnings.append(f"measured on {', '.join(sorted({run.gpu_model for run in runs}))}, which this server has not")
    alike = [run for run in runs if run.gpus == request.spec.gpus]
    if not alike:
        alike = runs
        warnings.append(f"measured on another number of GPUs than {request.spec.gpus}")
    peak = max(run.peak_mib or 0 for run in alike)
    return Estimate(
        footprint_mib=peak,
        upper_mib=peak + max(MARGIN_MIB, round(peak * MARGIN_SHARE)),
        source=History.name,
        runtime_s=_runtime_s(alike),
        gpu_model=alike[0].gpu_model,
        warnings=tuple(warnings),
    )


def _runtime_s(runs: Sequence[PastRun]) -> float | None:
    """The median of whole runs; of those that had their GPU to themselves, where there are any."""
    whole = [run for run in runs if run.succeeded]
    alone = [run for run in whole if not run.collocated]
    return median(run.runtime_s for run in alone or whole) if whole else None


def _times(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs"


def make(context: Context) -> History:
    return History(context.archive)
