"""Tables of tasks, and the shipped traces, which refer to the shipped table.

A table has the columns of a trace without `arrival_s`, and one row for each name. Every figure of a task is therefore
in one file: `carma_lab.traces.writer.write_table` changes it for all shipped traces.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.errors import BadTrace
from carma.traces.reader import build, lines_of, parse_rows, read
from carma.traces.schema import COLUMNS, Trace, TraceColumn, TraceTask

SHIPPED = ("t1", "t2", "mix", "heavy")
TABLE_COLUMNS = tuple(column for column in COLUMNS if column.name != "arrival_s")
# The columns of a shipped trace; a user's trace has complete rows.
_ARRIVALS = (
    *(column for column in COLUMNS if column.name == "arrival_s"),
    TraceColumn("text", "its row", name="task", required=True),
)


class Table(Record, frozen=True, kw_only=True):
    """Tasks by name, with arrival at 0, and the source in the comment lines."""

    name: str
    tasks: dict[str, TraceTask]
    source: str = ""


def find(name: str) -> Trace:
    """The shipped trace of this name, or the trace in the file of this path."""
    if name in SHIPPED:
        return _shipped(name)
    path = Path(name)
    if not name or (not path.exists() and path.name == name and not path.suffix):
        raise BadTrace(
            f"there is no trace {name!r}", f"give the path of a file, or a shipped trace: {', '.join(SHIPPED)}"
        )
    return read(path)


def _shipped(name: str) -> Trace:
    table = shipped_table()
    source, rows = parse_rows(_lines(name), f"{name}.csv", _ARRIVALS)
    tasks = tuple(msgspec.structs.replace(table.tasks[str(row["task"])], arrival_s=row["arrival_s"]) for _, row in rows)
    return Trace(name=f"{name}.csv", tasks=tasks, source=f"{source} {table.source}")


def shipped_table() -> Table:
    return parse_table(_lines("tasks"), "tasks.csv")


def _lines(name: str) -> list[str]:
    """The lines of a file of this package."""
    return files("carma.traces").joinpath(f"{name}.csv").read_text(encoding="utf-8").splitlines()


def read_table(path: Path) -> Table:
    return parse_table(
        lines_of(path, "give the path of a CSV file with a trace's columns, without arrival_s"), path.name
    )


def parse_table(lines: list[str], name: str) -> Table:
    source, rows = parse_rows(lines, name, TABLE_COLUMNS)
    tasks: dict[str, TraceTask] = {}
    for number, row in rows:
        task = build(f"{name} line {number}", row, arrival_s=0.0)
        if task.name in tasks:
            raise BadTrace(f"{name} line {number}: name: {task.name} is there twice")
        tasks[task.name] = task
    return Table(name=name, tasks=tasks, source=source)
