"""The traces that come with the package: the published ones, as arrivals of tasks that `tasks.csv` describes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from carma.errors import BadTrace
from carma.traces.reader import parse_rows, read
from carma.traces.schema import COLUMNS, Column, Trace
from carma.traces.table import shipped_table, shipped_text

SHIPPED = ("t1", "t2", "mix", "heavy")
# A file of the package has these two; what a user writes has whole rows.
_SHORT = (*(column for column in COLUMNS if column.name == "arrival_s"), Column("task", "text", "", "its row", True))


def find(name: str) -> Trace:
    """A shipped trace by its name, or the trace in the file of that path."""
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
    source, rows = parse_rows(shipped_text(name), f"{name}.csv", _SHORT)
    tasks = tuple(msgspec.structs.replace(table.tasks[str(row["task"])], arrival_s=row["arrival_s"]) for _, row in rows)
    return Trace(name=f"{name}.csv", tasks=tasks, source=f"{source} {table.source}")
