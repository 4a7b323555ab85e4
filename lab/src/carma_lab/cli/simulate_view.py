"""The output of `carma simulate`: figures of simulated runs, and with --fidelity a recorded run and its simulation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from carma.cli.output import Column, heading, print_facts, print_json, print_table
from carma.core.model.units import show_count, show_s
from carma.errors import Usage
from carma_lab.cli.progress_line import simulating
from carma_lab.reports.figure_list import LINES, Line, share, shown
from carma_lab.runs.figures import Figures
from carma_lab.runs.record import read, write
from carma_lab.simulator.fidelity import AIMS, Fidelity, Gap, compare_with_simulation, known_from
from gpumemnet.cli.output_file_option import STDOUT, say_written

HINT = "carma run-report --save FILE writes such a file."
WORST = 5  # tasks that are shown


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


HOW = {"given": "from another source", "alone": "ran alone", "inferred": "derived from this run"}


def compare(
    run: Path, solo: Path | None, out: str | None, *, noise: float, seed: int, typed: tuple[str, ...], as_json: bool
) -> None:
    """`typed`: the given options that cannot be combined with --fidelity."""
    if typed:
        raise Usage(
            f"{', '.join(typed)}: not with --fidelity; the recorded run has its own",
            "Options with --fidelity: --solo, --noise, --seed, --out and --json.",
        )
    known = None if solo is None else known_from(solo)
    recorded = read(run, HINT)
    with simulating(quiet=as_json or out == STDOUT) as follow:
        on_progress = None if follow is None else functools.partial(follow, run.name)
        found, simulated = compare_with_simulation(recorded, known, noise=noise, seed=seed, on_progress=on_progress)
    if out is not None:
        write(simulated, out)
    if out == STDOUT:
        return
    if as_json:
        print_json(found)
    else:
        show(run.name, found)
    say_written(out)


def show(name: str, found: Fidelity) -> None:
    about = found.about
    heading(f"{name}: {show_count(len(found.tasks), 'task')} under {about.policy} on {about.gpus} x {about.gpu}")
    columns = [Column(""), *(Column(title, right=True) for title in ("RECORDED", "SIMULATED", "ERROR", "AIM"))]
    print_table(columns, [*(_row(gap) for gap in found.figures), *_of_tasks(found)])
    click.echo()
    solo = [f"{show_count(count, 'task')} {HOW[how]}" for how, count in found.solo.items()]
    facts = [("solo times", "; ".join(solo)), *(("note", note) for note in found.notes)]
    print_facts(facts)
    click.echo()
    _worst(found)


def _row(gap: Gap) -> list[str]:
    line = next(line for line in LINES if line.field == gap.figure)
    if line.show is share:
        line = line._replace(show=_share)  # with a decimal place
    values = (shown(line, gap.real), shown(line, gap.simulated))
    return [line.label, *values, _percent(gap.error), "" if gap.aim is None else f"{100 * gap.aim:.0f} %"]


def _of_tasks(found: Fidelity) -> list[list[str]]:
    return [
        ["completion of a task, median", "", "", _share(found.task_median), f"{100 * AIMS['task_median']:.0f} %"],
        ["completion of a task, p90", "", "", _share(found.task_p90), ""],
        ["completion of a task, signed mean", "", "", _percent(found.task_signed), ""],
        ["speed of a task, mean error", "", "", "-" if found.speed_error is None else f"{found.speed_error:.3f}", ""],
    ]


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{round(100 * error, 1) + 0.0:+.1f} %"


def _worst(found: Fidelity) -> None:
    ordered = sorted(found.tasks, key=lambda task: -abs(task.error))[:WORST]
    columns = [
        Column("LARGEST ERRORS", flexible=True),
        *(Column(title, right=True) for title in ("RECORDED", "SIMULATED", "ERROR", "ALONE", "SPEED", "REAL SPEED")),
        Column("SOLO TIME"),
    ]
    rows = [
        [
            f"{task.task} {task.name}",
            show_s(task.real_s),
            show_s(task.simulated_s),
            _percent(task.error),
            show_s(task.solo_s),
            f"{task.rate:.2f}",
            "-" if task.seen is None else f"{task.seen:.2f}",
            task.solo,
        ]
        for task in ordered
    ]
    print_table(columns, rows)


SHOWN = (
    *("makespan_s", "wait_mean_s", "wait_p95_s", "completion_mean_s", "completion_p95_s", "slowdown_mean"),
    *("slowdown_p95", "ooms", "innocent_ooms", "sm_active_mean", "energy_j"),
)
FAILED = Line("failed", "FAILED TASKS", str)  # the first line if any task failed


def show_figures(trace: str, on: str, found: Mapping[str, Figures], *, as_json: bool) -> None:
    """`on` names the cards; a short name such as `--gpu a100` does not."""
    if as_json:
        values = [{"trace": trace, "policy": name, **msgspec.to_builtins(one)} for name, one in found.items()]
        print_json(values[0] if len(values) == 1 else values)
        return
    heading(f"{trace}: {show_count(max(one.tasks for one in found.values()), 'task')} on {on}")
    columns = [Column(""), *(Column(name, right=True) for name in found)]
    lines = [line for line in LINES if line.field in SHOWN]
    if any(figures.failed for figures in found.values()):
        lines.insert(0, FAILED)
    rows = [[line.label, *(shown(line, getattr(figures, line.field)) for figures in found.values())] for line in lines]
    print_table(columns, rows)
