"""Columns of `queue` and `history`: their texts, and the selection with --format."""

from __future__ import annotations

import csv
import datetime
import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from carma.cli.output import Column, Remark, moment, print_remarked, print_table
from carma.cli.verb import Listing
from carma.cli.wording import WAITING, percent, ran_s, rate_text, slowdown_text
from carma.core.model.units import show_j, show_mib, show_s
from carma.errors import Usage
from carma.wire.api_types import TaskView


class TaskField(NamedTuple):
    column: Column
    text: Callable[[TaskView, float], str]  # of a task at a time
    about: str
    raw: Callable[[TaskView, float], object] | None = None  # for CSV: seconds, MiB, ISO times


def _where(task: TaskView, wide: bool = False) -> str:
    """The GPUs of a running task, the reason of a waiting one, like NODELIST(REASON) of squeue."""
    if task.state in ("starting", "running"):
        gpus = f"GPU {_gpus(task)}" if task.gpu_indices else ""
        return " ".join(part for part in (gpus, task.reason) if part)
    return (not wide and task.reason_short) or task.reason or task.state


def name_text(task: TaskView) -> str:
    return task.name + (task.array[task.array.index("[") :] if task.array and "[" in task.array else "")


def time_s(task: TaskView, now: float) -> float | None:
    """Run time; for a waiting task the time since its submission, its retry or its last attempt; None if it never
    ran."""
    if task.state in WAITING:
        since = (task.attempts[-1].ended_at if task.attempts else None) or task.submitted_at
        return round(max(0.0, now - max(since, task.retried_at or since)), 3)
    ran = ran_s(task, now)
    return None if ran is None else round(ran, 3)


def _memory_mib(task: TaskView) -> int | None:
    """The booking, or what a waiting task needs next; otherwise the declared or estimated memory."""
    known = task.needs_mib or task.booking_mib
    if known is not None:
        return known
    return task.gpu_memory_mib or (task.estimate.upper_mib if task.estimate else None)


def asks_text(task: TaskView) -> str:
    mib = _memory_mib(task)
    size = "?" if mib is None else f"{mib / 1024:.1f}G" if mib >= 1024 else f"{mib}M"
    return f"{task.gpus_wanted}x{size}"


def _gpus(task: TaskView) -> str:
    return ",".join(str(index) for index in task.gpu_indices) or "-"


def _guard(task: TaskView) -> str:
    """`mps 8.0G`: the strictest limit and its size."""
    guards = task.attempts[-1].guards if task.attempts else ()
    return f"{guards[0].rung} {guards[0].limit_mib / 1024:.1f}G" if guards else "-"


def _plain(column: Column, text: Callable[[TaskView], str], about: str) -> TaskField:
    return TaskField(column, lambda task, _now: text(task), about)


def _figure(
    title: str, value: Callable[[TaskView, float], float | None], show: Callable[..., str], about: str
) -> TaskField:
    """A number: shown with its unit, bare in CSV."""
    return TaskField(Column(title, right=True), lambda task, now: show(value(task, now)), about, value)


def _moment(title: str, at: Callable[[TaskView], float | None], about: str) -> TaskField:
    def iso(task: TaskView, _now: float) -> str:
        time = at(task)
        return "" if time is None else datetime.datetime.fromtimestamp(time).astimezone().isoformat(timespec="seconds")

    return TaskField(Column(title), lambda task, _now: moment(at(task)), about, iso)


def _energy_j(task: TaskView, _now: float) -> float | None:
    return None if task.energy_j is None else round(task.energy_j, 1)


def _count_text(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


_STATES = "state code: PD H R S CG CD F OOM CA TO LO DI NF"
FIELDS: dict[str, TaskField] = {
    "id": _plain(Column("ID", right=True), lambda task: str(task.id), "task ID"),
    "array": _plain(Column("ARRAY"), lambda task: task.array or "-", "array and index"),
    "name": _plain(Column("NAME", flexible=True, most=18), name_text, "name, with the index in an array"),
    "user": _plain(Column("USER", flexible=True, most=10), lambda task: task.user, "submitter"),
    "st": _plain(Column("ST", state=True), lambda task: task.code, _STATES),
    "state": _plain(Column("STATE", state=True), lambda task: task.state, "state"),
    "time": _figure("TIME", time_s, show_s, "run time, or waiting time"),
    "waited": _figure("WAITED", lambda task, _: task.waited_s, show_s, "time queued, held and between attempts"),
    "asks": _plain(Column("GPUS", right=True), asks_text, "number of GPUs and memory on each"),
    "want": _plain(Column("N", right=True), lambda task: str(task.gpus_wanted), "number of GPUs"),
    "gpus": _plain(Column("ON"), _gpus, "indices of the GPUs"),
    "mem": _figure(
        "MEM", lambda task, _: _memory_mib(task), show_mib, "booking, or need of a waiting task, on each GPU"
    ),
    "peak": _figure("PEAK", lambda task, _: task.observed_mib, show_mib, "maximum observed memory"),
    "energy": _figure("ENERGY", _energy_j, show_j, "energy of all attempts above idle power"),
    "sm": _figure("SM", lambda task, _: task.sm_active, percent, "SM activity of the task, in percent"),
    "steps": _figure("STEPS", lambda task, _: task.progress.steps, _count_text, "optimizer steps"),
    "rate": _figure("STEP/S", lambda task, _: task.progress.steps_per_s, rate_text, "optimizer steps per second"),
    "slowdown": TaskField(
        Column("SLOWDOWN", right=True),
        lambda task, _: slowdown_text(task.progress),
        "time taken / time alone; ~: inferred from activity",
        lambda task, _: task.progress.slowdown,
    ),
    "mechanism": _plain(
        Column("SHARES"),
        lambda task: task.mechanism or task.mechanism_asked or "-",
        "sharing mechanism: timeslice, mps, mig",
    ),
    "guard": _plain(Column("LIMIT"), _guard, "strictest memory limit"),
    "prio": _plain(Column("PRIO", right=True), lambda task: str(task.priority), "priority"),
    "tries": _plain(Column("TRIES", right=True), lambda task: str(len(task.attempts)), "number of attempts"),
    "exit": _figure(
        "EXIT", lambda task, _: task.exit_code, lambda code: "-" if code is None else str(code), "exit code"
    ),
    "submitted": _moment("SUBMITTED", lambda task: task.submitted_at, "time of submission"),
    "ended": _moment("ENDED", lambda task: task.ended_at, "time of the end"),
    "where": _plain(Column("WHERE (WHY)", flexible=True), _where, "GPUs, or the reason of the wait (-w: whole)"),
    "reason": _plain(Column("REASON", flexible=True), lambda task: task.reason, "reason of the wait, or outcome"),
    "code": _plain(Column("WHY"), lambda task: task.reason_code or "-", "code of the reason"),
    "command": _plain(Column("COMMAND", flexible=True), lambda task: shlex.join(task.command), "command"),
    "directory": _plain(Column("DIRECTORY", flexible=True), lambda task: task.directory, "working directory"),
    "comment": _plain(Column("COMMENT", flexible=True), lambda task: task.comment, "comment of the submitter"),
    "advice": _plain(Column("ADVICE", flexible=True), lambda task: task.advice, "advice from its figures, if any"),
}


def choose(text: str | None, usual: Sequence[str], *, with_user: bool = False, as_json: bool = False) -> list[str]:
    """The columns of `--format id,name,st`, or the usual ones."""
    if text is None:
        return [*usual[:2], *(["user"] if with_user else []), *usual[2:]]
    if as_json:
        raise Usage("--json prints all fields, so it excludes --format", "leave out one of them")
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise Usage(f"unknown column {name!r}", f"{hint}columns: {', '.join(FIELDS)}")
    return names


def print_tasks(
    tasks: Sequence[TaskView],
    names: Sequence[str],
    now: float,
    listing: Listing,
    *,
    title: str = "WHY",
    remark: Callable[[TaskView], str] | None = None,
) -> None:
    """`remark` is the last column, with its title if any task has one."""
    fields = [FIELDS[name] for name in names]
    columns = [field.column for field in fields]
    largest_j = max((task.energy_j or 0.0 for task in tasks), default=0.0)
    own = {"energy": lambda task: show_j(task.energy_j, largest_j), "where": lambda task: _where(task, listing.wide)}
    rows = [[own[name](task) if name in own else FIELDS[name].text(task, now) for name in names] for task in tasks]
    if remark is None:
        return print_table(columns, rows, listing.header, listing.wide)
    remarks = [Remark("", remark(task)) for task in tasks]
    columns.append(Column(title if any(each.rest for each in remarks) else "", flexible=True))
    return print_remarked(columns, rows, remarks, listing.header, listing.wide)


def print_csv(tasks: Sequence[TaskView], names: Sequence[str], now: float, *, header: bool) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if header:
        writer.writerow(names)
    fields = [FIELDS[name] for name in names]
    writer.writerows([(field.raw or field.text)(task, now) for field in fields] for task in tasks)
