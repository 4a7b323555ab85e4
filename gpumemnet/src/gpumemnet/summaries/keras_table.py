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


def box_rows(lines: Sequence[str], header: int) -> tuple[list[TableRow], int]:
    """The rows, and the line where the table ends."""
    names = [cell.strip() for cell in _BARS.split(lines[header])[1:-1]]
    columns = _columns(names, lines, header)
    rows: list[TableRow] = []
    cells: list[list[str]] = []
    begun = number = header
    for number in range(header + 1, len(lines)):
        line = lines[number]
        if _BOX_RULE.fullmatch(line):
            if cells:
                rows.append(_box_row(begun, cells, columns))
            cells = []
            if line.lstrip()[:1] in ("└", "┗", "╘") or (line.lstrip()[:1] == "+" and rows):
                return rows, number + 1
            continue
        parts = _BARS.split(line)[1:-1]
        if len(parts) != len(names):
            raise bad(number, line, _CUT if parts else "not a row of the table that begins above")
        begun = begun if cells else number
        cells.append(parts)
    raise cut_off(header, lines[header], "the table that begins here")


def _box_row(line: int, cells: list[list[str]], columns: dict[str, int]) -> TableRow:
    branch = _BRANCH.match(cells[0][columns["Layer (type)"]])
    return _row(line, 1 + len(branch[1]) // 3 if branch else 0, cells, columns, "└ ")


def _row(line: int, depth: int, cells: list[list[str]], columns: dict[str, int], marks: str) -> TableRow:
    """Joins the lines of each cell; `marks` draw the nesting before the name."""

    def joined(name: str, marks: str = " ") -> str:
        return "".join(parts[columns[name]].strip().strip(marks) for parts in cells)

    connected = joined("Connected to") if "Connected to" in columns else None
    return TableRow(line, depth, joined("Layer (type)", marks), joined("Output Shape"), joined("Param #"), connected)


def plain_rows(lines: Sequence[str], header: int) -> tuple[list[TableRow], int]:
    """The rows of Keras 2, and the line where the table ends."""
    found = list(_NAME.finditer(lines[header]))
    columns = _columns([name[0] for name in found], lines, header)
    starts = [name.start() for name in found]
    ends = [*starts[1:], 10**9]
    rows: list[TableRow] = []
    cells: list[list[str]] = []
    begun = header
    for number, text in _body(lines, header):
        if text is None:
            if cells:
                rows.append(_plain_row(begun, lines[begun], cells, columns))
            cells = []
            continue
        parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        if cells and parts[columns["Param #"]].strip():  # if blank lines are missing
            rows.append(_plain_row(begun, lines[begun], cells, columns))
            cells = []
        begun = begun if cells else number
        cells.append(parts)
    last = _end(lines, header)
    if cells:
        rows.append(_plain_row(begun, lines[begun], cells, columns))
    return rows, last


def _body(lines: Sequence[str], header: int) -> Iterator[tuple[int, str | None]]:
    """Numbered lines; None at the end of a row: a blank line or a rule. The count is in the row's first line."""
    for number in range(header + 1, _end(lines, header)):
        line = lines[number]
        text = line.rstrip().rstrip("|¯")
        if not text.strip(" |¯") or is_rule(line):
            yield number, None
        else:
            yield number, text


def _end(lines: Sequence[str], header: int) -> int:
    """The second rule of `=`."""
    doubles = (number for number in range(header + 1, len(lines)) if is_rule(lines[number]) and "=" in lines[number])
    next(doubles, None)
    end = next(doubles, None)
    if end is None:
        raise cut_off(header, lines[header], "the table that begins here")
    return end


def _plain_row(line: int, text: str, cells: list[list[str]], columns: dict[str, int]) -> TableRow:
    return _row(line, len(text) - len(text.lstrip("|")), cells, columns, " |")


def _columns(names: Sequence[str], lines: Sequence[str], header: int) -> dict[str, int]:
    columns = {name: place for place, name in enumerate(names)}
    if any(name not in columns for name in _HEAD):
        raise bad(header, lines[header], _CUT)
    return columns
