"""Reads the rows of a Keras summary's table of any version and joins cells that were broken over lines.

Keras 3 draws a box (`│ conv1 (Conv2D) │ …`), one row between two rules. Keras 2 has columns at fixed places and blank
lines between rows, which may be missing; before 2.6 it has rules, and cuts long cells. Nested models are indented (3)
or between bars (2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumemnet.summaries.text import bad, cut_off, is_rule

_BARS = re.compile("[│┃|]")
_BOX_RULE = re.compile(r"\s*[┏┡├└┗┢╞╘+|][━─┳╇┼┴┻═+|\-]+\s*.?\s*")
_NAME = re.compile(r"\S+(?: \S+)*")
_BRANCH = re.compile(r"(\s*)└\s*")
_HEAD = ("Layer (type)", "Output Shape", "Param #")
_CUT = "the summary is cut at the width of the terminal; print it with a smaller line_length"


class TableRow(NamedTuple):
    line: int
    depth: int  # nesting of models
    name: str  # with the class in brackets
    shape: str
    parameters: str
    connected: str | None  # None: there is no such column


def is_box(header: str) -> bool:
    return _BARS.search(header) is not None


def table_rows(lines: Sequence[str], header: int) -> tuple[list[TableRow], int]:
    """The rows, and the line where the table ends."""
    boxed = is_box(lines[header])
    starts = [name.start() for name in _NAME.finditer(lines[header])]
    names = [cell.strip() for cell in _BARS.split(lines[header])[1:-1]] if boxed else _NAME.findall(lines[header])
    columns = {name: place for place, name in enumerate(names)}
    if any(name not in columns for name in _HEAD):
        raise bad(header, lines[header], _CUT)
    entries = list(_box_entries(lines, header, len(names)) if boxed else _plain_entries(lines, header, starts))
    rows: list[TableRow] = []
    cells: list[list[str]] = []
    begun = header
    for number, parts in (*entries, (0, None)):
        # In a table without a box only the first line of a row has a count; blank lines between rows may be missing.
        if cells and (parts is None or (not boxed and parts[columns["Param #"]].strip())):
            rows.append(_row(begun, "" if boxed else lines[begun], cells, columns))
            cells = []
        if parts is not None:
            begun = begun if cells else number
            cells.append(parts)
    return rows, entries[-1][0] + 1


def _box_entries(lines: Sequence[str], header: int, width: int) -> Iterator[tuple[int, list[str] | None]]:
    """Numbered lines as cells; None for a rule, which ends a row."""
    has_rows = False
    for number in range(header + 1, len(lines)):
        line = lines[number]
        if _BOX_RULE.fullmatch(line):
            yield number, None
            if line.lstrip()[:1] in ("└", "┗", "╘") or (line.lstrip()[:1] == "+" and has_rows):
                return
            continue
        parts = _BARS.split(line)[1:-1]
        if len(parts) != width:
            raise bad(number, line, _CUT if parts else "not a row of the table that begins above")
        has_rows = True
        yield number, parts
    raise cut_off(header, lines[header], "the table that begins here")


def _plain_entries(lines: Sequence[str], header: int, starts: Sequence[int]) -> Iterator[tuple[int, list[str] | None]]:
    """The same of Keras 2, up to the second rule of `=`; None for a blank line or a rule."""
    ends = [*starts[1:], 10**9]
    doubles = 0
    for number in range(header + 1, len(lines)):
        line = lines[number]
        text = line.rstrip().rstrip("|¯")
        doubles += is_rule(line) and "=" in line
        if doubles == 2:
            return
        is_end = not text.strip(" |¯") or is_rule(line)
        yield number, None if is_end else [text[start:end] for start, end in zip(starts, ends, strict=True)]
    raise cut_off(header, lines[header], "the table that begins here")


def _row(number: int, line: str, cells: list[list[str]], columns: dict[str, int]) -> TableRow:
    """Joins the lines of each cell. Nested models are indented before a `└` (3) or the line begins with bars (2)."""

    def joined(name: str) -> str:
        return "".join(parts[columns[name]].strip().strip(" |└") for parts in cells)

    branch = _BRANCH.match(cells[0][columns["Layer (type)"]])
    depth = 1 + len(branch[1]) // 3 if branch else len(line) - len(line.lstrip("|"))
    connected = joined("Connected to") if "Connected to" in columns else None
    return TableRow(number, depth, joined("Layer (type)"), joined("Output Shape"), joined("Param #"), connected)
