"""Reader of trace files. Each error names the file, the line and the column, and shows the value."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from carma.errors import BadTrace
from carma.traces.schema import COLUMNS, LEAST_S, MOST, MOST_S, Trace, TraceColumn, TraceTask


def _hint(columns: Sequence[TraceColumn]) -> str:
    required, optional = ([column.name for column in columns if column.required is so] for so in (True, False))
    return f"columns: {', '.join(required)}; optional: {', '.join(optional)}"


_HINT = _hint(COLUMNS)
ARRIVAL = "arrival_s"
_NO_ARRIVAL = f"remove {ARRIVAL}, and give each task one row"
Value = str | float | int | None
Rows = list[tuple[int, dict[str, Value]]]


def read(path: Path) -> Trace:
    """The trace in a file. Raises BadTrace."""
    return parse(lines_of(path, "give the path of a CSV trace, or t1, t2, mix or heavy"), path.name)


def lines_of(path: Path, hint: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets write a byte order mark
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}", hint) from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not a text file (byte {error.start})", _HINT) from error


def parse(lines: Iterable[str], name: str) -> Trace:
    """The trace in these lines; `name` is the file name for errors."""
    source, rows = parse_rows(lines, name, COLUMNS)
    tasks: list[TraceTask] = []
    for number, row in rows:
        tasks.append(build(f"{name} line {number}", row))
        if len(tasks) > 1 and tasks[-1].arrival_s < tasks[-2].arrival_s:
            raise BadTrace(f"{name} line {number}: arrival_s: {tasks[-1].arrival_s:g} is earlier than in the row above")
    return Trace(name=name, tasks=tuple(tasks), source=source)


def parse_rows(lines: Iterable[str], name: str, columns: Sequence[TraceColumn]) -> tuple[str, Rows]:
    """The text of the comment lines, and for each row its line number and its values by column."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.isspace()]
    comments = [word for _, line in numbered if line.startswith("#") for word in line.removeprefix("#").split()]
    rows = [(number, line) for number, line in numbered if not line.startswith("#")]
    if not rows:
        raise BadTrace(f"{name}: no header line", _HINT)
    header = _header(f"{name} line {rows[0][0]}", _cells(name, *rows[0]), columns)
    read_rows = [(number, _values(name, number, header, _cells(name, number, line))) for number, line in rows[1:]]
    if not read_rows:
        raise BadTrace(f"{name}: no task below the header", _HINT)
    return " ".join(comments), read_rows


def build(where: str, row: dict[str, Value], arrival_s: float | None = None) -> TraceTask:
    """The task of a row; `arrival_s` for rows without this column."""
    given = row if arrival_s is None else {**row, "arrival_s": arrival_s}
    task = TraceTask(**given)  # type: ignore[arg-type]  # each value was made by its own column
    if task.first_mib > task.memory_mib:
        raise BadTrace(f"{where}: first_mib: {task.first_mib} is above memory_mib, {task.memory_mib}")
    if task.start_s > task.seconds:
        hint = "seconds is the whole run, with the start-up"
        raise BadTrace(f"{where}: start_s: {task.start_s:,g} is above seconds, {task.seconds:,g}", hint)
    if task.busy_gpus > task.gpus:
        raise BadTrace(f"{where}: busy_gpus: {task.busy_gpus} is above gpus, {task.gpus}")
    return task


def _cells(name: str, number: int, line: str) -> list[str]:
    if '"' not in line:  # faster than csv.reader, with the same result
        return [cell.strip() for cell in line.split(",")]
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except (csv.Error, StopIteration) as error:
        raise BadTrace(f"{name} line {number}: not a CSV row: {error}") from error


Reader = Callable[[str], Value]


def _header(where: str, cells: list[str], columns: Sequence[TraceColumn]) -> list[tuple[str, Reader]]:
    known = {column.name: column for column in columns}
    for cell in cells:
        if cell not in known:
            if cell == ARRIVAL:
                raise BadTrace(f"{where}: this is a trace, and a table of tasks has no column {ARRIVAL}", _NO_ARRIVAL)
            of = "a trace" if ARRIVAL in known else "a table of tasks"
            raise BadTrace(f"{where}: {cell!r} is not a column of {of}", _hint(columns))
    if len(set(cells)) != len(cells):
        raise BadTrace(f"{where}: a column occurs twice", _hint(columns))
    missing = [column.name for column in columns if column.required and column.name not in cells]
    if missing:
        raise BadTrace(f"{where}: no column {', '.join(missing)}", _hint(columns))
    return [(cell, _reader(known[cell])) for cell in cells]


def _values(name: str, number: int, header: list[tuple[str, Reader]], cells: list[str]) -> dict[str, Value]:
    if len(cells) != len(header):
        raise BadTrace(f"{name} line {number}: {len(cells)} values for {len(header)} columns")
    row: dict[str, Value] = {}
    for (column, reader), text in zip(header, cells, strict=True):
        try:
            row[column] = reader(text)
        except ValueError as error:
            hint = _HINT if "is not a number" in str(error) else ""
            raise BadTrace(f"{name} line {number}: {column}: {error}", hint) from None
    return row


def _reader(column: TraceColumn) -> Reader:
    """The function from the text of a cell to its value. It raises ValueError with a message."""
    if column.kind == "text":
        return _text if column.empty else _name

    def number(text: str) -> Value:
        if column.empty and not text:
            return None
        value = _number(text, column)
        return int(value) if column.is_whole else value

    return number


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("the text contains a zero byte")
    return text


def _name(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("a task needs a name")
    return text


def _number(text: str, column: TraceColumn) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number" if text else "is empty") from None
    if not math.isfinite(value) or (value < 0 and column.kind != "whole"):
        raise ValueError(f"{text!r} is not a number" + (" of 0 or more" if column.kind != "whole" else ""))
    if column.above_zero and value == 0:
        raise ValueError("must be above 0")
    if column.kind == "seconds" and value > MOST_S:
        raise ValueError(f"{text} is above {MOST_S:,.0f} seconds (thirty years)")
    if column.name == "seconds" and value < LEAST_S:
        raise ValueError(f"{text} is below {LEAST_S:g}")
    if column.is_whole and abs(value) > MOST:
        raise ValueError(f"{text} is too large")
    if column.kind == "share" and value > 1:
        raise ValueError(f"{text} is above 1; it is a share from 0 to 1")
    if column.is_whole and not value.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return value
