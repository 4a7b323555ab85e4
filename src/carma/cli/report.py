"""`carma report`: use of the server over a period, by user and by GPU."""

from __future__ import annotations

from collections.abc import Sequence

from carma.cli.connection import connect
from carma.cli.option_types import since_at, since_flag
from carma.cli.output import Column, Field, heading, moment, print_facts, print_json, print_records
from carma.cli.verb import json_flag, verb
from carma.cli.wording import gpu_hours, percent
from carma.core.model.units import show_count, show_j, show_s
from carma.wire.report_types import GpuWork, Report, UserWork, Work

EXAMPLES = """
carma report                 the last 24 hours
carma report --since 7d      the last week
carma report --json          for programs: seconds and joules
"""


def _mean_wait(work: Work) -> str:
    return show_s(work.waited_s / work.started if work.started else None)


def _user_fields(users: Sequence[UserWork]) -> list[Field[UserWork]]:
    largest_j = max(user.work.energy_j for user in users)

    def energy(user: UserWork) -> str:
        return "-" if user.work.unmeasured == user.work.attempts else show_j(user.work.energy_j, largest_j)

    return [*USER_FIELDS, (Column("ENERGY", right=True), energy)]


USER_FIELDS: tuple[Field[UserWork], ...] = (
    (Column("USER", flexible=True, most=16), lambda user: user.user),
    (Column("ENDED", right=True), lambda user: f"{sum(user.work.ended.values()):,}"),
    (Column("OK", right=True), lambda user: f"{user.work.ended.get('succeeded', 0):,}"),
    (Column("RUNNING", right=True), lambda user: f"{user.work.running:,}"),
    (Column("GPU TIME", right=True), lambda user: show_s(user.work.gpu_s)),
    (Column("WAITED", right=True), lambda user: _mean_wait(user.work)),
)


def _share(gpu: GpuWork, part_s: float) -> str:
    return percent(part_s / gpu.watched_s if gpu.watched_s else None)


GPU_FIELDS: tuple[Field[GpuWork], ...] = (
    (Column("GPU", flexible=True, most=12), lambda gpu: gpu.gpu if gpu.index is None else str(gpu.index)),
    (Column("OBSERVED", right=True), lambda gpu: show_s(gpu.watched_s)),
    (Column("USED", right=True), lambda gpu: _share(gpu, gpu.held_s)),
    (Column("SHARED", right=True), lambda gpu: _share(gpu, gpu.shared_s)),
    (Column("SM", right=True), lambda gpu: percent(gpu.sm_active)),
    (Column("W", right=True), lambda gpu: "-" if gpu.power_w is None else f"{gpu.power_w:.0f}"),
)


def _gpu_fields(gpus: Sequence[GpuWork]) -> list[Field[GpuWork]]:
    """The columns of energy have one unit, so that they can be compared."""
    largest_j = max(gpu.energy_j or 0.0 for gpu in gpus)

    def energy(title: str, part: str) -> Field[GpuWork]:
        return (
            Column(title, right=True),
            lambda gpu: show_j(None if gpu.energy_j is None else getattr(gpu, part), largest_j),
        )

    return [*GPU_FIELDS, energy("ENERGY", "energy_j"), energy("IDLE", "idle_j"), energy("TASKS", "tasks_j")]


@verb("report", examples=EXAMPLES)
@since_flag("Start of the period: 24h (default), 7d, today, 2026-01-31.")
@json_flag
def command(since: str | None, as_json: bool) -> None:
    """Tasks, waiting times, GPU time and energy over a period, by user and by GPU.

    The period starts on a full hour. An attempt that crosses its bounds counts with the part inside. OK is the number
    of succeeded tasks. OBSERVED is the time for which the GPU was sampled. USED and SHARED are the percentages of that
    time with at least one and at least two tasks on the GPU. ENERGY is the energy of the GPU; IDLE its energy at idle
    power; TASKS the energy above that, attributed to tasks.

    `carma run-report` (distribution carma-lab) makes tables, plots and an HTML page of the same period.
    """
    with connect() as client:
        asked = since_at(client, since)
        report = client.report(since=asked)
    return print_json(report) if as_json else _print(report, asked)


def _print(report: Report, asked: float | None) -> None:
    total = report.total
    rounded = "" if asked is None or report.since >= asked else ", from the full hour"
    heading(f"{moment(report.since)} until now ({show_s(report.until - report.since)}{rounded})")
    print_facts(
        [
            ("tasks", _tasks(total)),
            ("ran", f"{gpu_hours(total.gpu_s)} in {show_count(total.attempts, 'attempt')}" if total.attempts else ""),
            ("waited", _waited(total)),
            ("energy", _energy(report)),
        ]
    )
    if report.users:
        print()
        print_records(_user_fields(report.users), report.users)
    if report.gpus:
        print()
        print_records(_gpu_fields(report.gpus), report.gpus)
    if report.notes:
        print()
        print_facts([("note", note) for note in report.notes])


def _tasks(work: Work) -> str:
    """`12 ended: 9 succeeded, 3 out of memory; 2 running`."""
    kinds = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in work.ended.items())
    ended = f"{sum(work.ended.values()):,} ended: {kinds}" if work.ended else "none ended"
    return ended + (f"; {work.running:,} running" if work.running else "")


def _waited(work: Work) -> str:
    if not work.started:
        return ""
    starts = show_count(work.started, "first start")
    return f"mean {_mean_wait(work)} before {starts}, maximum {show_s(work.longest_wait_s)}"


def _energy(report: Report) -> str:
    """The energy of all GPUs and its parts, which add up."""
    known = [gpu for gpu in report.gpus if gpu.energy_j is not None]
    if not known:
        return (
            f"{show_j(report.total.energy_j)} for tasks; energy of the GPUs not known" if report.total.attempts else ""
        )
    total_j = sum(gpu.energy_j or 0.0 for gpu in known)
    idle_j, tasks_j = sum(gpu.idle_j for gpu in known), sum(gpu.tasks_j for gpu in known)
    parts = [f"{show_j(idle_j)} idle", f"{show_j(tasks_j)} tasks"]
    if (other_j := total_j - idle_j - tasks_j) > max(1.0, total_j * 0.005):
        parts.append(f"{show_j(other_j)} other")
    return f"{show_j(total_j)}: {', '.join(parts)}"
