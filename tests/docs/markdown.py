"""What the tests of the documentation read out of a Markdown file: fenced blocks, links, headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$")


class Block(NamedTuple):
    line: int
    info: str  # "console", "console no-run", "python"
    text: str


def documents() -> list[Path]:
    """Every page that is written for people, the made ones and those of results included."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "lab" / "results").glob("*/README.md"))]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    start: int | None = None
    info, inside = "", [""]
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if start is None and match:
            start, info, inside = number, match[1].strip(), []
        elif start is not None and match:
            found.append(Block(start, info, "\n".join(inside)))
            start = None
        elif start is not None:
            inside.append(line)
    assert start is None, f"the fence that opens in line {start} is never closed"
    return found


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    kept: list[str] = []
    fenced = False
    for line in text.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            kept.append(line)
    return "\n".join(kept)


def links(text: str) -> list[str]:
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """The anchors of its headings, by the rule that forges follow: lower case, blanks to dashes, the rest dropped."""
    found: set[str] = set()
    for line in prose(text).splitlines():
        match = _HEADING.match(line)
        if match:
            plain = re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-")
            number = sum(1 for known in found if re.fullmatch(re.escape(plain) + r"(-\d+)?", known))
            found.add(f"{plain}-{number}" if number else plain)
    return found
