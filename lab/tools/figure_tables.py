"""Writes the tables of measured figures into the documentation: `python -m lab.tools.figure_tables`.

`figure_tables.toml` lists the tables: page, titles, and for each row the path of its figure, which is a file in
lab/results followed by the members that lead to the value. `--check` writes nothing and exits with 1 if a page is not
up to date. It must not contain a figure: every number comes from a file of results.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from tools.markdown import placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
TABLES = Path(__file__).with_suffix(".toml")
# How much one unit is in the units of the files of results: seconds, joules, MiB.
UNITS = {"h": 3600.0, "MJ": 1e6, "kJ": 1e3, "GiB": 1024.0}
# A member of a list is named by the value of one of these fields.
NAMES = ("task", "mechanism", "copies", "rung", "name", "size", "percent", "kind")
SUMMARIES: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "count": len, "median": median}


@cache
def results(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def figure(path: str) -> Any:
    """`h200/oom.json/rounds/mps/stopped_after_passing_s`; None where the last member does not exist."""
    folder, file, *members = path.split("/")
    value = results(f"{folder}/{file}")
    for member in members[:-1]:
        value = below(value, member)
    return value.get(members[-1]) if isinstance(value, dict) else below(value, members[-1])


def below(value: Any, member: str) -> Any:
    """A field of a struct; of a list the members of that name, a summary, or the field of each member."""
    if isinstance(value, dict):
        return value[member]
    if member in SUMMARIES:
        return SUMMARIES[member](value)
    named = [one for one in value if any(str(one.get(key)) == member for key in NAMES)]
    if named:
        return named[0] if len(named) == 1 else named
    return [one[member] for one in value]


def cell(value: Any, form: str) -> str:
    """A figure in its form, such as `{:.1f} h`; a range where there are two; "-" where there is none."""
    if value is None:
        return "-"
    if isinstance(value, list):
        low, high = value
        return cell(low, form) if low == high else f"{low:g}-{cell(high, form)}"
    unit = re.sub(r"^\{[^}]*\} ?", "", form)
    return form.format(value / UNITS.get(unit, 1.0))


def made(one: Mapping[str, Any]) -> str:
    """The rows of a table: what is measured, its figures, and in a column of its own what was published."""
    columns, rows = one.get("columns", [{}]), []
    for what, path, form, *published in one["rows"]:
        cells = [cell(figure(column.get("path", "{}").format(path)), column.get("form", form)) for column in columns]
        if one.get("published"):
            cells += [cell(figure(published[0]), one["published"]) if published else "-"]
        rows.append((what, *cells))
    return table(one["titles"], rows)


def pages() -> dict[Path, str]:
    tables = tomllib.loads(TABLES.read_text(encoding="utf-8"))["table"]
    return placed((ROOT / one["page"], one["mark"], f"\n{made(one)}\n") for one in tables)


if __name__ == "__main__":
    sys.exit(renew("lab.tools.figure_tables", __doc__, sys.argv[1:], pages))
