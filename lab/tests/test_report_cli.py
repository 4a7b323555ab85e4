"""`carma run-report RUN` and `carma compare` as they are typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from carma.cli import carma
from carma_lab.runs.record import write
from lab_fixtures.recorded_runs import about, point, run, task

COURSE = [point(30.0 * place) for place in range(1, 21)]


@pytest.fixture(autouse=True)
def _in_a_directory_with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    tasks = [task(1, 0.0, 0.0, 300.0, user="ana"), task(2, 0.0, 100.0, 600.0, user="ben")]
    write(run(*tasks, course=COURSE, of=about(policy="exclusive"), energy_j=7.2e6), Path("one.json"))
    write(run(task(1, 0.0, 0.0, 150.0), task(2, 0.0, 0.0, 300.0), energy_j=3.6e6), Path("two.json"))


def typed(*words: str) -> Result:
    return CliRunner().invoke(carma, list(words))


def told(*words: str) -> str:
    result = typed(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_is_reported_in_tables() -> None:
    page = told("run-report", "one.json").splitlines()
    assert page[0] == "made under exclusive: 2 x card, simulated"
    assert "makespan       10:00" in page
    assert "energy         2.0 kWh" in page
    rows = {line.split()[0]: line.split()[1:] for line in page if line}
    assert rows["wait"] == ["50", "s", "50", "s", "01:35", "01:40", "2"]
    assert rows["slowdown"] == ["4.00", "x", "4.00", "x", "4.90", "x", "5.00", "x", "2"]
    assert rows["ana"] == ["1", "05:00", "0", "s", "05:00", "3.00", "3.00", "3.00"]
    assert rows["Jain's"][1:3] == ["finish-time", "0.900,"]
    assert rows["10:00"] == ["50", "20", "30", "2.0", "GiB", "200", "2.0", "1.0"]
    assert max(map(len, page)) <= 100


def test_a_run_as_json_has_spreads_and_users() -> None:
    found = json.loads(told("run-report", "one.json", "--json"))
    assert found["figures"]["makespan_s"] == 600.0
    assert found["completion_s"] == {"count": 2, "mean": 450.0, "p50": 450.0, "p95": 585.0, "max": 600.0}
    assert [user["user"] for user in found["fairness"]["users"]] == ["ana", "ben"]
    assert json.loads(told("run-report", "two.json", "--json"))["fairness"] is None


def test_pictures_and_the_page_are_named_on_standard_error() -> None:
    result = typed("run-report", "two.json", "--out", "drawn", "--html", "two.html")
    assert result.exit_code == 0, result.output
    written = result.stderr.split()
    assert written == ["drawn/spread.png", "drawn/spread.svg", "drawn/gantt.png", "drawn/gantt.svg", "two.html"]
    assert all(Path(name).stat().st_size > 1_000 for name in written)


@pytest.mark.parametrize("option", ["--out", "--html"])
@pytest.mark.parametrize("words", [("compare", "one.json", "two.json"), ("run-report", "one.json")])
def test_without_matplotlib_the_tables_come_before_the_hint(
    words: tuple[str, ...], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = told(*words)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = typed(*words, option, "drawn")
    assert (result.exit_code, result.stdout) == (1, tables)
    assert "pip install matplotlib" in result.stderr
    assert not Path("drawn").exists()


@pytest.mark.parametrize(
    ("policy", "demand"), [("goodput", "history"), ("lucid", "none"), ("goodput", ""), ("magm", "measured")]
)
def test_a_report_names_the_known_demand_and_run_time_under_every_policy(policy: str, demand: str) -> None:
    write(run(task(1, 0.0, 0.0, 150.0), of=about(policy=policy, demand=demand)), Path("known.json"))
    line = next(line for line in told("run-report", "known.json").splitlines() if line.startswith("with "))
    known = f"demand: {demand}, " if demand else ""
    assert line.split(maxsplit=1)[1] == f"memory: measured, {known}mechanism: mps"


def test_runs_side_by_side() -> None:
    page = told("compare", "one.json", "two.json").splitlines()
    assert page[0].split() == ["made", "exclusive", "magm", "ratio"]
    assert page[1].split() == ["makespan", "10:00", "05:00", "0.500"]
    assert page[2].split() == ["mean", "wait", "50", "s", "0", "s", "0.000"]
    assert any(line.split() == ["energy", "2.0", "kWh", "1.0", "kWh", "0.500"] for line in page)
    assert any(line.split()[:3] == ["2", "task-2", "magm"] for line in page)
    found = json.loads(told("compare", "one.json", "two.json", "--json"))
    assert found["ratios"]["made"]["magm"]["makespan_s"] == 0.5


def test_a_comparison_is_drawn() -> None:
    result = typed("compare", "one.json", "two.json", "--out", "drawn", "--html", "both.html")
    assert result.exit_code == 0, result.output
    assert result.stderr.split() == [
        "drawn/bars.png", "drawn/bars.svg", "drawn/cloud.png", "drawn/cloud.svg", "both.html",
    ]  # fmt: skip


def test_names_that_leave_no_room_for_figures_stand_above_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write(run(task(1, 0.0, 0.0, 150.0), of=about(policy="magm", seed=7, memory="gpumemnet")), Path("three.json"))
    page = told("compare", "one.json", "two.json", "three.json").splitlines()
    assert page[:3] == [
        "run 1  exclusive, memory measured, seed 0",
        "run 2  magm, memory measured, seed 0",
        "run 3  magm, memory gpumemnet, seed 7",
    ]
    assert page[4].split() == ["made", "run", "1", "run", "2", "ratio", "run", "3", "ratio"]
    assert page[5].startswith("makespan ")
    assert "…" not in "".join(page)


def test_of_tasks_that_differ_most_the_name_is_cut_and_not_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for trace in ("first", "second"):
        for policy, end in (("exclusive", 90_000.0), ("magm", 80_000.0)):
            long = task(1, 0.0, 10_000.0, end, name="a_task_with_a_long_name_" * 2)
            write(run(long, of=about(policy=policy, trace=trace)), Path(f"{trace}-{policy}.json"))
    files = [f"{trace}-{policy}.json" for trace in ("first", "second") for policy in ("exclusive", "magm")]
    page = told("compare", *files).splitlines()
    place = next(place for place, line in enumerate(page) if line.startswith("most different"))
    assert page[place].split()[2:] == ["trace", "under", "completion", *["first", "run"], "waited", *["first", "run"]]
    first, second = (line.split() for line in page[place + 1 : place + 3])
    assert first[1].endswith("…")
    assert (first[2:4], second[2:4]) == (["first", "magm"], ["second", "magm"])
    assert not any("…" in cell for cell in first[2:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run-report", "missing.json"], "No such file"),
        (["run-report", "bad.json"], "bad.json is not a run"),
        (["run-report", "one.json", "--since", "1h"], "for the tasks of a server"),
        (["compare", "one.json"], "at least two runs"),
        (["compare", "one.json", "one.json"], "same settings"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str) -> None:
    Path("bad.json").write_text("{}")
    result = typed(*words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99, "more": 1}, "one.json was written by a newer CARMA (format 99, not 1)"),
        ({"format": 0}, "one.json is not a run: format 0 does not exist"),
        ({"tasks": []}, "one.json is not a run: it has no tasks"),
        ({"figures": {"makespan_s": -5.0}}, "one.json is not a run: figures.makespan_s is -5, below 0"),
    ],
)
def test_a_run_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    kept = json.loads(Path("one.json").read_text())
    figures = change.get("figures")
    change = {**change, "figures": {**kept["figures"], **figures}} if isinstance(figures, dict) else change
    Path("one.json").write_text(json.dumps({**kept, **change}))
    for words in (["run-report", "one.json"], ["compare", "two.json", "one.json"]):
        result = typed(*words)
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_task_that_ends_before_it_begins_is_refused() -> None:
    kept = json.loads(Path("one.json").read_text())
    kept["tasks"][1]["ended_s"] = -1.0
    Path("one.json").write_text(json.dumps(kept))
    assert "task 2 ends before it begins" in typed("run-report", "one.json").stderr
