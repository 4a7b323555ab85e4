"""Tables and figures in Markdown, for every page that the lab writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """A bar would end the cell, a newline the row."""
    return " ".join(text.split()).replace("|", "\\|")


def figure(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
