"""No figure in the README is typed by hand and left: each is the one in the file of results that it names, rounded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from carma.core.model import Demand
from carma.core.sharing import progress_rates
from tests.docs.markdown import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
H200_PAGE = (ROOT / "results" / "h200" / "README.md").read_text(encoding="utf-8")
SCALE = {"h": 3600.0, "MJ": 1e6, "": 1.0, "%": 1.0}


def _json(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    return read


def _rows(first_line: str, page: str = README) -> list[list[str]]:
    """The cells of the table that begins so, without its two head lines."""
    table = page[page.index(first_line) :].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def _same(cell: str, value: float) -> bool:
    """`26.0 %` is any value that rounds to it, to as many places as are written."""
    number = re.match(r"[+-]?\d+(?:\.(\d+))?", cell)
    assert number is not None, f"{cell!r} is not a figure"
    places = len(number[1] or "")
    return float(number[0]) == round(value, places)


DAEMON = _rows("| what | measured | figure |")
DEMO = _rows("| what | exclusive | collocated |")
H200 = _rows("| what | H200 | published | figure |")
H200_MORE = _rows("| what | H200 | figure |", H200_PAGE)
RUNGS = _rows("| rung | grower stopped", H200_PAGE)
UNITS = {"": 1.0, "x": 1.0, "J": 1.0, "s": 1.0, "MiB": 1.0, "GiB": 1024.0, "% of a core": 1.0, "%": 0.01}
# What a member of a list goes by: `rounds.mps` is the one whose rung is mps, `points.small` those whose task is small.
NAMES = ("task", "mechanism", "copies", "rung", "look", "name", "size", "percent")
SUMS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "count": len, "median": median, "sum": sum}


def h200_figure(name: str) -> float:
    """`oom.rounds.mps.grower_stopped_s`: a file in results/h200, then down its members. A list is narrowed by a name of
    its members, asked for a field of each, or summed up."""
    file, *words = name.strip("`").split(".")
    value: Any = _json(f"h200/{file}.json")
    for word in words:
        value = _below(value, word)
    assert isinstance(value, int | float), f"{name} is no figure: {value!r}"
    return float(value)


def _below(value: Any, word: str) -> Any:
    if isinstance(value, dict):
        return value[word]
    assert isinstance(value, list), f"there is no {word} in {value!r}"
    if word in SUMS:
        return SUMS[word](value)
    named = [one for one in value if any(str(one.get(key)) == word for key in NAMES)]
    if named:
        return named[0] if len(named) == 1 else named
    return [one[word] for one in value]


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


@pytest.mark.parametrize("row", [*H200, *H200_MORE], ids=lambda row: row[-1])
def test_a_figure_of_the_h200_is_the_measured_one(row: list[str]) -> None:
    what, cell, name = row[0], row[1], row[-1]
    value = h200_figure(name)
    assert _same(cell, value / UNITS[cell.partition(" ")[2]]), f"{what}: {cell}, but {value} in the file"


@pytest.mark.parametrize("row", RUNGS, ids=lambda row: row[0])
def test_how_fast_each_rung_was_is_as_in_the_file(row: list[str]) -> None:
    (found,) = [one for one in _json("h200/oom.json")["rounds"] if f"`{one['rung']}`" == row[0]]
    for cell, key in ((row[1], "stopped_after_passing_s"), (row[2], "stopped_after_threatening_s")):
        assert (cell == "") if found[key] is None else _same(cell, found[key])


def test_what_is_said_of_the_provoked_ooms_is_so() -> None:
    rounds = {one["rung"]: one for one in _json("h200/oom.json")["rounds"]}
    for rung, one in rounds.items():
        guilty = {"filler"} if rung == "nothing" else {"grower"}
        assert {failed["name"] for failed in one["failed"]} == guilty
        assert {each["outcome"] for each in (one["grower"], *one["innocents"])} == {"succeeded"}
    assert rounds["nothing"]["failed"][0]["blame"] == "neighbour"


@pytest.mark.parametrize("row", H200, ids=lambda row: row[-1])
def test_what_was_published_is_as_in_the_file(row: list[str]) -> None:
    words = row[-1].strip("`").split(".")
    if words[0] != "collocation" or "mps" not in words:
        assert row[2] == "-"
        return
    least, most = _json("h200/collocation.json")["published"][words[2]]
    assert row[2] == (f"{most:g} x" if least == most else f"{least:g}-{most:g} x")


def test_a_figure_is_found_by_its_name() -> None:
    points = [{"task": "small", "copies": 1, "speed": 1.0}, {"task": "small", "copies": 8, "speed": 7.5}]
    assert _below(_below(points, "8"), "speed") == 7.5
    assert _below(_below(_below(points, "small"), "speed"), "max") == 7.5
    assert _below(points, "count") == 2
    with pytest.raises(KeyError):
        _below(points, "nosuch")


def test_the_tables_have_what_they_are_there_for() -> None:
    assert len(H200) >= 4
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
