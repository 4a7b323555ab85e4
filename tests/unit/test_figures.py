"""The summary of a replay, on cases small enough to work out by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carma.core.model.settings import WarmUp, WindowRules
from carma.demo.comparison import fast_settings
from carma.demo.figures import (
    ReplayedTask,
    Row,
    change_percent,
    changes,
    percentile,
    plain_table,
    rows,
    summarise,
    time_average,
)
from carma.demo.live_view import line_of
from carma.demo.replay import Progress, counter_between
from carma.wire.api_types import AttemptView, GpuView
from tests.unit.cli.scripted_daemon import running, task_view


def run(submitted: float, *attempts: AttemptView, alone_s: float = 10.0, succeeded: bool = True) -> ReplayedTask:
    ended = attempts[-1].ended_at if attempts else submitted
    outcome = {"kind": "succeeded" if succeeded else "failed"}
    view = task_view(1, submitted_at=submitted, ended_at=ended, outcome=outcome, attempts=attempts)
    return ReplayedTask(view=view, alone_s=alone_s)


def ran(started: float, ended: float, *, oom: bool = False) -> AttemptView:
    outcome = {"kind": "out_of_memory" if oom else "succeeded"}
    return replace(running(1).attempts[0], started_at=started, ended_at=ended, outcome=outcome)


def test_waiting_is_all_that_was_not_running() -> None:
    assert run(0, ran(5, 15)).wait_s == 5
    assert run(100, ran(110, 112, oom=True), ran(130, 140)).wait_s == 10 + 18


def test_slowdown_is_of_the_run_that_succeeded() -> None:
    assert run(0, ran(5, 25)).slowdown == 2.0
    assert run(0, ran(0, 1, oom=True), ran(10, 25)).slowdown == 1.5
    assert run(0, ran(5, 25), succeeded=False).slowdown is None
    assert run(0, succeeded=False).slowdown is None


def test_a_replay_is_summed_up() -> None:
    runs = [
        run(100, ran(100, 110)),
        run(110, ran(130, 160), alone_s=15),
        run(120, ran(121, 122, oom=True), ran(140, 170), alone_s=10),
        run(125, ran(126, 128, oom=True), succeeded=False),
    ]
    figures = summarise(runs, sm_active_mean=0.5, energy_j=1000)
    assert (figures.tasks, figures.succeeded, figures.ooms) == (4, 3, 2)
    assert figures.makespan_s == 70
    assert figures.wait_mean_s == pytest.approx((0 + 20 + 19 + 1) / 4)
    assert figures.completion_mean_s == pytest.approx((10 + 50 + 50 + 3) / 4)
    assert figures.slowdown_mean == pytest.approx((1 + 2 + 3) / 3)
    assert (figures.sm_active_mean, figures.energy_j) == (0.5, 1000)


def test_missing_figures_stay_unknown() -> None:
    figures = summarise([run(0, succeeded=False)])
    assert figures.slowdown_mean is None
    assert figures.slowdown_p95 is None
    assert figures.sm_active_mean is None
    assert figures.energy_j is None
    with pytest.raises(ValueError, match="no task"):
        summarise([])


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0], 95) == 3.0
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(list(range(101)), 95) == 95
    assert percentile([1, 2], 100) == 2
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_a_time_average_weighs_each_value_by_how_long_it_held() -> None:
    assert time_average([(0, 1.0), (10, 0.0)], until=40) == 0.25
    assert time_average([(5, 0.4)], until=9) == pytest.approx(0.4)
    assert time_average([(0, 1.0), (50, 0.0)], until=40) == 1.0, "what comes after the end does not count"
    assert time_average([], until=10) is None
    assert time_average([(10, 1.0)], until=10) is None


def test_change_in_percent() -> None:
    assert change_percent(200, 130) == -35
    assert change_percent(2, 3) == 50
    assert change_percent(0, 3) is None
    assert change_percent(None, 3) is None


def test_the_table_has_both_runs_the_change_and_the_published_change() -> None:
    exclusive = summarise([run(0, ran(100, 7300), alone_s=7200)], sm_active_mean=0.4, energy_j=7.2e6)
    collocated = summarise([run(0, ran(10, 3610), alone_s=1800)], sm_active_mean=0.6, energy_j=3.6e6)
    by_label = {row.label: row for row in rows(exclusive, collocated)}
    assert by_label["makespan"] == ("makespan", "02:01:40", "01:00:10", "-51 %", "-35 %")
    assert by_label["mean slowdown"][1:4] == ("1.00 x", "2.00 x", "+100 %")
    assert by_label["out of memory"] == ("out of memory", "0", "0", "", "")
    assert by_label["SM activity"][1:] == ("40 %", "60 %", "+50 %", "+54 %")
    assert by_label["GPU energy"][1:] == ("2.00 kWh", "1.00 kWh", "-50 %", "-15 %")
    assert changes(exclusive, collocated)["energy_j"] == -50


def test_an_unknown_figure_is_a_dash_in_the_table() -> None:
    nothing = summarise([run(0, ran(1, 2))])
    by_label = {row.label: row for row in rows(nothing, nothing)}
    assert by_label["GPU energy"][1:4] == ("-", "-", "")
    assert by_label["SM activity"][1:4] == ("-", "-", "")


def test_the_table_is_aligned() -> None:
    lines = plain_table(Row("", "a", "b", "c", "d"), [Row("long label", "1", "22", "3", "4")]).splitlines()
    assert lines[0] == "            a   b  c  d"
    assert lines[2] == "long label  1  22  3  4"


def test_a_counter_is_read_between_its_readings() -> None:
    points = [(0.0, 100.0), (10.0, 200.0), (20.0, 400.0)]
    assert counter_between(points, 15.0) == 200
    assert counter_between(points, 10.0) == 100
    assert counter_between(points, 50.0) == 300
    assert counter_between([], 50.0) is None


def test_the_plain_view_prints_the_progress_of_a_run() -> None:
    gpu = GpuView(
        gpu="GPU-1", index=0, name="v", kind="virtual", state="open", reason="", memory_mib=40960, used_mib=4096,
        booked_mib=4096, room_mib=36864, tasks=(3,), sm_active=0.5,
    )  # fmt: skip
    standing = Progress(
        name="magm", elapsed_s=3725, total=60, submitted=9, running=2, done=4, gpus=(gpu,), names={3: "bert"}
    )
    assert line_of(standing) == "magm 01:02:05: 4/60 done, 2 running, 3 waiting, SM 50 %"
    assert line_of(replace(standing, done=60, finished=True)) == "magm: 60/60 done after 01:02:05"


def test_at_real_speed_the_demo_s_daemons_have_the_ordinary_time_constants() -> None:
    real, fast = fast_settings(1.0), fast_settings(500.0)
    assert real["window"]["length_s"] == WindowRules().length_s
    assert real["warmup"]["settle_s"] == WarmUp().settle_s
    period_s = fast["monitor"]["period_s"]
    assert isinstance(period_s, float)
    assert fast["window"]["length_s"] >= 3 * period_s * 500, "a window holds three samples at least"  # type: ignore[operator]
