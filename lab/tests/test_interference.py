"""The interference study without a GPU: groups, drift, what is written, and a whole run with made-up workers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from carma.errors import Refused, Usage
from carma_lab.bench.gpu import interference
from carma_lab.bench.gpu.interference import HEAVY, LIGHT, Options, draw
from carma_lab.bench.gpu.progress import Row, by_percent, by_size, interpolated, speeds, with_solo_rates
from carma_lab.bench.gpu.workloads import BY_NAME, WORKLOADS
from lab_fixtures.scripted_environment import ScriptedLab
from tests.scripted_nvml import Card

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "h200"
SIZES = {2: 70, 3: 45, 4: 35}
NAMES = [workload.name for workload in WORKLOADS]


def options(directory: Path, **given: Any) -> Options:
    groups = {"pairs": 4, "triples": 2, "quadruples": 0, **given}
    return Options(json=str(directory / "table.json"), seconds=0.001, **groups)


def measured(directory: Path, script: dict[str, Any] | None = None, **given: Any) -> tuple[dict[str, Any], ScriptedLab]:
    machine = ScriptedLab(directory, script or {})
    assert interference.run(options(directory, **given), machine) == 0
    return json.loads((directory / "table.json").read_text()), machine


def row(tasks: str, rates: tuple[float, ...], at_s: float = 0.0, percent: tuple[int, ...] | None = None) -> Row:
    names = tuple(tasks.split())
    return Row(tasks=names, percent=percent or (100,) * len(names), rates=rates, at_s=at_s)


def test_groups_are_distinct_of_the_sizes_asked_for_and_the_same_for_the_same_seed() -> None:
    groups = draw(NAMES, SIZES, 1)
    assert Counter(len(group) for group in groups) == SIZES
    assert len(set(groups)) == len(groups)
    assert all(len(set(group)) == len(group) for group in groups)
    assert draw(NAMES, SIZES, 1) == groups
    assert draw(NAMES, SIZES, 2) != groups


def test_every_task_takes_part_about_equally() -> None:
    parts = Counter(name for group in draw(NAMES, SIZES, 3) for name in group)
    assert set(parts) == set(NAMES)
    assert max(parts.values()) - min(parts.values()) <= 8


def test_fewer_groups_than_asked_for_when_there_are_no_more() -> None:
    assert sorted(draw(["a", "b", "c"], {2: 10}, 1)) == [("a", "b"), ("a", "c"), ("b", "c")]


@pytest.mark.parametrize("name", ["interference-mps.json", "interference-timeslice.json"])
def test_the_measured_tables_name_known_tasks_and_have_each_of_them_alone(name: str) -> None:
    table = json.loads((RESULTS / name).read_text())
    alone = {row["tasks"][0] for row in table["rows"] if len(row["tasks"]) == 1 and row["percent"] == [100]}
    assert alone == set(BY_NAME)
    for row in table["rows"]:
        assert set(row["tasks"]) <= set(BY_NAME)
        assert len(row["rates"]) == len(row["tasks"]) == len(row["percent"])
        assert all(rate > 0 for rate in row["rates"])
        assert 0 <= row["sm_active"] <= 1
    shared = [row for row in table["rows"] if len(row["tasks"]) > 1 and set(row["percent"]) == {100}]
    assert len(shared) >= (150 if table["mechanism"] == "mps" else 50)


@pytest.mark.parametrize(
    ("at", "rate"), [(0.0, 10.0), (10.0, 10.0), (15.0, 11.0), (20.0, 12.0), (30.0, 15.0), (40.0, 18.0), (99.0, 18.0)]
)
def test_a_rate_alone_lies_between_the_two_samples_around_it(at: float, rate: float) -> None:
    assert interpolated([(40.0, 18.0), (10.0, 10.0), (20.0, 12.0)], at) == pytest.approx(rate)


def test_drift_is_taken_out_by_the_rate_alone_at_the_same_moment() -> None:
    rows = with_solo_rates(
        [row("a", (10.0,), 0), row("b", (4.0,), 0), row("a b", (6.0, 2.0), 50), row("a", (20.0,), 100)]
    )
    assert rows[2].solo_rates == (15.0, 4.0)
    assert speeds(rows[2]) == pytest.approx((0.4, 0.5))


def test_a_task_that_was_never_alone_has_no_speed() -> None:
    rows = with_solo_rates([row("a", (10.0,)), row("a b", (6.0, 2.0))])
    assert rows[1].solo_rates == (10.0, None)
    assert speeds(rows[1]) is None
    assert by_size(rows) == []


def test_a_percentage_is_no_look_at_a_task_alone() -> None:
    rows = with_solo_rates([row("a", (10.0,)), row("a", (5.0,), percent=(50,))])
    assert rows[1].solo_rates == (10.0,)


def test_the_summary_has_total_progress_and_the_worst_off() -> None:
    alone = [row("a", (10.0,)), row("b", (10.0,)), row("c", (10.0,))]
    shared = [row("a b", (8.0, 7.0)), row("a c", (9.0, 2.0)), row("b c", (10.0, 10.0)), row("a b c", (5.0, 5.0, 2.5))]
    pairs, triples = by_size(with_solo_rates([*alone, *shared]))
    assert (pairs.size, pairs.groups, triples.size, triples.groups) == (2, 3, 3, 1)
    assert (pairs.progress_least, pairs.progress_median, pairs.progress_most) == pytest.approx((1.1, 1.5, 2.0))
    assert (pairs.worst_slowdown_median, pairs.worst_slowdown_most) == pytest.approx((1 / 0.7, 5.0))
    assert triples.worst_slowdown_most == pytest.approx(4.0)


def test_the_summary_of_percentages_says_what_the_light_one_gains_and_the_heavy_one_pays() -> None:
    alone = [row(name, (10.0,)) for name in ("light", "heavy", "other")] + [row("heavy", (7.0,), percent=(50,))]
    free, held = row("light heavy", (3.0, 9.0)), row("light heavy", (6.0, 5.0), percent=(100, 50))
    unmatched = row("other heavy", (1.0, 1.0), percent=(100, 50))
    rows = with_solo_rates([*alone, free, held, unmatched])
    assert [line.groups for line in by_size(rows)] == [1]  # what is held back says nothing of sharing freely
    (line,) = by_percent(rows)
    assert (line.percent, line.pairs) == (50, 1)
    assert (line.light_before, line.light_after) == pytest.approx((0.3, 0.6))
    assert (line.heavy_before, line.heavy_after, line.heavy_alone) == pytest.approx((0.9, 0.5, 0.7))
    assert (line.total_before, line.total_after) == pytest.approx((1.2, 1.1))


def test_a_run_measures_each_alone_three_times_and_every_group_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, machine = measured(tmp_path, {"resnet18-cifar-b32": {"rate": 123.4567891}})
    members = {name for row in table["rows"] for name in row["tasks"]}
    sizes = Counter(len(row["tasks"]) for row in table["rows"])
    assert sizes == {1: 3 * len(members), 2: 4, 3: 2}
    alone = Counter(row["tasks"][0] for row in table["rows"] if len(row["tasks"]) == 1)
    assert set(alone.values()) == {3}
    places = [len(row["tasks"]) == 1 for row in table["rows"]]
    assert places[0]
    assert places[-1]
    assert places[len(members) :].index(True) == 3  # half of the six groups, then all alone once more
    assert machine.shared == ["mps"]
    assert machine.alive() == []
    printed = capsys.readouterr().out
    assert "progress against running alone" in printed
    assert "2.00 x" in printed  # two made-up tasks do not disturb each other


def test_a_row_holds_what_the_gpu_and_the_workers_showed(tmp_path: Path) -> None:
    table, _ = measured(tmp_path, {name: {"rate": 1.23456789} for name in NAMES}, mechanism="timeslice")
    last = next(row for row in table["rows"] if len(row["tasks"]) == 3)
    assert last["rates"] == [1.23457] * 3
    assert last["solo_rates"] == [1.23457] * 3
    assert last["cpu"] == [0.5] * 3
    assert last["percent"] == [100] * 3
    activity = [last[name] for name in ("sm_active", "sm_occupancy", "dram_active", "gr_active", "tensor_active")]
    assert activity == [0.25, 0.125, 0.06, 0.9, 0.03]
    assert last["gpu_util"] == 0.97
    assert last["power_w"] == 120.5
    assert last["energy_j"] == 60.25  # the counter moved on by half a second of 120.5 W
    assert last["memory_used_mib"] == 1000 * len({name for row in table["rows"] for name in row["tasks"]})


def test_a_table_says_what_it_was_measured_on_and_the_command_to_measure_it_again(tmp_path: Path) -> None:
    table, _ = measured(tmp_path, seed=7)
    assert (table["gpu"], table["driver"], table["torch"]) == ("NVIDIA H200", "580.159.04", "made up")
    assert (table["mechanism"], table["seed"], table["measure_s"]) == ("mps", 7, 0.001)
    assert table["command"].startswith("carma bench interference --pairs 4 --triples 2 --quadruples 0 --seed 7")
    assert table["date"]
    assert table["sharing"][0]["size"] == 2


def test_percentages_start_only_who_takes_part_and_are_compared_with_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, machine = measured(tmp_path, pairs=0, triples=0, percent=(25, 50))
    assert {name for row in table["rows"] for name in row["tasks"]} == {*LIGHT, *HEAVY}
    pairs = Counter(tuple(row["percent"]) for row in table["rows"] if len(row["tasks"]) == 2)
    assert pairs == {(100, 100): 12, (100, 25): 12, (100, 50): 12}
    held = [row["rates"] for row in table["rows"] if row["percent"] == [25]]
    assert held == [[3.75]] * len(HEAVY)  # the made-up rate of 10, half as fast again, by a quarter
    assert [line["percent"] for line in table["percentages"]] == [25, 50]
    assert table["percentages"][0]["heavy_after"] == 0.25
    assert machine.alive() == []
    assert "25 %" in capsys.readouterr().out


def test_one_that_cannot_start_is_left_out_and_its_groups_with_it(tmp_path: Path) -> None:
    table, _ = measured(tmp_path, {NAMES[0]: {"fail": "no kernel image"}}, pairs=40)
    assert any(NAMES[0] in line and "no kernel image" in line for line in table["left_out"])
    members = {name for row in table["rows"] for name in row["tasks"]}
    assert NAMES[0] not in members
    assert len(members) > 20


def test_one_that_dies_on_the_way_takes_its_groups_with_it_and_the_others_go_on(tmp_path: Path) -> None:
    table, machine = measured(tmp_path, {NAMES[0]: {"die_at": 2}}, pairs=40)
    assert sum("CUDA error: made up" in line for line in table["left_out"]) == 1  # and it is not asked again
    with_it = [row for row in table["rows"] if NAMES[0] in row["tasks"]]
    assert [row["tasks"] for row in with_it] == [[NAMES[0]]]
    alone = Counter(row["tasks"][0] for row in table["rows"] if len(row["tasks"]) == 1)
    assert {count for name, count in alone.items() if name != NAMES[0]} == {3}
    assert machine.alive() == []


def test_groups_for_which_there_is_no_time_are_left_out_and_tasks_alone_are_not(tmp_path: Path) -> None:
    table, _ = measured(tmp_path, limit_s=0.001)
    sizes = Counter(len(row["tasks"]) for row in table["rows"])
    assert set(sizes) == {1}
    assert set(Counter(row["tasks"][0] for row in table["rows"]).values()) == {3}


def test_a_death_at_the_very_end_is_on_record(tmp_path: Path) -> None:
    table, _ = measured(tmp_path, {NAMES[-1]: {"die_at": 3}}, pairs=40, limit_s=0.001)
    assert [row["tasks"] for row in table["rows"]].count([NAMES[-1]]) == 2
    assert any("CUDA error: made up" in line for line in table["left_out"])


def test_what_was_measured_is_on_disk_at_any_moment_and_stays_when_the_study_is_broken_off(tmp_path: Path) -> None:
    on_disk: list[int] = []

    class Impatient(ScriptedLab):
        def together(self, *given: Any) -> Any:
            if (tmp_path / "table.json").exists():
                on_disk.append(len(json.loads((tmp_path / "table.json").read_text())["rows"]))
            if given[0][0].name == NAMES[3]:
                raise KeyboardInterrupt
            return super().together(*given)

    machine = Impatient(tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        interference.run(options(tmp_path, pairs=40), machine)
    table = json.loads((tmp_path / "table.json").read_text())
    assert on_disk == [1, 2, 3]
    assert [row["tasks"] for row in table["rows"]] == [[name] for name in NAMES[:3]]
    assert machine.alive() == []


def test_a_gpu_of_several_is_named_to_the_workers_and_watched(tmp_path: Path) -> None:
    cards = (Card("GPU-a", gpu_util=11), Card("GPU-b", gpu_util=22))
    machine = ScriptedLab(tmp_path, {}, *cards)
    interference.run(options(tmp_path, pairs=1, triples=0, gpu="1"), machine)
    table = json.loads((tmp_path / "table.json").read_text())
    assert {row["gpu_util"] for row in table["rows"]} == {0.22}
    assert {gpu.id for _, gpu in machine.ticking.workers} == {"GPU-b"}


@pytest.mark.parametrize(
    "given",
    [
        {"mechanism": "timeslice", "percent": (50,)},
        {"percent": (100,)},
        {"pairs": 0, "triples": 0},
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_started(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(Usage):
        interference.run(options(tmp_path, **given), ScriptedLab(tmp_path, {}))
    assert not (tmp_path / "table.json").exists()


def test_the_error_about_missing_mps_has_the_option_to_measure_without_it(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        interference.run(options(tmp_path), ScriptedLab(tmp_path, {}, has_mps=False))
    assert "--mechanism timeslice" in refused.value.hint
    table, machine = measured(tmp_path, mechanism="timeslice")
    assert machine.shared == ["timeslice"]
    assert table["mechanism"] == "timeslice"
