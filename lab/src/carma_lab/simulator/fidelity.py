"""Fidelity of the simulator: a recorded run is simulated, and both runs are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from carma import __version__
from carma.core.model.units import show_count
from carma.core.model.values import Record
from carma.errors import Usage
from carma.traces.table import read_table
from carma_lab.runs.figures import Figures, TaskRun, figures, mean, quantile
from carma_lab.runs.record import About, Run, read
from carma_lab.simulator.fidelity_replay import Replay
from carma_lab.simulator.fidelity_solo import ALONE, How, Known, Solo
from carma_lab.simulator.simulation import OnProgress

FIGURES = (
    "makespan_s", "completion_mean_s", "completion_p95_s", "wait_mean_s", "run_mean_s", "ooms", "sm_active_mean",
    "sm_occupancy_mean", "dram_active_mean", "memory_mib_mean", "energy_j",
)  # fmt: skip
AIMS = {"makespan_s": 0.05, "completion_mean_s": 0.05, "task_median": 0.10}
MEANS = ("sm_active_mean", "sm_occupancy_mean", "dram_active_mean", "memory_mib_mean")
SPREAD = 1.10  # runs of one name whose durations differ by more than this factor are not used


class Gap(Record, frozen=True, kw_only=True):
    """One figure. `error`: simulated / real - 1; None for counts and if the real value is 0."""

    figure: str
    real: float | None
    simulated: float | None
    error: float | None
    aim: float | None = None


class TaskGap(Record, frozen=True, kw_only=True):
    task: int
    name: str
    real_s: float  # completion
    simulated_s: float
    error: float
    solo_s: float
    solo: How
    rate: float  # mean speed in the recorded run, by the sharing model
    seen: float | None = None  # mean speed by its real duration; None: its duration alone is not given


class Fidelity(Record, frozen=True, kw_only=True):
    about: About
    figures: tuple[Gap, ...]
    task_median: float  # of the absolute errors of the tasks' completion
    task_p90: float
    task_signed: float  # mean of the signed errors
    speed_error: float | None  # mean absolute error of the sharing model; None: no solo time is given
    solo: dict[How, int]  # number of tasks by the source of their solo times
    met: bool | None  # all aims
    tasks: tuple[TaskGap, ...]
    notes: tuple[str, ...]
    version: str = __version__


def fidelity(run: Run, known: Mapping[str, Known] | None = None) -> Fidelity:
    return compare_with_simulation(run, known)[0]


def compare_with_simulation(
    run: Run,
    known: Mapping[str, Known] | None = None,
    *,
    noise: float = 0.0,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> tuple[Fidelity, Run]:
    """The comparison, and the simulated run."""
    replay = Replay(run, known, noise=noise, seed=seed)
    made = replay.simulation.run(on_progress)
    return _compared(run, replay, made), replay.written(run.about, made)


def _compared(run: Run, replay: Replay, made: Figures) -> Fidelity:
    simulated_runs = sorted(replay.simulation.runs, key=lambda task: task.task)
    tasks = tuple(map(_task_gap, replay.tasks, simulated_runs, replay.solos))
    errors = [abs(task.error) for task in tasks]
    speeds = [abs(task.rate - task.seen) for task in tasks if task.seen is not None]
    real, simulated = _of_the_same(run, replay, made, simulated_runs)
    gaps = tuple(_gap(name, real, simulated, replay.power_known) for name in FIGURES)
    median = quantile(errors, 0.5)
    return Fidelity(
        about=run.about,
        figures=gaps,
        task_median=median,
        task_p90=quantile(errors, 0.9),
        task_signed=sum(task.error for task in tasks) / len(tasks),
        speed_error=mean(speeds) if speeds else None,
        solo=dict(Counter(task.solo for task in tasks)),
        met=median <= AIMS["task_median"]
        and all(gap.error is not None and abs(gap.error) <= gap.aim for gap in gaps if gap.aim is not None),
        tasks=tasks,
        notes=tuple(_notes(run, replay, tasks)),
    )


def _of_the_same(run: Run, replay: Replay, made: Figures, simulated_runs: Sequence[TaskRun]) -> tuple[Figures, Figures]:
    """Both sides over the same tasks: the simulated ones; run times over those that succeeded on both sides."""
    pairs = zip(replay.tasks, simulated_runs, strict=True)
    good = [pair for pair in pairs if all(one.outcome == "succeeded" for one in pair)]
    real = run.figures if not replay.left_out else _without_left_out(run, replay)
    return (
        replace(real, run_mean_s=mean([was.ran_s for was, _ in good])),
        replace(made, run_mean_s=mean([now.ran_s for _, now in good])),
    )


def _without_left_out(run: Run, replay: Replay) -> Figures:
    """Figures of the simulated tasks. Tasks that are left out used no GPU, so means over the shorter period are higher
    in proportion, and the energy is reduced by that of the idle GPUs."""
    old = run.figures
    span_s = max(task.ended_s for task in replay.tasks) - min(task.arrival_s for task in replay.tasks)
    longer = old.makespan_s / span_s if span_s > 0.0 else 1.0
    means = {name: None if (value := getattr(old, name)) is None else value * longer for name in MEANS}
    energy_j, more_s = old.energy_j, old.makespan_s - span_s
    if energy_j is not None and more_s > 0.0:
        idle_w = [gpu.idle_w for gpu in replay.server.gpus]
        known = [watts for watts in idle_w if watts is not None]
        energy_j = energy_j - sum(known) * more_s if len(known) == len(idle_w) else None
    power_w = None if energy_j is None or span_s <= 0.0 else energy_j / span_s / len(replay.server.gpus)
    return figures(replay.tasks, took_s=old.took_s, energy_j=energy_j, power_w_mean=power_w, **means)


def _gap(name: str, real: Figures, simulated: Figures, power_known: bool) -> Gap:
    was: float | None = getattr(real, name)
    now: float | None = getattr(simulated, name)
    if name == "energy_j" and not power_known:
        now = None
    comparable = name != "ooms"
    return Gap(
        figure=name,
        real=was,
        simulated=now,
        error=now / was - 1.0 if comparable and was and now is not None else None,
        aim=AIMS.get(name),
    )


def _task_gap(real: TaskRun, simulated: TaskRun, solo: Solo) -> TaskGap:
    was, now = (max(1e-9, one.ended_s - one.arrival_s) for one in (real, simulated))
    return TaskGap(
        task=real.task,
        name=real.name,
        real_s=was,
        simulated_s=now,
        error=now / was - 1.0,
        solo_s=solo.seconds,
        solo=solo.how,
        rate=solo.rate,
        seen=_real_speed(real, solo),
    )


def _real_speed(real: TaskRun, solo: Solo) -> float | None:
    """Speed of the real task: its work divided by the time since its first use of a GPU."""
    last = real.attempts[-1]
    took_s = last.ended_at - last.first_use
    known = solo.how == "given" and real.outcome == "succeeded" and took_s > 0.0
    return (solo.seconds - solo.start_s) / took_s if known else None


def _notes(run: Run, replay: Replay, tasks: Sequence[TaskGap]) -> list[str]:
    notes = []
    inferred = sum(task.solo == "inferred" for task in tasks)
    if run.about.simulated:
        notes.append("this run was simulated itself: only the values derived from its file are tested")
    if inferred:
        notes.append(
            f"solo times of {show_count(inferred, 'task')} of {len(tasks)} were derived from this run with the sharing "
            "model, so part of the agreement is circular; --solo FILE takes them from another source"
        )
    alone = sum(task.solo == "alone" for task in tasks)
    if alone:
        notes.append(
            f"{show_count(alone, 'task')} of {len(tasks)} ran alone, so their solo times are those of this run"
        )
    if replay.left_out:
        notes.append(
            f"{show_count(replay.left_out, 'task')} that never ran {'is' if replay.left_out == 1 else 'are'} left out"
        )
    if replay.server.unfinished:
        are = "is" if replay.server.unfinished == 1 else "are"
        count = show_count(replay.server.unfinished, "task")
        notes.append(f"{count} had not ended when the run was saved and {are} not included")
    if run.about.version != __version__:
        notes.append(
            f"the run was recorded with version {run.about.version}, this is {__version__}: defaults may differ"
        )
    return notes


# Solo times from another source.


def known_from(path: Path) -> dict[str, Known]:
    """Solo times and demands by name, from a table of tasks or from the tasks of another run that ran alone."""
    if path.suffix != ".json":
        return {name: Known(seconds=row.seconds, demand=row.demand) for name, row in read_table(path).tasks.items()}
    run = read(path)
    replay = Replay(run)
    found: dict[str, list[Solo]] = {}
    for task, solo in zip(replay.tasks, replay.solos, strict=True):
        if task.outcome == "succeeded" and solo.rate >= ALONE and solo.seconds > solo.start_s:
            found.setdefault(task.name, []).append(solo)
    known: dict[str, Known] = {}
    for name, several in found.items():
        several.sort(key=lambda one: one.seconds)
        middle = several[len(several) // 2]
        if several[-1].seconds <= SPREAD * several[0].seconds:
            known[name] = Known(seconds=middle.seconds, demand=middle.demand)
    if not known:
        raise Usage(
            f"no task of {path} ran alone, so it contains no solo times",
            "Record the same tasks with --policy exclusive, or give a table of tasks.",
        )
    return known
