"""Writes a trace: the same trace gives the same bytes, and what is read back is equal to what was written."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from carma.errors import BadTrace
from carma.traces.reader import Value
from carma.traces.schema import COLUMNS, Column, Trace, TraceTask
from carma.traces.table import TABLE_COLUMNS, Table

_WIDTH = 118  # of comment lines
_DEFAULTS = dict(zip(TraceTask.__struct_fields__[-len(TraceTask.__struct_defaults__) :], TraceTask.__struct_defaults__,
                     strict=True))  # fmt: skip


def write(trace: Trace, path: Path) -> None:
    """Into that file. Read again it is the same trace, with the file's name and single blanks in its source."""
    path.write_text(text(trace), encoding="utf-8", newline="\n")


def text(trace: Trace) -> str:
    """The file: what the trace says of its source, the header, the rows. Optional columns only where they are used."""
    if not trace.tasks:
        raise BadTrace(f"{trace.name}: there is no task to write")
    return spell(trace.source, trace.tasks, COLUMNS)


def spell(source: str, tasks: Sequence[TraceTask], columns: Sequence[Column]) -> str:
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
            # Rows are lines, and blanks around a cell are not part of it: such a text would come back as another.
            if value != value.strip() or not value.isprintable():
                raise BadTrace(f"{column}: {value!r} cannot be written: a blank at an end, or a character of control")
            return value
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case _:
            return repr(value)


def write_table(table: Table, path: Path) -> None:
    """The same table gives the same bytes; read again it is equal, but for its name."""
    path.write_text(spell(table.source, tuple(table.tasks.values()), TABLE_COLUMNS), encoding="utf-8", newline="\n")
