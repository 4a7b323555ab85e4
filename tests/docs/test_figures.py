"""No figure in the README or on the pages of results is typed by hand and left: each is the one in the file of results
that it names, rounded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates
from tests.docs.markdown import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
H200_PAGE = (ROOT / "lab" / "results" / "h200" / "README.md").read_text(encoding="utf-8")
SHARING_PAGE = (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8")
SCALE = {"h": 3600.0, "MJ": 1e6, "": 1.0, "%": 1.0}


def _json(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "lab" / "results" / name).read_text(encoding="utf-8"))
    return read


def _rows(first_line: str, page: str = README) -> list[list[str]]:
    """The cells of the tables that begin so, without their two head lines."""
    tables = [part.split("\n\n", 1)[0] for part in page.split(f"{first_line}\n")[1:]]
    assert tables, f"there is no table {first_line}"
    lines = [line for table in tables for line in table.splitlines()[1:]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _same(cell: str, value: float) -> bool:
    """`26.0 %` is any value that rounds to it, to as many places as are written."""
    number = re.match(r"[+-]?\d+(?:\.(\d+))?", cell)
    assert number is not None, f"{cell!r} is not a figure"
    places = len(number[1] or "")
    return float(number[0]) == round(value, places)


DAEMON = _rows("| what | measured | figure |")
DEMO = _rows("| what | exclusive | collocated | change | published | figure |")
H200 = _rows("| what | H200 | published (A100) | figure |")
H200_MORE = _rows("| what | H200 | figure |", H200_PAGE)
RUNGS = _rows(
    "| rung | grower stopped, seconds after passing its booking | after threatening what others booked |", H200_PAGE
)
MODELS = _rows("| model | mean | nine in ten within | figure |", SHARING_PAGE)
UNITS = {"": 1.0, "x": 1.0, "J": 1.0, "kJ": 1000.0, "s": 1.0, "MiB": 1.0, "GiB": 1024.0, "% of a core": 1.0, "%": 0.01}
# What a member of a list goes by: `rounds.mps` is the one whose rung is mps, `points.small` those whose task is small.
NAMES = ("task", "mechanism", "copies", "rung", "look", "name", "size", "percent")
SUMS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "count": len, "median": median, "sum": sum}


def h200_figure(name: str) -> float:
    """`oom.rounds.mps.grower_stopped_s`: a file in lab/results/h200, then down its members. A list is narrowed by a
    name of
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


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row[-1])
def test_an_error_of_the_sharing_model_is_the_one_that_was_found(row: list[str]) -> None:
    for cell, what in ((row[1], "mae"), (row[2], "p90")):
        value = h200_figure(f"{row[3].strip('`')}.{what}")
        assert _same(cell, value), f"{row[0]}: {cell}, but {what} is {value} in the file"


def _said(pattern: str) -> list[float]:
    """The numbers that a sentence of the page says, wherever its lines are folded."""
    found = re.search(pattern, " ".join(H200_PAGE.split()))
    assert found is not None, f"the page does not say {pattern!r}"
    return [float(text) for text in found.groups()]


def test_activity_is_said_to_grow_as_the_images_do() -> None:
    told = _said(r"Eight copies .* make ([\d.]+) times the images of one, and show ([\d.]+) times its SM activity")
    points = {copies: f"collocation.points.small.mps.{copies}" for copies in (1, 8)}
    for factor, what in zip(told, ("images_per_s", "sm_active"), strict=True):
        assert factor == round(h200_figure(f"{points[8]}.{what}") / h200_figure(f"{points[1]}.{what}"), 1)


def test_the_drift_of_tasks_alone_is_as_in_the_table() -> None:
    alone: dict[str, list[dict[str, Any]]] = {}
    for row in _json("h200/interference-mps.json")["rows"]:
        if len(row["tasks"]) == 1 and row["percent"] == [100]:
            alone.setdefault(row["tasks"][0], []).append(row)
    assert {len(rows) for rows in alone.values()} == {3}
    drifts: dict[bool, list[float]] = {True: [], False: []}
    for rows in alone.values():
        rates = [row["rates"][0] for row in rows]
        full = min(row["gr_active"] for row in rows) > 0.99
        drifts[full].append(100 * (max(rates) / min(rates) - 1))
    told = _said(r"up to (\d+) % faster than the slowest \(median of those tasks (\d+) %\).* stayed within (\d+) %")
    assert told[:2] == [round(max(drifts[False])), round(median(drifts[False]))]
    assert max(drifts[True]) < told[2]


def test_what_thread_percentages_cost_is_as_in_the_file() -> None:
    told = _said(r"gives up (\d+) % of its speed at 25 % of the threads, and (\d+) % at 50 %")
    for percent, share in zip((25, 50), told, strict=True):
        before, after = (
            h200_figure(f"interference-mps.percentages.{percent}.heavy_{when}") for when in ("before", "after")
        )
        assert share == round(100 * (1 - after / before))


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
