"""Output of verbs: JSON without rich, tables and cards with rich. No colours with NO_COLOR or without a terminal."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")
MAX_WIDTH = 10_000
ANNOUNCED_AFTER_S = 2.0  # progress without a terminal
MIN_FLEXIBLE = 12  # width that a flexible column keeps in a pipe or a file
REMARK_INDENT = " " * 5
STATE_STYLES = {
    **dict.fromkeys(("R", "running", "CD", "open", "idle", "ok"), "green"),
    **dict.fromkeys(("PD", "H", "CG", "queued", "warming", "starting", "recovering", "warn"), "yellow"),
    **dict.fromkeys(("F", "OOM", "TO", "LF", "LO", "DI", "NF", "CA", "fault", "bad"), "red"),
    **dict.fromkeys(("drained", "closed", "full", "exclusive"), "magenta"),
}


class Column(NamedTuple):
    title: str
    right: bool = False
    flexible: bool = False  # cut with … in a narrow terminal
    most: int | None = None  # maximum width
    state: bool = False  # coloured by its text

    def width(self, texts: Iterable[str]) -> int:
        """Width without cuts, up to the maximum."""
        widest = max([len(self.title), *map(len, texts)])
        return widest if self.most is None else min(widest, self.most)


Field = tuple[Column, Callable[[T], str]]  # a column and its text for a record


class Remark(NamedTuple):
    """The last cell of a row. A remark that does not fit shows `short` in the row and `rest` on a line below."""

    short: str
    rest: str = ""

    @property
    def whole(self) -> str:
        return ": ".join(part for part in self if part)


def print_json(value: Any) -> None:
    """The wire types, indented."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8":
        import json

        text = json.dumps(json.loads(text), indent=2)  # \\u00e9: complete in any encoding
    sys.stdout.write(text + "\n")


def terminal_width() -> int:
    """COLUMNS, the terminal's width, or 80."""
    return shutil.get_terminal_size((80, 24)).columns


def print_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], header: bool = True, wide: bool = False
) -> None:
    """One line for each row. A narrow terminal cuts flexible columns first; a pipe or a file cuts only these."""
    for line in _table_lines(columns, list(rows), header, wide):
        print(line)


def print_records(fields: Sequence[Field[T]], records: Iterable[T], header: bool = True, wide: bool = False) -> None:
    rows = [[text(record) for _, text in fields] for record in records]
    print_table([column for column, _ in fields], rows, header, wide)


def print_remarked(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    remarks: Sequence[Remark],
    header: bool = True,
    wide: bool = False,
) -> None:
    """A table whose last column has remarks. Without a header there is one line for each row, cut to the width."""
    taken = sum(2 + column.width(row[place] for row in rows) for place, column in enumerate(columns[:-1]))
    room = MAX_WIDTH if wide or not header else terminal_width() - taken
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
            width = terminal_width()
            print(
                textwrap.fill(safe(remark.rest), width, initial_indent=REMARK_INDENT, subsequent_indent=REMARK_INDENT)
            )


def _table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], header: bool, wide: bool) -> list[str]:
    from rich.table import Table
    from rich.text import Text

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
        cells = zip(columns, map(safe, row), strict=True)
        table.add_row(
            *(
                Text(text, _style(text) if column.state else "", no_wrap=True, overflow="ellipsis")
                for column, text in cells
            )
        )
    has_width = bool(os.environ.get("COLUMNS")) or sys.stdout.isatty()
    return _lines(table, wide, 0 if has_width else _min_width(columns, rows))


def _min_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Width of a table in which only flexible columns are cut."""
    widths = [column.width(row[place] for row in rows) for place, column in enumerate(columns)]
    limits = [max(MIN_FLEXIBLE, len(column.title)) if column.flexible else MAX_WIDTH for column in columns]
    return sum(2 + min(width, limit) for width, limit in zip(widths, limits, strict=True)) - 2


def _style(text: str) -> str:
    return STATE_STYLES.get(text.partition(":")[0], "")


def print_rich(renderable: RenderableType) -> None:
    for line in _lines(renderable):
        print(line)


def _lines(renderable: RenderableType, wide: bool = False, least: int = 0) -> list[str]:
    """Lines without trailing blanks. No markup and no highlighting: the text of a user is printed as it is."""
    from rich.console import Console

    width = MAX_WIDTH if wide else max(least, terminal_width())
    console = Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
    with console.capture() as captured:
        console.print(renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


def wrapped_table(rows: Iterable[Sequence[str | tuple[str, str]]], titles: Sequence[str]) -> RenderableType:
    """Rows of texts, some with a style. The last text of a row wraps and is never cut. No header if all titles are
    empty."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(titles), header_style="bold", padding=(0, 2, 0, 0))
    for title in titles[:-1]:
        table.add_column(title, no_wrap=True)
    table.add_column(titles[-1], overflow="fold")
    for row in rows:
        cells = ((cell, "") if isinstance(cell, str) else cell for cell in row)
        table.add_row(*(Text(safe(text), style) for text, style in cells))
    return table


def facts_table(facts: Iterable[tuple[str, str]], indent: int = 0) -> RenderableType:
    """`label  text` lines with hanging indents. Facts with an empty text are left out."""
    style = "" if indent else "bold"
    return wrapped_table((((" " * indent + label, style), text) for label, text in facts if text), ("", ""))


def print_facts(facts: Iterable[tuple[str, str]], indent: int = 0) -> None:
    print_rich(facts_table(facts, indent))


def heading(text: str) -> None:
    from rich.text import Text

    print_rich(Text(safe(text), "bold"))


@contextlib.contextmanager
def _announced(text: str, quiet: bool) -> Iterator[None]:
    from carma.cli.error_output import complain

    timer = threading.Timer(ANNOUNCED_AFTER_S, complain, (f"{text} ...",))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def spinner(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line with the elapsed time on stderr; without a terminal one line if it takes longer than two
    seconds. Yields a function that replaces the text."""
    if quiet or not sys.stderr.isatty():
        with _announced(text, quiet):
            yield lambda _text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda new: progress.update(task, description=new)


def safe(text: str) -> str:
    """The text without control characters: a name or a command must not control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text.replace("\n", " "))


def moment(at: float | None) -> str:
    """Local time; with the date unless it is today's."""
    if at is None:
        return ""
    then = datetime.datetime.fromtimestamp(at)
    return then.strftime("%H:%M:%S" if then.date() == datetime.date.today() else "%Y-%m-%d %H:%M")
