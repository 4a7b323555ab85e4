"""Writes docs/reference from the program: `python -m tools.reference`. With `--check` it only compares.

Each page is generated from the table that the program itself uses (verbs, settings, routes, errors). The tables of the
states of a task in docs/architecture.md and of the metrics in docs/metrics.md are generated too.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from carma.core.model.transitions import TRANSITIONS
from carma.daemon.metrics.families import FAMILIES
from carma.wire import openapi
from tools import pages_api, pages_cli, pages_errors, pages_settings
from tools.markdown import code, placed, table

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE = DOCS / "reference"
SHOWN_LINES = 12  # of each page's difference


def _openapi() -> str:
    return msgspec.json.format(msgspec.json.encode(openapi.document(), order="sorted"), indent=1).decode() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": pages_cli.page,
    "settings.md": pages_settings.page,
    "api.md": pages_api.page,
    "errors.md": pages_errors.page,
    "openapi.json": _openapi,
}


def _states() -> str:
    rows = [
        (row.before.__name__ if row.before else "(none)", row.event.__name__, row.after.__name__, row.meaning)
        for row in TRANSITIONS
    ]
    return "\n" + table(("status", "event", "next status", "meaning"), rows) + "\n"


def _metrics() -> str:
    rows = [
        (code(family.name), family.kind, ", ".join(map(code, family.labels)), family.text)
        for family in FAMILIES.values()
    ]
    return "\n" + table(("metric", "kind", "labels", "meaning"), rows) + "\n"


def _tables() -> dict[Path, str]:
    """The pages with a generated table, with their expected texts."""
    return placed([(DOCS / "architecture.md", "states", _states()), (DOCS / "metrics.md", "metrics", _metrics())])


def stale(directory: Path = REFERENCE) -> list[str]:
    """A line for each page that is missing or differs, with the beginning of the difference."""
    found: list[str] = []
    for name, make in PAGES.items():
        file = directory / name
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        if old != (new := make()):
            found.append(f"{name} is not up to date" if old else f"{name} is not there")
            differences = difflib.unified_diff(old.splitlines(), new.splitlines(), "found", "expected", n=0)
            found.extend(list(differences)[:SHOWN_LINES] if old else [])
    tables = _tables().items()
    found.extend(f"{path.name} is not up to date" for path, text in tables if path.read_text(encoding="utf-8") != text)
    extra = {file.name for file in directory.glob("*")} - set(PAGES)
    return [*found, *(f"{name} is not made by this program" for name in sorted(extra))]


def write(directory: Path = REFERENCE) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (directory / name).write_text(make(), encoding="utf-8")
    for path, text in _tables().items():
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    if not parser.parse_args(arguments).check:
        write()
        return 0
    problems = stale()
    if problems:
        print("\n".join(problems), file=sys.stderr)
        print("docs/reference is not up to date; run: python -m tools.reference", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
