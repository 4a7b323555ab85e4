"""Reads a trace file. Every complaint names the file, the line and the column, and shows the value."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from carma.errors import BadTrace
from carma.traces.schema import Trace, TraceTask

REQUIRED = ("arrival_s", "name", "gpus", "memory_mib", "seconds", "sm_active", "sm_occupancy", "dram_active")
OPTIONAL = ("start_s", "ramp_s")
_HINT = "The columns are: " + ", ".join(REQUIRED) + "; optional: " + ", ".join(OPTIONAL) + "."
_SHARES = frozenset({"sm_active", "sm_occupancy", "dram_active"})
_COUNTS = frozenset({"gpus", "memory_mib"})
_ABOVE_ZERO = frozenset({"gpus", "memory_mib", "seconds"})


def read(path: Path) -> Trace:
    """The trace in `path`; BadTrace if it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}", "Give the path of a CSV trace, or t1.") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not a text file (byte {error.start})", _HINT) from error
    return parse(text.splitlines(), path.name)


def parse(lines: Iterable[str], name: str) -> Trace:
    """The trace that these lines spell; `name` is the file as complaints call it."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    comments = [line.lstrip("# ").rstrip() for _, line in numbered if line.startswith("#")]
    rows = [(number, line) for number, line in numbered if not line.startswith("#")]
    if not rows:
        raise BadTrace(f"{name}: no header line", _HINT)
    header = _header(name, rows[0][0], _cells(name, *rows[0]))
    tasks: list[TraceTask] = []
    for number, line in rows[1:]:
        tasks.append(_task(name, number, header, _cells(name, number, line)))
        if len(tasks) > 1 and tasks[-1].arrival_s < tasks[-2].arrival_s:
            raise BadTrace(f"{name} line {number}: arrival_s: {tasks[-1].arrival_s:g} is before the row above it")
    if not tasks:
        raise BadTrace(f"{name}: no task below the header", _HINT)
    return Trace(name=name, tasks=tuple(tasks), source=" ".join(comments))


def _cells(name: str, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except (csv.Error, StopIteration) as error:
        raise BadTrace(f"{name} line {number}: not a CSV row: {error}") from error


def _header(name: str, number: int, cells: list[str]) -> list[str]:
    where = f"{name} line {number}"
    for cell in cells:
        if cell not in REQUIRED and cell not in OPTIONAL:
            raise BadTrace(f"{where}: {cell!r} is not a column of a trace", _HINT)
    if len(set(cells)) != len(cells):
        raise BadTrace(f"{where}: a column is there twice", _HINT)
    missing = [column for column in REQUIRED if column not in cells]
    if missing:
        raise BadTrace(f"{where}: no column {', '.join(missing)}", _HINT)
    return cells


def _task(name: str, number: int, header: list[str], cells: list[str]) -> TraceTask:
    where = f"{name} line {number}"
    if len(cells) != len(header):
        raise BadTrace(f"{where}: {len(cells)} values for {len(header)} columns")
    row = dict(zip(header, cells, strict=True))
    if not row["name"] or "\0" in row["name"]:
        raise BadTrace(f"{where}: name: a task needs a name")
    figures = {column: _figure(where, column, text) for column, text in row.items() if column != "name"}
    return _build(row["name"], figures)


def _build(name: str, figures: Mapping[str, float]) -> TraceTask:
    return TraceTask(
        name=name,
        arrival_s=figures["arrival_s"],
        gpus=int(figures["gpus"]),
        memory_mib=int(figures["memory_mib"]),
        seconds=figures["seconds"],
        sm_active=figures["sm_active"],
        sm_occupancy=figures["sm_occupancy"],
        dram_active=figures["dram_active"],
        start_s=figures.get("start_s", 0.0),
        ramp_s=figures.get("ramp_s", 0.0),
    )


def _figure(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadTrace(f"{where}: {column}: {text!r} is not a number", _HINT) from None
    if not math.isfinite(value) or value < 0:
        raise BadTrace(f"{where}: {column}: {text!r} is not a number of 0 or more")
    if column in _ABOVE_ZERO and value == 0:
        raise BadTrace(f"{where}: {column}: must be above 0")
    if column in _SHARES and value > 1:
        raise BadTrace(f"{where}: {column}: {text} is above 1; it is a share from 0 to 1")
    if column in _COUNTS and value != int(value):
        raise BadTrace(f"{where}: {column}: {text} is not a whole number")
    return value
