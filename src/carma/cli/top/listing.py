"""A table that draws only its visible rows, and of these only the ones that changed: 500 tasks cost no more than 20.

The cursor is on a record, not on a row: it stays on its task when the order changes. Column widths depend on the width
of the terminal only, so that nothing moves sideways when a figure gets longer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from carma.cli.output import safe

T = TypeVar("T")
Text = str | Sequence[tuple[str, str]]  # plain, or parts with their styles
MISSING = "–"
HEADER, FOCUSED, CURSOR = Style(underline=True), Style(underline=True, bold=True), Style(reverse=True)


class Field(NamedTuple, Generic[T]):
    title: str
    width: int  # the least, of a field that can be wider
    text: Callable[[T, int], Text]  # of a record, in that width
    most: int = 0  # greatest width; 0: the width is fixed
    right: bool = False
    order: Callable[[T], Any] | None = None  # sorts by this; None in it stands at the end
    from_width: int = 0  # narrower terminals do not show it


class Listing(ScrollView, Generic[T], can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("enter", "open", show=False),
    ]
    DEFAULT_CSS = "Listing { scrollbar-size: 0 0; height: 4; background: ansi_default; }"

    class Opened(Message):
        def __init__(self, record: Any) -> None:
            super().__init__()
            self.record = record

    def __init__(self, title: str, fields: Sequence[Field[T]], key: Callable[[T], Hashable], id: str) -> None:
        super().__init__(id=id)
        self._title, self._fields, self._key = title, fields, key
        self._records: Sequence[T] = ()
        self.rows: list[T] = []
        self.wanted: Callable[[T], bool] = lambda _record: True
        self._at: Hashable = None  # key of the record under the cursor
        self._sorted_by: int | None = None  # index of the field
        self._reverse = False
        self._drawn: dict[int, Strip] = {}

    # Records.

    def show(self, records: Sequence[T]) -> None:
        place = self._place
        self._records = records
        self.rows = [record for record in records if self.wanted(record)]
        if self._sorted_by is not None:
            self.rows = self._sorted(self.rows, self._fields[self._sorted_by].order)
        if self.rows and self._place is None:  # its record is gone: the next one takes its place
            self._at = self._key(self.rows[min(place or 0, len(self.rows) - 1)])
        self.virtual_size = Size(self.size.width, len(self.rows) + 1)
        self._follow_cursor()
        self._redraw()

    def _sorted(self, rows: list[T], order: Callable[[T], Any] | None) -> list[T]:
        assert order is not None
        known = [(value, record) for record in rows if (value := order(record)) is not None]
        known.sort(key=lambda pair: pair[0], reverse=self._reverse)
        return [record for _, record in known] + [record for record in rows if order(record) is None]

    def sort(self) -> str:
        """Sort by the next column; after the last one the order is the daemon's. Returns the column's title."""
        columns = [None, *(place for place, field in enumerate(self._fields) if field.order is not None)]
        self._sorted_by = columns[(columns.index(self._sorted_by) + 1) % len(columns)]
        self.show(self._records)
        return "the queue's order" if self._sorted_by is None else self._fields[self._sorted_by].title

    def reverse(self) -> None:
        self._reverse = not self._reverse
        self.show(self._records)

    # The cursor.

    @property
    def _place(self) -> int | None:
        return next((place for place, record in enumerate(self.rows) if self._key(record) == self._at), None)

    @property
    def current(self) -> T | None:
        place = self._place
        return None if place is None else self.rows[place]

    def action_move(self, rows: int) -> None:
        if self.rows:
            place = max(0, min(len(self.rows) - 1, (self._place or 0) + rows))
            self._at = self._key(self.rows[place])
            self._follow_cursor()
            self._redraw()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 2))

    def action_open(self) -> None:
        if self.current is not None:
            self.post_message(self.Opened(self.current))

    def _follow_cursor(self) -> None:
        place, shown = self._place or 0, max(1, self.size.height - 1)
        first = min(max(self.scroll_offset.y, place - shown + 1), place, max(0, len(self.rows) - shown))
        if first != self.scroll_offset.y:
            self.scroll_to(y=first, animate=False, immediate=True)

    # Drawing.

    def on_resize(self) -> None:
        self.show(self._records)

    def on_focus(self) -> None:
        self._redraw()

    def on_blur(self) -> None:
        self._redraw()

    def _redraw(self) -> None:
        """Refresh the lines that changed."""
        for y in range(self.size.height):
            if self._line(y) != self._drawn.get(y):
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        strip = self._drawn[y] = self._line(y)
        return strip

    def _line(self, y: int) -> Strip:
        width = self.size.width
        columns = columns_of(self._fields, width - 1)  # the last cell is for the arrows
        if y == 0:
            return self._header(columns, width)
        place = y - 1 + self.scroll_offset.y
        if place >= len(self.rows):
            return Strip.blank(width)
        record = self.rows[place]
        strip = _strip([(field, size, field.text(record, size)) for field, size in columns], width)
        at_cursor = self.has_focus and self._key(record) == self._at
        return Strip([Segment(strip.text, CURSOR)], width) if at_cursor else strip

    def _header(self, columns: Sequence[tuple[Field[T], int]], width: int) -> Strip:
        """The title takes the place of the first columns' titles as far as it needs."""
        title = f"{self._title} {len(self.rows)}"
        if len(self.rows) != len(self._records):
            title += f" of {len(self._records)}"
        line = ""
        for field, size in columns:
            text = _fitted(self._titled(field, size), size, field.right)
            begins_at = len(line) + len(text) - len(text.lstrip())
            line += (text if begins_at > len(title) else " " * size) + " "
        line = title + line[len(title) :]
        below = len(self.rows) - self.scroll_offset.y - (self.size.height - 1)
        more = ("↑" if self.scroll_offset.y > 0 else "") + ("↓" if below > 0 else "")
        line = set_cell_size(line, width - len(more)) + more
        return Strip([Segment(line, FOCUSED if self.has_focus else HEADER)], width)

    def _titled(self, field: Field[T], size: int) -> str:
        is_key = self._sorted_by is not None and self._fields[self._sorted_by] is field
        return field.title[: size - 1] + ("▲" if self._reverse else "▼") if is_key else field.title


def columns_of(fields: Sequence[Field[T]], width: int) -> list[tuple[Field[T], int]]:
    """The columns that fit, with their widths. The last wide column takes what is left first."""
    shown = [field for field in fields if field.from_width <= width + 1]
    left = max(0, width - sum(field.width + 1 for field in shown) + 1)
    sizes = []
    for field in reversed(shown):
        more = min(left, max(0, field.most - field.width))
        left -= more
        sizes.append((field, field.width + more))
    return sizes[::-1]


def _strip(cells: Sequence[tuple[Field[T], int, Text]], width: int) -> Strip:
    segments: list[Segment] = []
    for field, size, text in cells:
        if isinstance(text, str):
            segments.append(Segment(_fitted(safe(text), size, field.right) + " "))
        else:
            used = sum(cell_len(part) for part, _ in text)
            pad = Segment(" " * max(0, size - used))
            parts = [Segment(safe(part), Style.parse(style)) for part, style in text]
            segments += [*([pad] if field.right else []), *parts, *([] if field.right else [pad]), Segment(" ")]
    return Strip(segments).adjust_cell_length(width).simplify()


def _fitted(text: str, size: int, right: bool) -> str:
    length = cell_len(text)
    if length > size:
        return set_cell_size(text, max(0, size - 1)) + "…"
    return " " * (size - length) + text if right else text + " " * (size - length)
