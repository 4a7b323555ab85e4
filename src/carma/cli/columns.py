"""The columns of `queue` and `history`: what each shows, and which can be asked for with --format."""

from __future__ import annotations

import csv
import datetime
import difflib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from carma.cli.output import Column, Remark, moment, print_remarked, print_table
from carma.cli.wording import WAITING, percent, ran_s, short_ending
from carma.core.model.units import show_j, show_mib, show_s
from carma.errors import Usage
from carma.wire.api_types import TaskView

_SHORTER = (  # in a column the beginning must tell the most: it may be all that is seen
    (re.compile(r"^(GPU \d+): is "), r"\1 is "),
    (re.compile(r"^needs (\d+) GPUs, (\d+) could take it now; "), r"\2 of \1 GPUs can take it; "),
)


class Field(NamedTuple):
    column: Column
    text: Callable[[TaskView, float], str]
    about: str
    raw: Callable[[TaskView, float], object] | None = None  # for programs: seconds, MiB, ISO times


def _where(task: TaskView, _now: float) -> str:
    """The GPUs of a running task, the reason of a waiting one; as squeue's NODELIST(REASON)."""
    if task.state in ("starting", "running"):
        gpus = "GPU " + ",".join(str(index) for index in task.gpu_indices) if task.gpu_indices else ""
        return " ".join(part for part in (gpus, task.reason) if part)
    reason = task.reason
    for pattern, instead in _SHORTER:
        reason = pattern.sub(instead, reason)
    return reason or task.state


def _name(task: TaskView, _now: float) -> str:
    return task.name + (task.array[task.array.index("[") :] if task.array and "[" in task.array else "")


def _time_s(task: TaskView, now: float) -> float | None:
    """Of a waiting task since its submission, or since its last attempt ended; None of one that never ran."""
    if task.state in WAITING:
        since = (task.attempts[-1].ended_at if task.attempts else None) or task.submitted_at
        return round(max(0.0, now - since), 3)
    ran = ran_s(task, now)
    return None if ran is None else round(ran, 3)


def _waited_s(task: TaskView, now: float) -> float:
    return round(max(0.0, (task.started_at or task.ended_at or now) - task.submitted_at), 3)


def _memory_mib(task: TaskView, _now: float) -> int | None:
    """What is booked, or what a waiting task needs next; before that what was declared or estimated."""
    known = task.needs_mib or task.booking_mib
    if known is not None:
        return known
    return task.gpu_memory_mib or (task.estimate.upper_mib if task.estimate else None)


def _asks(task: TaskView, now: float) -> str:
    mib = _memory_mib(task, now)
    size = "?" if mib is None else f"{mib / 1024:.1f}G" if mib >= 1024 else f"{mib}M"
    return f"{task.gpus_wanted}x{size}"


def _gpus(task: TaskView, _now: float) -> str:
    return ",".join(str(index) for index in task.gpu_indices) or "-"


def _mechanism(task: TaskView, _now: float) -> str:
    return task.mechanism or task.mechanism_asked or "-"


def _guard(task: TaskView, _now: float) -> str:
    """`mps 8.0G`: the first that holds it, and where."""
    guards = task.attempts[-1].guards if task.attempts else ()
    return " ".join([guards[0].rung, f"{guards[0].limit_mib / 1024:.1f}G"]) if guards else "-"


def _iso(at: float | None) -> str:
    return "" if at is None else datetime.datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


FIELDS: dict[str, Field] = {
    "id": Field(Column("ID", right=True), lambda task, _: str(task.id), "its number"),
    "array": Field(Column("ARRAY"), lambda task, _: task.array or "-", "its place in an array"),
    "name": Field(Column("NAME", flexible=True, most=18), _name, "its name, with its index in an array"),
    "user": Field(Column("USER", flexible=True, most=10), lambda task, _: task.user, "who submitted it"),
    "st": Field(Column("ST", state=True), lambda task, _: task.code, "state, short: PD H R CG CD F OOM CA TO LO DI NF"),
    "state": Field(Column("STATE", state=True), lambda task, _: task.state, "state in full"),
    "time": Field(
        Column("TIME", right=True),
        lambda task, now: show_s(_time_s(task, now)),
        "how long it has run, or waited",
        _time_s,
    ),
    "waited": Field(
        Column("WAITED", right=True),
        lambda task, now: show_s(_waited_s(task, now)),
        "from submission to start",
        _waited_s,
    ),
    "asks": Field(Column("GPUS", right=True), _asks, "how many GPUs, and the memory on each"),
    "want": Field(Column("N", right=True), lambda task, _: str(task.gpus_wanted), "how many GPUs it asks for"),
    "gpus": Field(Column("ON"), _gpus, "the GPUs it was given, by index"),
    "mem": Field(
        Column("MEM", right=True),
        lambda task, now: show_mib(_memory_mib(task, now)),
        "memory on each GPU: booked, or what a waiting task needs",
        _memory_mib,
    ),
    "peak": Field(
        Column("PEAK", right=True),
        lambda task, _: show_mib(task.observed_mib),
        "most memory seen",
        lambda task, _: task.observed_mib,
    ),
    "energy": Field(
        Column("ENERGY", right=True),
        lambda task, _: show_j(task.energy_j),
        "energy of all its attempts, above what idle GPUs take",
        lambda task, _: None if task.energy_j is None else round(task.energy_j, 1),
    ),
    "sm": Field(
        Column("SM", right=True),
        lambda task, _: percent(task.sm_active),
        "its own share of SM activity, in percent",
        lambda task, _: task.sm_active,
    ),
    "mechanism": Field(Column("SHARES"), _mechanism, "how it shares its GPUs: timeslice, mps, mig"),
    "guard": Field(Column("HELD BY"), _guard, "what keeps it within its memory, the hardest first"),
    "prio": Field(Column("PRIO", right=True), lambda task, _: str(task.priority), "priority"),
    "tries": Field(Column("TRIES", right=True), lambda task, _: str(len(task.attempts)), "attempts"),
    "exit": Field(
        Column("EXIT", right=True),
        lambda task, _: "-" if task.exit_code is None else str(task.exit_code),
        "exit code",
        lambda task, _: task.exit_code,
    ),
    "submitted": Field(
        Column("SUBMITTED"),
        lambda task, _: moment(task.submitted_at),
        "when it was submitted",
        lambda task, _: _iso(task.submitted_at),
    ),
    "ended": Field(
        Column("ENDED"), lambda task, _: moment(task.ended_at), "when it ended", lambda task, _: _iso(task.ended_at)
    ),
    "where": Field(Column("WHERE (WHY)", flexible=True), _where, "its GPUs, or why it waits"),
    "reason": Field(Column("REASON", flexible=True), lambda task, _: task.reason, "why it waits, or how it ended"),
    "code": Field(Column("WHY"), lambda task, _: task.reason_code or "-", "the reason's short name"),
    "command": Field(Column("COMMAND", flexible=True), lambda task, _: shlex.join(task.command), "what it runs"),
    "directory": Field(Column("DIRECTORY", flexible=True), lambda task, _: task.directory, "where it runs"),
    "comment": Field(Column("COMMENT", flexible=True), lambda task, _: task.comment, "the submitter's remark"),
}


def choose(text: str | None, usual: Sequence[str]) -> list[str]:
    """The columns of `--format id,name,st`."""
    names = [name.strip().lower() for name in text.split(",")] if text else list(usual)
    for name in names:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise Usage(f"there is no column {name!r}", f"{hint}columns: {', '.join(FIELDS)}")
    return names


def print_tasks(
    tasks: Sequence[TaskView], names: Sequence[str], now: float, *, header: bool, wide: bool, endings: bool = False
) -> None:
    """`endings`: with how each of them ended, as a remark."""
    fields = [FIELDS[name] for name in names]
    columns = [field.column for field in fields]
    rows = [[field.text(task, now) for field in fields] for task in tasks]
    if not endings:
        return print_table(columns, rows, header, wide)
    remarks = [Remark("", short_ending(task)) for task in tasks]
    return print_remarked(
        [*columns, Column("WHY" if any(r.rest for r in remarks) else "", flexible=True)], rows, remarks, header, wide
    )


def print_csv(tasks: Sequence[TaskView], names: Sequence[str], now: float, *, header: bool) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if header:
        writer.writerow(names)
    fields = [FIELDS[name] for name in names]
    writer.writerows([(field.raw or field.text)(task, now) for field in fields] for task in tasks)
