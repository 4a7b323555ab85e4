"""`carma report`: what the server did over a span, by user and by GPU; or a run that was written down."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.outfile import (
    STDOUT,
    check_page,
    check_pictures,
    check_run_file,
    file_flag,
    folder_flag,
    force_flag,
    say_written,
)
from carma.cli.since import since_at, since_flag
from carma.cli.verb import json_flag, verb
from carma.cli.wording import gpu_hours, many, percent
from carma.wire.report import GpuWork, Report, UserWork, Work

if TYPE_CHECKING:
    from carma.sim.record import Run

EXAMPLES = """
carma report                 the server's last 24 hours
carma report --since 7d      the last week
carma report --json          for programs: seconds and joules
carma simulate --trace t1 --policy magm --out run.json && carma report run.json
carma report run.json --out pictures --html run.html
carma report --since 7d --save week.json    the server's tasks as such a run
"""


@verb("report", examples=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path), required=False, metavar="[RUN]")
@since_flag("From: 24h (default), 7d, today, 2026-01-31.")
@file_flag("--save", "Write the server's tasks as a run.")
@click.option("--trace", metavar="NAME", help="With --save: run times alone are this trace's, by task name.")
@folder_flag("Draw the run there, as PNG and SVG.")
@file_flag("--html", "Write one page with all of it.")
@force_flag
@json_flag
def command(
    run: Path | None,
    since: str | None,
    save: str | None,
    trace: str | None,
    out: Path | None,
    html: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """What this server did: tasks, waiting, GPU time and energy, by user and by GPU.

    The span begins on a full hour. Attempts that reach beyond it count with the part that lies within. HELD and
    SHARED are the share of the watched time with a task, and with two or more, on the GPU. Energy is that of the
    GPU; IDLE of it is what the GPU takes with nobody on it, TASKS what is above that and was given to tasks.

    With RUN, a file of carma simulate --out or of --save: the figures of that run, and how they are spread. --out
    and --html work for the server's tasks, too. docs/reports.md says how each figure is computed.
    """
    _check(out, html, force, as_json)
    if run is not None:
        if since is not None or save is not None or trace is not None:
            raise click.UsageError("--since, --save and --trace are for the server's tasks, not for a run's file")
        from carma.sim.record import read

        return _run(read(run), out, html, as_json)
    if save is not None:
        check_run_file(save, force, simulated=False)
    if save is not None or out is not None or html is not None:
        _run(_of_server(since, trace, save), out, html, as_json)
        return say_written(save)
    if trace is not None:
        raise click.UsageError("--trace goes with --save, --out or --html")
    return _server(since, as_json)


def _check(out: Path | None, html: str | None, force: bool, as_json: bool) -> None:
    check_page(html, force, as_json)
    if out is not None:
        from carma.report.drawing import files_of
        from carma.report.pictures import NAMES

        check_pictures(out, files_of(NAMES), force)


def _of_server(since: str | None, trace: str | None, save: str | None) -> Run:
    from carma.cli.connect import connect
    from carma.report.real import recorded
    from carma.sim.record import write
    from carma.traces import find

    known = None if trace is None else find(trace)
    with connect() as client:
        made = recorded(client, since_at(client, since), known)
    if save is not None:
        write(made, save)
    return made


def _run(run: Run, out: Path | None, html: str | None, as_json: bool) -> None:
    from carma.cli.output import print_json
    from carma.report.summary import summary

    told = summary(run)
    written = []
    if out is not None:
        from carma.report.pictures import draw

        written += draw(run, out)
    if html is not None:
        from carma.report.page import write

        written.append(write(run, told, html))
    if as_json:
        print_json(told)
    elif html != STDOUT:
        from carma.cli.report_run import show

        show(told, run.course)
    for path in written:
        say_written(str(path))


def _server(since: str | None, as_json: bool) -> None:
    from carma.cli.connect import connect

    with connect() as client:
        asked = since_at(client, since)
        report = client.report(since=asked)
    if as_json:
        from carma.cli.output import print_json

        return print_json(report)
    return _page(report, asked)


def _page(report: Report, asked: float | None) -> None:
    from carma.cli.output import heading, moment, print_facts
    from carma.core.units import show_s

    total = report.total
    widened = "" if asked is None or report.since >= asked else ", begun at the full hour"
    heading(f"from {moment(report.since)} until now ({show_s(report.until - report.since)}{widened})")
    print_facts(
        [
            ("tasks", _tasks(total)),
            ("ran", f"{gpu_hours(total.gpu_s)} in {many(total.attempts, 'attempt')}" if total.attempts else ""),
            ("waited", _waited(total)),
            ("energy", _energy(report)),
        ]
    )
    if report.users:
        print()
        _users(report.users)
    if report.gpus:
        print()
        _gpus(report.gpus)
    if report.notes:
        print()
        print_facts([("note", note) for note in report.notes])


def _tasks(work: Work) -> str:
    """`12 ended: 9 succeeded, 3 out of memory; 2 run`."""
    kinds = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in work.ended.items())
    ended = sum(work.ended.values())
    parts = [f"{ended:,} ended: {kinds}" if ended else "none ended", f"{work.running:,} run" if work.running else ""]
    return "; ".join(part for part in parts if part)


def _waited(work: Work) -> str:
    from carma.core.units import show_s

    if not work.started:
        return ""
    mean = show_s(work.waited_s / work.started)
    return f"{mean} on average before {many(work.started, 'first start')}, {show_s(work.longest_wait_s)} at most"


def _energy(report: Report) -> str:
    """All of it, and what became of it; the parts add up."""
    from carma.core.units import show_j

    known = [gpu for gpu in report.gpus if gpu.energy_j is not None]
    if not known:
        return f"{show_j(report.total.energy_j)} of tasks; the GPUs' own is not known" if report.total.attempts else ""
    whole_j = sum(gpu.energy_j or 0.0 for gpu in known)
    idle_j, tasks_j = sum(gpu.idle_j for gpu in known), sum(gpu.tasks_j for gpu in known)
    parts = [f"{show_j(idle_j)} idle", f"{show_j(tasks_j)} tasks"]
    if (other_j := whole_j - idle_j - tasks_j) > max(1.0, whole_j * 0.005):
        parts.append(f"{show_j(other_j)} other")
    return f"{show_j(whole_j)}: {', '.join(parts)}"


def _users(users: tuple[UserWork, ...]) -> None:
    from carma.cli.output import Column, print_table
    from carma.core.units import show_j, show_s

    columns = [
        Column("USER", flexible=True, most=16),
        *(Column(title, right=True) for title in ("ENDED", "WELL", "RUN", "GPU TIME", "WAITED", "ENERGY")),
    ]
    rows = [
        [
            each.user,
            f"{sum(each.work.ended.values()):,}",
            f"{each.work.ended.get('succeeded', 0):,}",
            f"{each.work.running:,}",
            show_s(each.work.gpu_s),
            show_s(each.work.waited_s / each.work.started if each.work.started else None),
            "-" if each.work.unmeasured == each.work.attempts else show_j(each.work.energy_j),
        ]
        for each in users
    ]
    print_table(columns, rows)


def _gpus(gpus: tuple[GpuWork, ...]) -> None:
    from carma.cli.output import Column, print_table
    from carma.core.units import show_j, show_s

    titles = ("WATCHED", "HELD", "SHARED", "SM", "W", "ENERGY", "IDLE", "TASKS")
    rows = [
        [
            gpu.gpu if gpu.index is None else str(gpu.index),
            show_s(gpu.watched_s),
            percent(gpu.held_s / gpu.watched_s if gpu.watched_s else None),
            percent(gpu.shared_s / gpu.watched_s if gpu.watched_s else None),
            percent(gpu.sm_active),
            "-" if gpu.power_w is None else f"{gpu.power_w:.0f}",
            show_j(gpu.energy_j),
            "-" if gpu.energy_j is None else show_j(gpu.idle_j),
            "-" if gpu.energy_j is None else show_j(gpu.tasks_j),
        ]
        for gpu in gpus
    ]
    print_table([Column("GPU", flexible=True, most=12), *(Column(title, right=True) for title in titles)], rows)
