"""Markdown of generated pages: texts, blocks between marks, and the command line of a generator."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from carma_lab.reports.figure_list import table

__all__ = ["GENERATED", "code", "filled", "folded", "paragraphs", "placed", "renew", "table"]

GENERATED = "<!-- Made by `python -m tools.reference`; changes here are lost. -->\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def paragraphs(text: str | None) -> str:
    """A docstring as paragraphs of one line each."""
    parts = (" ".join(part.split()) for part in (text or "").replace("\b", "").split("\n\n"))
    return "\n\n".join(part for part in parts if part)


def filled(text: str, mark: str, inside: str) -> str:
    """The page with new text between `<!-- MARK: ... -->` and `<!-- end -->`."""
    found = re.search(rf"(<!-- {mark}: [^\n]*-->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no place for {mark}")
    return text[: found.start(2)] + inside + text[found.end(2) :]


def placed(places: Iterable[tuple[Path, str, str]]) -> dict[Path, str]:
    """The pages of `places` (page, mark, new text), each with its new texts."""
    made: dict[Path, str] = {}
    for page, mark, inside in places:
        made[page] = filled(made.get(page) or page.read_text(encoding="utf-8"), mark, inside)
    return made


def folded(text: str, indent: str = "") -> str:
    """The text in lines of at most 120 characters; lines after the first are indented."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def renew(tool: str, about: str | None, arguments: list[str], pages: Callable[[], Mapping[Path, str]]) -> int:
    """The command line of `python -m TOOL`: writes the pages, or with --check exits with 1 if one is out of date."""
    parser = argparse.ArgumentParser(prog=f"python -m {tool}", description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args(arguments).check
    stale = {page: text for page, text in pages().items() if text != page.read_text(encoding="utf-8")}
    root = Path(__file__).parent.parent
    for page, text in stale.items():
        if check:
            print(f"{page.relative_to(root)} is not up to date: python -m {tool}", file=sys.stderr)
        else:
            page.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0
