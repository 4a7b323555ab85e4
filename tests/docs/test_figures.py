"""No figure in the README is typed by hand and left: each is the one in the file of results that it names, rounded."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

import pytest

from carma.core.model import Demand
from carma.core.sharing import progress_rates
from tests.docs.markdown import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SCALE = {"h": 3600.0, "MJ": 1e6, "": 1.0, "%": 1.0}


def _json(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    return read


def _rows(first_line: str) -> list[list[str]]:
    """The cells of the table that begins so, without its two head lines."""
    table = README[README.index(first_line) :].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def _same(cell: str, value: float) -> bool:
    """`26.0 %` is any value that rounds to it, to as many places as are written."""
    number = re.match(r"[+-]?\d+(?:\.(\d+))?", cell)
    assert number is not None, f"{cell!r} is not a figure"
    places = len(number[1] or "")
    return float(number[0]) == round(value, places)


DAEMON = _rows("| what | measured | figure |")
DEMO = _rows("| what | exclusive | collocated |")


@pytest.mark.parametrize(("what", "cell", "name"), DAEMON, ids=[row[2] for row in DAEMON])
def test_a_figure_of_the_daemon_is_the_measured_one(what: str, cell: str, name: str) -> None:
    (figure,) = [found for found in _json("daemon/daemon.json")["figures"] if found["name"] == name.strip("`")]
    assert _same(cell, figure["value"]), f"{what}: {cell}, but {figure['value']} in the file"
    assert cell.split(" ", 1)[1] == figure["unit"]


@pytest.mark.parametrize("row", DEMO, ids=[row[-1] for row in DEMO])
def test_a_figure_of_the_demo_is_the_measured_one(row: list[str]) -> None:
    what, exclusive, collocated, change, published, name = (*row[:-1], row[-1].strip("`"))
    demo = _json("daemon/demo.json")
    for cell, run in ((exclusive, "exclusive"), (collocated, "collocated")):
        unit = cell.partition(" ")[2]
        assert _same(cell, demo[run][name] / SCALE[unit]), f"{what}: {cell}, but {demo[run][name]} in the file"
    assert _same(change, demo["change_percent"][name])
    known = demo["published_percent"].get(name)
    assert (published == "-") if known is None else _same(published, known)


def test_the_tables_have_what_they_are_there_for() -> None:
    assert {"`submit.one_client.p50`", "`submit.with_10000_queued.p50`", "`cpu.at_rest`", "`help.p50`"} <= {
        row[2] for row in DAEMON
    }
    assert {"`makespan_s`", "`energy_j`", "`slowdown_mean`"} <= {row[-1] for row in DEMO}


def _granted(tasks: int) -> float:
    """Total progress by the sharing model as a part of the measured one; the median over groups of so many tasks."""
    rows = [row for row in _json("h200/interference-mps.json")["rows"] if set(row["percent"]) == {100}]
    alone = {row["tasks"][0]: row for row in reversed(rows) if len(row["tasks"]) == 1}
    parts = []
    for row in rows:
        if len(row["tasks"]) == tasks:
            single = [alone[name] for name in row["tasks"]]
            measured = sum(rate / one["rates"][0] for rate, one in zip(row["rates"], single, strict=True))
            demands = [Demand(one["sm_active"], one["sm_occupancy"], one["dram_active"]) for one in single]
            parts.append(sum(progress_rates(demands)) / measured)
    return float(median(parts))


def test_how_pessimistic_the_sharing_model_is_said_to_be() -> None:
    said = re.search(r"grants pairs (\d+) %, triples (\d+) % and quadruples (\d+) %", " ".join(README.split()))
    assert said is not None
    assert [int(text) for text in said.groups()] == [round(100 * _granted(tasks)) for tasks in (2, 3, 4)]
