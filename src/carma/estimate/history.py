"""Memory of earlier runs of the same command: same user, directory and words, and the same files and environment if
both are known. If only one number of the command is new, a line through the runs gives the memory (interpolation.py).

A run that ran out of memory is a lower bound: no answer is at or below it. If nothing else is known, the refusal
contains it, so that later estimators do not answer below it either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from msgspec.structs import replace

from carma.command_pattern import Number, numbers
from carma.core.model.units import show_mib
from carma.core.model.values import Demand, Estimate, NoEstimate
from carma.core.ports import Archive, EstimateRequest, PastRun
from carma.core.telemetry.booking_shrink import with_margin
from carma.estimate.combination import above
from carma.estimate.interpolation import Fit, MeasuredPoint, fit
from carma.trial.protocol import Context

NEAR_RUNS = 200  # runs of similar commands that are compared
SURVIVED_S = 60.0  # an unfinished run shorter than this may have ended before its memory peak
GROWS = ("batch", "bs", "size", "len", "seq")  # options with such a word in their name increase memory
ALMOST = 0.9  # least part of a smaller value's memory that a larger one needs, since libraries may choose otherwise


class History:
    name = "history"
    quick = True

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        uid, spec = request.owner.uid, request.spec
        runs = self._archive.past_runs(uid=uid, command=spec.command, directory=spec.directory)
        same = [run for run in runs if _same_files(run, request)]
        answer = _exact(same, request)
        if isinstance(answer, NoEstimate):
            others = self._archive.past_runs(
                uid=uid, command=spec.command, directory=spec.directory, near=True, limit=NEAR_RUNS
            )
            near = [run for run in others if run.command != spec.command and _same_files(run, request)]
            if near:
                answer = _near(near, request, answer)
            elif runs and not same:
                answer = _refuse("what the command runs, or its environment, has changed since it ran before")
        return _above_known(answer, _more_than_mib(same))


def _same_files(run: PastRun, request: EstimateRequest) -> bool:
    """A fingerprint that was not taken counts as equal."""
    return not run.fingerprint or not request.fingerprint or run.fingerprint == request.fingerprint


def _refuse(reason: str, more_than_mib: int | None = None) -> NoEstimate:
    return NoEstimate(source=History.name, reason=reason, more_than_mib=more_than_mib)


def _more_than_mib(runs: Iterable[PastRun]) -> int | None:
    return max((run.more_than_mib for run in runs if run.more_than_mib), default=None)


def _above_known(answer: Estimate | NoEstimate, more_than_mib: int | None) -> Estimate | NoEstimate:
    if isinstance(answer, Estimate):
        if more_than_mib is None:
            return answer
        return above(answer, more_than_mib, f"it ran out of memory before, and wanted {show_mib(more_than_mib)}")
    least = max(more_than_mib or 0, answer.more_than_mib or 0)
    return _refuse(f"{answer.reason}; it needs more than {show_mib(least)}", least) if least else answer


def _exact(runs: Sequence[PastRun], request: EstimateRequest) -> Estimate | NoEstimate:
    if not runs:
        return _refuse("this command has not run in this directory before")
    ended = [run for run in runs if run.more_than_mib is None]
    if not ended:
        return _refuse(f"{_times(len(runs))} ran out of memory")
    measured = [run for run in ended if run.peak_mib]
    if not measured:
        return _refuse(f"its memory was not seen in {_times(len(ended))}")
    usable = _usable(measured)
    if not usable:
        return _refuse(f"{_times(len(measured))} ended early (within {SURVIVED_S:g} s), which says too little")
    return _from_runs(usable, request)


def _usable(measured: Sequence[PastRun]) -> list[PastRun]:
    return [run for run in measured if run.succeeded] or [run for run in measured if run.runtime_s >= SURVIVED_S]


def _from_runs(usable: Sequence[PastRun], request: EstimateRequest) -> Estimate:
    warnings = [f"from {_times(len(usable))} that did not succeed; it may take more"] if not usable[0].succeeded else []
    alike, remarks = _alike(usable, request)
    if request.fingerprint and not any(run.fingerprint for run in alike):
        remarks.append("whether its files have changed since then is not known")
    peak = max(run.peak_mib or 0 for run in alike)
    return Estimate(
        footprint_mib=peak,
        upper_mib=with_margin(peak),
        source=History.name,
        demand=_demand(alike),
        runtime_s=_runtime_s(alike),
        alone_steps_per_s=_alone_steps_per_s(alike),
        gpu_model=alike[0].gpu_model,
        warnings=(*warnings, *remarks),
    )


def _alike(usable: Sequence[PastRun], request: EstimateRequest) -> tuple[list[PastRun], list[str]]:
    """The runs most like the request, by GPU model and number of GPUs; and how they differ from it."""
    remarks: list[str] = []
    candidates = [run for run in usable if run.fingerprint] or list(usable)
    models = {gpu.name for gpu in request.gpus}
    runs = [run for run in candidates if run.gpu_model in models]
    if not runs:
        runs = candidates
        remarks.append(
            f"measured on {', '.join(sorted({run.gpu_model for run in runs}))}, which this server does not have"
        )
    alike = [run for run in runs if run.gpus == request.spec.gpus]
    if not alike:
        alike = runs
        remarks.append(f"measured on another number of GPUs than {request.spec.gpus}")
    return alike, remarks


def _near(runs: Sequence[PastRun], request: EstimateRequest, exact: NoEstimate) -> Estimate | NoEstimate:
    """Estimate from runs that differ in the same single number."""
    wanted = numbers(request.spec.command)
    by_place = _by_place(runs, wanted)
    if not by_place:
        return _refuse(f"{exact.reason}; {_times(len(runs))} differ in more than one number")
    place, found = max(by_place.items(), key=lambda entry: len(entry[1]))
    name = wanted[place].name or f"word {wanted[place].place + 1}"
    value = wanted[place].value
    usable = _usable([run for run in found if run.peak_mib and run.more_than_mib is None])
    alike, remarks = _alike(usable, request) if usable else ([], [])
    points = [MeasuredPoint(numbers(run.command)[place].value, run.peak_mib or 0) for run in alike]
    fitted = fit(points, value)
    least = _least_mib(found, points, place, wanted[place])
    if isinstance(fitted, str):
        return _refuse(f"{exact.reason}; {_times(len(found))} with another {name}, but {fitted}", least)
    estimate = _from_line(fitted, name, value, remarks, alike[0].gpu_model)
    nearest = min(alike, key=lambda run: abs(numbers(run.command)[place].value - value))
    estimate = replace(estimate, demand=_demand([nearest]))
    return estimate if least is None else above(estimate, least, f"with less of {name} it wanted {show_mib(least)}")


def _by_place(runs: Sequence[PastRun], wanted: Sequence[Number]) -> dict[int, list[PastRun]]:
    """Runs that differ in a single number, by the index of that number."""
    found: dict[int, list[PastRun]] = {}
    for run in runs:
        theirs = numbers(run.command)
        if len(theirs) != len(wanted):  # a word that resembles a placeholder
            continue
        differ = [place for place, number in enumerate(wanted) if number.value != theirs[place].value]
        if len(differ) == 1:
            found.setdefault(differ[0], []).append(run)
    return found


def _least_mib(runs: Sequence[PastRun], points: Sequence[MeasuredPoint], place: int, wanted: Number) -> int | None:
    """A lower bound, if memory increases with that number."""
    if not any(word in wanted.name.lower() for word in GROWS):
        return None
    failed = [run.more_than_mib for run in runs if numbers(run.command)[place].value <= wanted.value]
    took = [round(ALMOST * point.mib) for point in points if point.value < wanted.value]
    return max([*(mib for mib in failed if mib), *took], default=None)


def _from_line(fitted: Fit, name: str, value: float, remarks: Sequence[str], gpu_model: str) -> Estimate:
    seen = " and ".join(f"{show_mib(point.mib)} at {point.value:g}" for point in fitted.used)
    how = "extrapolated from" if fitted.beyond else "interpolated between"
    return Estimate(
        footprint_mib=fitted.footprint_mib,
        upper_mib=fitted.upper_mib,
        source=History.name,
        gpu_model=gpu_model,
        warnings=(f"{name} {value:g} was not run before: {how} {seen}", *remarks),
    )


def _demand(runs: Sequence[PastRun]) -> Demand | None:
    """The demand alone: of the run with the median SM activity, preferably of runs that had their GPU to themselves."""
    known = [(run.collocated, run.alone.demand) for run in runs if run.alone is not None]
    known = [each for each in known if not each[0]] or known
    demands = sorted((demand for _, demand in known), key=lambda one: one.sm_active)
    return demands[len(demands) // 2] if demands else None


def _runtime_s(runs: Sequence[PastRun]) -> float | None:
    """The run time alone: the median of complete runs that had their GPU to themselves; without any, of the others' run
    times corrected by their slowdown."""
    whole = [run for run in runs if run.succeeded]
    alone = [run for run in whole if not run.collocated]
    return median(run.runtime_s * _pace(run) for run in alone or whole) if whole else None


def _alone_steps_per_s(runs: Sequence[PastRun]) -> float | None:
    """Optimizer steps per second alone, of the newest run that knows it: measured while it was alone and had settled,
    else the mean of a run that never had a neighbour."""
    known = [run for run in runs if run.progress is not None and run.gpu_model == runs[0].gpu_model]
    measured = (run.progress.alone_per_s for run in known if run.progress is not None)
    whole = (run.progress.per_s for run in known if run.progress is not None and not run.collocated)
    return next((rate for rate in (*measured, *whole) if rate is not None), None)


def _pace(run: PastRun) -> float:
    return run.alone.pace if run.alone is not None and run.collocated else 1.0


def _times(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs"


def make(context: Context) -> History:
    return History(context.archive)
