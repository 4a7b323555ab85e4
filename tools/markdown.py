"""Markdown in the few forms that the reference pages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MADE = "<!-- Made by `python -m tools.reference`; changes here are lost. -->\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell(text) for text in line) + " |\n" for line in lines)


def cell(text: str) -> str:
    """Bars would end the cell, newlines the row."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def paragraphs(text: str | None) -> str:
    """A docstring as paragraphs, each one line."""
    parts = (" ".join(part.split()) for part in (text or "").replace("\b", "").split("\n\n"))
    return "\n\n".join(part for part in parts if part)
