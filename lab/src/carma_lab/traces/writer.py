"""Writes traces and tables of tasks. Equal traces give equal bytes, and reading restores the trace."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from carma.errors import BadTrace
from carma.traces.reader import Value
from carma.traces.schema import COLUMNS, Trace, TraceColumn, TraceTask
from carma.traces.table import TABLE_COLUMNS, Table

_WIDTH = 118  # of comment lines
_DEFAULTS = dict(zip(TraceTask.__struct_fields__[-len(TraceTask.__struct_defaults__) :], TraceTask.__struct_defaults__,
                     strict=True))  # fmt: skip


def write(trace: Trace, path: Path) -> None:
    """Reading the file restores the trace, with the name of the file and single blanks in its source."""
    path.write_text(text(trace), encoding="utf-8", newline="\n")


def text(trace: Trace) -> str:
    """Content of the file: the source as comment, the header, the rows. Unused optional columns are omitted."""
    if not trace.tasks:
        raise BadTrace(f"{trace.name} has no tasks to write")
    return spell(trace.source, trace.tasks, COLUMNS)


def spell(source: str, tasks: Sequence[TraceTask], columns: Sequence[TraceColumn]) -> str:
    used = [column.name for column in columns if column.required or _is_used(column.name, tasks)]
    into = io.StringIO()
    for line in textwrap.wrap(" ".join(source.split()), _WIDTH, break_long_words=False, break_on_hyphens=False):
        into.write(f"# {line}\n")
    rows = csv.writer(into, lineterminator="\n")
    rows.writerow(used)
    for task in tasks:
        rows.writerow([_cell(name, getattr(task, name)) for name in used])
    return into.getvalue()


def _is_used(name: str, tasks: Sequence[TraceTask]) -> bool:
    default = _DEFAULTS[name]
    return any(getattr(task, name) != default for task in tasks)


def _cell(column: str, value: Value) -> str:
    match value:
        case None:
            return ""
        case str():
            # Rows are lines and blanks around a cell are ignored, so such a text would change.
            if value != value.strip() or not value.isprintable():
                raise BadTrace(
                    f"{column}: {value!r} cannot be written: it has a blank at an end or a control character"
                )
            return value
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case _:
            return repr(value)


def write_table(table: Table, path: Path) -> None:
    """Reading the file restores the table, except its name."""
    path.write_text(spell(table.source, tuple(table.tasks.values()), TABLE_COLUMNS), encoding="utf-8", newline="\n")
