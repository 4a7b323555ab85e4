"""`carma report`: what the server did over a period, by user and by GPU."""

from __future__ import annotations

from carma.cli.time_span import since_at, since_flag
from carma.cli.verb import json_flag, verb
from carma.cli.wording import gpu_hours, many, percent
from carma.wire.report_types import GpuWork, Report, UserWork, Work

EXAMPLES = """
carma report                 the server's last 24 hours
carma report --since 7d      the last week
carma report --json          for programs: seconds and joules
"""


@verb("report", examples=EXAMPLES)
@since_flag("From: 24h (default), 7d, today, 2026-01-31.")
@json_flag
def command(since: str | None, as_json: bool) -> None:
    """What this server did: tasks, waiting, GPU time and energy, by user and by GPU.

    The period begins on a full hour. Attempts that reach beyond it count with the part that lies within. HELD and
    SHARED are the shares of the observed time with a task, and with two or more, on the GPU. Energy is that of the
    GPU; IDLE is what the GPU takes with no task on it, TASKS is what is above that and was attributed to tasks.

    `carma run-report` (distribution carma-lab) makes tables, plots and an HTML page of the same period.
    """
    _server(since, as_json)


def _server(since: str | None, as_json: bool) -> None:
    from carma.cli.connection import connect

    with connect() as client:
        asked = since_at(client, since)
        report = client.report(since=asked)
    if as_json:
        from carma.cli.output import print_json

        return print_json(report)
    return _page(report, asked)


def _page(report: Report, asked: float | None) -> None:
    from carma.cli.output import heading, moment, print_facts
    from carma.core.model.units import show_s

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
    from carma.core.model.units import show_s

    if not work.started:
        return ""
    mean = show_s(work.waited_s / work.started)
    return f"{mean} on average before {many(work.started, 'first start')}, {show_s(work.longest_wait_s)} at most"


def _energy(report: Report) -> str:
    """All of it, and what became of it; the parts add up."""
    from carma.core.model.units import show_j

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
    from carma.core.model.units import show_j, show_s

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
    from carma.core.model.units import show_j, show_s

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
