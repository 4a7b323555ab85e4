"""Pages with blocks that are made from results: written anew, or checked."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def filled(text: str, mark: str, inside: str) -> str:
    """The page with that between its two remarks."""
    found = re.search(rf"(<!-- {mark}: [^\n]*-->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no place for {mark}")
    return text[: found.start(2)] + inside + text[found.end(2) :]


def renew(tool: str, what: str | None, arguments: list[str], pages: Callable[[], Mapping[Path, str]]) -> int:
    """The command line of `python -m TOOL`: exit 1 where --check finds a page that is not as it should be."""
    parser = argparse.ArgumentParser(prog=f"python -m {tool}", description=what)
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
