"""How answers are printed: JSON without rich, tables and cards with it. Plain with NO_COLOR or no terminal."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 10_000
FLEXIBLE = 12  # characters that a column keeps which is cut, where nothing else has to be
STATE_STYLES = {
    **dict.fromkeys(("R", "running", "CD", "open", "idle", "ok"), "green"),
    **dict.fromkeys(("PD", "H", "CG", "queued", "warming", "starting", "recovering", "warn"), "yellow"),
    **dict.fromkeys(("F", "OOM", "TO", "LF", "LO", "DI", "NF", "CA", "fault", "bad"), "red"),
    **dict.fromkeys(("drained", "closed", "full", "exclusive"), "magenta"),
}


class Column(NamedTuple):
    title: str
    right: bool = False
    flexible: bool = False  # cut with … when the terminal is narrow
    most: int | None = None  # never wider than this, so that it leaves room for the others
    state: bool = False  # coloured by what it says


class Remark(NamedTuple):
    """The last cell of a row: the whole where it fits, else `short` there and the rest on a line below."""

    short: str
    rest: str = ""

    @property
    def whole(self) -> str:
        return ": ".join(part for part in self if part)


def print_json(value: Any) -> None:
    """The wire types as they are, indented."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8":
        import json

        text = json.dumps(json.loads(text), indent=2)  # \\u00e9: nothing is lost in any encoding
    sys.stdout.write(text + "\n")


def console(wide: bool = False, least: int = 0) -> Console:
    """COLUMNS, the terminal's width, or 80. No markup, no highlighting: what a user typed is printed as typed."""
    from rich.console import Console

    width = WIDEST if wide else max(least, shutil.get_terminal_size((80, 24)).columns)
    return Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def print_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], header: bool = True, wide: bool = False
) -> None:
    """One line a row. Flexible columns give way first; nothing wraps. In a pipe or a file the others are never cut."""
    for line in _table_lines(columns, rows, header, wide):
        print(line)


def print_remarked(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    remarks: Sequence[Remark],
    header: bool = True,
    wide: bool = False,
) -> None:
    """A table whose last column is a remark; what is too long for the row goes on below it. Rows only: it is cut."""
    room = WIDEST if wide or not header else _room_for_last(columns, rows)
    fits = [len(remark.whole) <= room for remark in remarks]
    cells = [
        [*row, remark.whole if fit else remark.short] for row, remark, fit in zip(rows, remarks, fits, strict=True)
    ]
    lines = _table_lines(columns, cells, header, wide)
    if header:
        print(lines.pop(0))
    for line, remark, fit in zip(lines, remarks, fits, strict=True):
        print(line)
        if not fit:
            indent = " " * 5
            width = shutil.get_terminal_size((80, 24)).columns
            print(textwrap.fill(safe(remark.rest), width, initial_indent=indent, subsequent_indent=indent))


def _room_for_last(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    taken = 0
    for place, column in enumerate(columns[:-1]):
        widest = max([len(column.title), *(len(row[place]) for row in rows)])
        taken += 2 + (widest if column.most is None else min(widest, column.most))
    return shutil.get_terminal_size((80, 24)).columns - taken


def _table_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], header: bool = True, wide: bool = False
) -> list[str]:
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(box=None, pad_edge=False, show_header=header, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            Text(column.title, no_wrap=True),
            justify="right" if column.right else "left",
            no_wrap=not column.flexible,
            overflow="ellipsis",
            max_width=None if wide else column.most,
        )
    for row in rows:
        table.add_row(
            *(
                Text(safe(text), _style(text) if column.state else "", no_wrap=True, overflow="ellipsis")
                for column, text in zip(columns, row, strict=True)
            )
        )
    return _lines(table, wide, 0 if _width_is_given() else _least(columns, rows))


def _width_is_given() -> bool:
    return bool(os.environ.get("COLUMNS")) or sys.stdout.isatty()


def _least(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """With all that is not flexible as it is."""
    least = -2
    for place, column in enumerate(columns):
        widest = max([len(column.title), *(len(row[place]) for row in rows)])
        most = WIDEST if column.most is None else column.most
        least += 2 + min(widest, most, max(FLEXIBLE, len(column.title)) if column.flexible else WIDEST)
    return least


def _style(text: str) -> str:
    return STATE_STYLES.get(text.partition(":")[0], "")


def print_plain(renderable: Any, wide: bool = False) -> None:
    for line in _lines(renderable, wide):
        print(line)


def _lines(renderable: Any, wide: bool, least: int = 0) -> list[str]:
    """Without the blanks that rich leaves at the end of lines."""
    target = console(wide, least)
    with target.capture() as captured:
        target.print(renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


def print_facts(facts: Iterable[tuple[str, str]], indent: int = 0) -> None:
    """`label  text` lines; a long text goes on under its beginning. Empty texts are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        if text:
            table.add_row(Text(" " * indent + label, "bold" if not indent else ""), Text(safe(text)))
    print_plain(table)


def heading(text: str) -> None:
    from rich.text import Text

    print_plain(Text(safe(text), "bold"))


def safe(text: str) -> str:
    """Control characters of a name or a command must not reach the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text.replace("\n", " "))


def moment(at: float | None) -> str:
    """Local time; the date only when it is not today's."""
    if at is None:
        return ""
    then = datetime.datetime.fromtimestamp(at)
    return then.strftime("%H:%M:%S" if then.date() == datetime.date.today() else "%Y-%m-%d %H:%M")
