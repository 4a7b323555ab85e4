"""The table of tasks: what is known of each one that the shipped traces run, and that made traces draw from.

A file of a trace's columns without `arrival_s`, one row for each name. Every shipped trace refers to it, so that a
figure stands in one place: new demands are put into all of them by writing this one file
(`carma_lab.traces.writer.write_table`).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from carma.core.model.values import Record
from carma.errors import BadTrace
from carma.traces.reader import build, lines_of, parse_rows
from carma.traces.schema import COLUMNS, TraceTask

TABLE_COLUMNS = tuple(column for column in COLUMNS if column.name != "arrival_s")


class Table(Record, frozen=True, kw_only=True):
    """Tasks by name, each with an arrival at 0, and what the comment lines say of their source."""

    name: str
    tasks: dict[str, TraceTask]
    source: str = ""


def shipped_table() -> Table:
    return parse_table(shipped_text("tasks"), "tasks.csv")


def shipped_text(name: str) -> list[str]:
    """The lines of a file of this package."""
    return files("carma.traces").joinpath(f"{name}.csv").read_text(encoding="utf-8").splitlines()


def read_table(path: Path) -> Table:
    hint = "Give the path of a CSV file with a trace's columns, without arrival_s."
    return parse_table(lines_of(path, hint), path.name)


def parse_table(lines: list[str], name: str) -> Table:
    source, rows = parse_rows(lines, name, TABLE_COLUMNS)
    tasks: dict[str, TraceTask] = {}
    for number, row in rows:
        task = build(f"{name} line {number}", row, arrival_s=0.0)
        if task.name in tasks:
            raise BadTrace(f"{name} line {number}: name: {task.name} is there twice")
        tasks[task.name] = task
    return Table(name=name, tasks=tasks, source=source)
