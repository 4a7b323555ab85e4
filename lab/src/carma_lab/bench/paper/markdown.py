"""Tables and figures in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text to the left; a bar within a cell would end it."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def figure(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
