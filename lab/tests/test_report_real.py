"""A server's tasks as a run: by hand, and from a real daemon on virtual GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.config import settings_of
from carma.core.model.values import Demand
from carma.wire import api_types as t
from carma.wire.report_types import GpuWork, Report, Work
from carma_lab.reports.compare import compare
from carma_lab.runs.from_server import (
    Piece,
    alone_by_name,
    binned,
    idle_w_of,
    mechanism_of,
    real_run,
    settings_that_count,
)
from carma_lab.runs.record import Server, read
from lab_fixtures.recorded_runs import about
from lab_fixtures.small_simulations import row, trace
from tests.harness import serving
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, gpu_view

GPUS = [gpu_view(0), gpu_view(1)]
BUSY = t.ActivityView(sm_active=0.6, sm_occupancy=0.3, dram_active=0.2)


def attempt(gpu: str, placed_at: float, ended_at: float, kind: str = "succeeded", **more: object) -> t.AttemptView:
    given: dict[str, object] = {
        "gpus": (gpu,),
        "activity": BUSY,
        "observed_mib": 4_000,
        "energy_j": 100.0 * (ended_at - placed_at),
    }
    return t.AttemptView(
        number=1,
        booking_mib=5_000,
        booking_source="declared",
        alone=False,
        decision="",
        placed_at=placed_at,
        ended_at=ended_at,
        outcome={"kind": kind},
        **{**given, **more},  # type: ignore[arg-type]
    )


def view(number: int, submitted_at: float, *attempts: t.AttemptView, name: str = "train") -> t.TaskView:
    last = attempts[-1]
    return finished(
        number,
        name=name,
        submitted_at=submitted_at,
        ended_at=last.ended_at,
        attempts=attempts,
        outcome=last.outcome,
    )


def test_tasks_and_attempts_are_counted_from_the_first_submission() -> None:
    oom = attempt("GPU-0", 1_010.0, 1_020.0, "out_of_memory", blame="neighbour")
    views = [
        view(2, 1_005.0, oom, attempt("GPU-gone", 1_050.0, 1_100.0)),
        view(1, 1_000.0, attempt("GPU-0", 1_000.0, 1_080.0), name="known"),
    ]
    made = real_run(views, GPUS, about(simulated=False, gpus=3), {"known": 64.0}, idle_w=50.0)
    first, second = made.tasks
    assert (first.task, first.arrival_s, first.ended_s, first.alone_s, first.slowdown) == (1, 0.0, 80.0, 64.0, 1.25)
    assert (second.wait_s, second.alone_s, second.slowdown, second.user) == (35.0, None, None, "ada")
    assert [one.gpus for one in second.attempts] == [(0,), (2,)]
    assert (made.figures.ooms, made.figures.innocent_ooms, made.figures.wasted_gpu_s) == (1, 1, 10.0)
    assert (made.figures.makespan_s, made.figures.slowdown_mean, made.figures.took_s) == (100.0, 1.25, None)


def test_what_was_measured_of_attempts_is_laid_over_their_time() -> None:
    views = [view(1, 0.0, attempt("GPU-0", 50.0, 100.0)), view(2, 0.0, attempt("GPU-1", 0.0, 100.0))]
    made = real_run(views, GPUS, about(simulated=False), {}, idle_w=50.0)
    early, late = made.course[10], made.course[-10]
    assert (early.running, early.waiting, late.running, late.waiting) == pytest.approx((1.0, 1.0, 2.0, 0.0), abs=1e-6)
    assert (early.sm_active, late.sm_active) == pytest.approx((0.3, 0.6))
    assert (early.memory_mib, late.memory_mib) == pytest.approx((2_000.0, 4_000.0))
    assert (early.power_w, late.power_w) == pytest.approx((100.0, 150.0))
    assert made.figures.sm_active_mean == pytest.approx(0.45)
    assert made.figures.energy_j == pytest.approx(100.0 * 150.0 + 2 * 50.0 * 100.0)


def test_an_unmeasured_metric_is_none() -> None:
    blind = attempt("GPU-0", 0.0, 100.0, activity=None, energy_j=None)
    made = real_run([view(1, 0.0, blind)], GPUS, about(simulated=False), {}, idle_w=50.0)
    assert (made.figures.sm_active_mean, made.figures.energy_j, made.figures.power_w_mean) == (None, None, None)
    assert made.figures.memory_mib_mean == pytest.approx(2_000.0)
    assert {point.sm_active for point in made.course} == {None}
    seen = real_run([view(1, 0.0, attempt("GPU-0", 0.0, 100.0))], GPUS, about(simulated=False), {})
    assert seen.figures.energy_j is None
    assert seen.figures.sm_active_mean == pytest.approx(0.3)


def test_a_little_that_was_not_measured_counts_as_nothing() -> None:
    short = attempt("GPU-1", 0.0, 4.0, "failed", activity=None)
    made = real_run([view(1, 0.0, attempt("GPU-0", 0.0, 100.0)), view(2, 0.0, short)], GPUS, about(simulated=False), {})
    assert made.figures.sm_active_mean == pytest.approx(0.3)


def test_an_attempt_that_was_never_seen_on_a_gpu_had_nothing_of_it_however_long_it_took() -> None:
    """One that fails at its imports is half of the time of these two: what is known of the other is known still."""
    seen = attempt("GPU-0", 0.0, 100.0)
    host = attempt("GPU-1", 0.0, 100.0, "failed", activity=None, observed_mib=None, energy_j=None)
    made = real_run([view(1, 0.0, seen), view(2, 0.0, host)], GPUS, about(simulated=False), {}, idle_w=50.0)
    assert made.figures.memory_mib_mean == pytest.approx(2_000.0)
    assert made.figures.sm_active_mean == pytest.approx(0.3)
    assert made.figures.energy_j == pytest.approx(100.0 * 100.0 + 2 * 50.0 * 100.0)
    unknown = real_run([view(2, 0.0, host)], GPUS, about(simulated=False), {}, idle_w=50.0)
    assert (unknown.figures.memory_mib_mean, unknown.figures.sm_active_mean, unknown.figures.energy_j) == (
        None,
        None,
        None,
    )


def test_pieces_are_means_between_edges() -> None:
    pieces = [Piece(0.0, 15.0, 2.0), Piece(5.0, 10.0, 4.0), Piece(12.0, 12.0, None)]
    assert binned(pieces, [0.0, 10.0, 20.0]) == [4.0, 1.0]
    assert binned([Piece(0.0, 1.0, None)], [0.0, 1.0]) is None
    assert binned([], [0.0, 1.0]) == [0.0]


def test_idle_power_is_that_of_the_hourly_records() -> None:
    seen = GpuWork(gpu="GPU-0", index=0, watched_s=100.0, energy_j=9_000.0, idle_j=5_000.0)
    hotter = GpuWork(gpu="GPU-1", index=1, watched_s=100.0, energy_j=9_000.0, idle_j=7_000.0)
    blind = GpuWork(gpu="GPU-2", index=2, watched_s=100.0)
    assert idle_w_of(Report(since=0.0, until=1.0, total=Work(), gpus=(seen, hotter))) == 60.0
    assert idle_w_of(Report(since=0.0, until=1.0, total=Work(), gpus=(seen, blind))) is None
    assert idle_w_of(Report(since=0.0, until=1.0, total=Work())) is None


def test_a_name_for_runs_of_several_lengths_tells_nothing() -> None:
    known = trace(row(name="a", seconds=5.0), row(name="a", seconds=5.0), row(name="b"), row(name="b", seconds=7.0))
    assert alone_by_name(known) == {"a": 5.0}
    assert alone_by_name(None) == {}


def test_what_was_seen_of_an_attempt_begins_with_its_first_use() -> None:
    late = attempt("GPU-0", 0.0, 100.0, used_s=50.0, started_at=2.0)
    made = real_run([view(1, 0.0, late)], GPUS, about(simulated=False), {}, idle_w=50.0)
    early, later = made.course[100], made.course[-100]
    assert (early.sm_active, later.sm_active) == pytest.approx((0.0, 0.3))
    assert later.power_w == pytest.approx(50.0 + 100.0 * 100.0 / 50.0 / 2)
    (one,) = made.tasks[0].attempts
    assert (one.started_at, one.used_s, one.first_use, one.memory_mib, one.energy_j) == (2.0, 50.0, 50.0, 4_000, 1e4)
    both = attempt("GPU-0", 0.0, 100.0, used_s=120.0, gpus=("GPU-0", "GPU-1"))
    (wide,) = real_run([view(1, 0.0, both)], GPUS, about(simulated=False), {}).tasks[0].attempts
    assert wide.used_s == 60.0, "of each of its GPUs"
    unseen = attempt("GPU-0", 0.0, 100.0, observed_mib=None, activity=None)
    (host,) = real_run([view(1, 0.0, unseen)], GPUS, about(simulated=False), {}).tasks[0].attempts
    assert host.used_s == 0.0, "no sample shows it on a GPU"


def test_a_story_tells_when_the_estimate_was_there_and_when_memory_was_at_its_peak() -> None:
    story = [
        t.StoryLine(at=3.0, event="task_estimated", text=""),
        t.StoryLine(at=70.0, event="memory_observed", text=""),
    ]
    server = Server(gpus=(), period_s=5.0)
    seen = view(1, 0.0, attempt("GPU-0", 10.0, 100.0, used_s=60.0))
    seen = msgspec.structs.replace(
        seen,
        priority=3,
        exclusive=True,
        estimate=t.EstimateView(
            footprint_mib=10,
            upper_mib=20,
            source="history",
            runtime_s=50.0,
            demand={"sm_active": 0.5, "sm_occupancy": 0.2, "dram_active": 0.1},
        ),
    )
    made = real_run([seen], GPUS, about(simulated=False), {}, None, server, {1: story})
    (one,) = made.tasks[0].attempts
    assert one.ramp_s == 25.0, "from its first use at 40 to its peak, which may have been a sample before 70"
    asked = made.tasks[0].asked
    assert asked is not None
    assert (asked.estimated_s, asked.priority, asked.exclusive) == (3.0, 3, True)
    assert asked.estimate is not None
    assert (asked.estimate.upper_mib, asked.estimate.runtime_s) == (20, 50.0)
    assert asked.estimate.demand == Demand(0.5, 0.2, 0.1)


def test_changed_settings_are_listed_as_they_are_typed() -> None:
    settings = [
        t.SettingView(name="gate.enabled", value=False, origin="file"),
        t.SettingView(name="memory.sources", value=["declared", "history"], origin="flag"),
        t.SettingView(name="gate.sm_active", value=0.8, origin="default"),
        t.SettingView(name="placement.policy", value="magm", origin="flag --policy"),
        t.SettingView(name="monitor.period_s", value=2.0, origin="file"),
    ]
    noted = settings_that_count(settings)
    assert noted == {"gate.enabled": "no", "memory.sources": "declared,history"}
    read_again = settings_of(noted)
    assert (read_again.gate.enabled, read_again.memory.sources) == (False, ("declared", "history"))
    assert (
        settings_of(settings_that_count([t.SettingView(name="memory.sources", value=[], origin="file")])).memory.sources
        == ()
    )


def test_how_tasks_shared_is_what_most_of_them_did() -> None:
    views = [view(1, 0.0, attempt("GPU-0", 0.0, 9.0, mechanism="timeslice"))]
    assert mechanism_of(views, "auto") == "timeslice"
    assert mechanism_of(views, "mps") == "mps"
    assert mechanism_of([view(1, 0.0, attempt("GPU-0", 0.0, 9.0))], "auto") == "auto"


def test_a_daemon_that_finished_nothing_has_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        result = CliRunner().invoke(carma, ["run-report", "--save", str(tmp_path / "run.json")])
    assert result.exit_code == 4
    assert "no task has ended since then" in result.stderr
    assert not (tmp_path / "run.json").exists()


def test_a_real_daemons_tasks_are_a_run_that_report_and_compare_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work = (sys.executable, "-m", "carma.vgpu.virtual_task", "--sm", "0.5", "--dram", "0.2", "--seconds", "140")
    saved, table = tmp_path / "run.json", tmp_path / "known.csv"
    table.write_text(
        "arrival_s,name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active\n0,short,1,2000,140,0.5,0.2,0.2\n"
    )
    with serving(gpus=2, virtual__speed=20) as daemon:
        done = [
            daemon.submit(*work, "--memory-mib", "2000", name="short", gpu_memory_mib=2_000),
            # Twenty of the virtual seconds, as a busy machine may take for less: it never comes to a GPU.
            daemon.submit("sh", "-c", "sleep 1; false", name="bad", gpu_memory_mib=100),
        ]
        for number in done:
            daemon.wait(number)
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        result = CliRunner().invoke(carma, ["run-report", "--save", str(saved), "--trace", str(table), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["about"]["simulated"] is False
    assert (told["about"]["trace"], told["about"]["policy"], told["about"]["gpus"]) == ("known", "goodput", 2)
    assert told["outcomes"] == {"failed": 1, "succeeded": 1}
    assert told["slowdown"]["count"] == 1
    assert told["figures"]["memory_mib_mean"] > 0
    made = read(saved)
    assert [(task.name, task.outcome) for task in made.tasks] == [("short", "succeeded"), ("bad", "failed")]
    assert made.tasks[0].slowdown is not None
    assert made.tasks[0].slowdown >= 1.0
    assert compare([made, read(_simulated(saved, tmp_path))]).variants == ("goodput, real", "goodput, simulated")


def _simulated(saved: Path, tmp_path: Path) -> Path:
    """The same file, as if it had come out of a simulation."""
    other = tmp_path / "other.json"
    other.write_text(saved.read_text().replace('"simulated":false', '"simulated":true'))
    return other
