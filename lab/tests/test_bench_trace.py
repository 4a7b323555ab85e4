"""`carma bench trace`: the scripts, the plan, and what is worked out of the runs."""

from __future__ import annotations

import json
import py_compile
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from carma.core.model.values import Activity, GpuId, GpuSample
from carma.errors import CarmaError, Usage
from carma.traces import find
from carma_lab.bench.gpu.meter import TimedSample
from carma_lab.bench.trace import gpus, study, summary
from carma_lab.bench.trace.records import Place, Plan, Results, Shown, SoloRun, TaskRow, TraceRun, read, save
from carma_lab.bench.trace.tasks import (
    SCRIPTS,
    TABLE,
    Task,
    command_of,
    parts_of,
    planned,
    progress,
    steps_for,
    trained_s,
)
from carma_lab.traces.task_classes import CLASSES, Shares, split
from lab.tools import trace_table

PLACE = Place(gpu="virtual", driver="", date="2026-01-01")
OVER = float("-inf")  # a time limit that has passed


# ---- the scripts and the plan


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_trains_two_steps_on_the_cpu(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [script.name, "--device", "cpu", "--tiny", "--steps", "2"])
    runpy.run_path(str(script), run_name="__main__")
    assert [steps for steps, _ in progress(capsys.readouterr().out)] == [1, 2]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_is_its_users_own(script: Path, tmp_path: Path) -> None:
    py_compile.compile(str(script), cfile=str(tmp_path / "compiled"), doraise=True)
    assert "carma" not in script.read_text(encoding="utf-8").lower()


def test_the_classes_of_the_scripts_have_the_published_shares() -> None:
    found = Counter(row.kind for row in TABLE.values())
    assert tuple(found[kind] for kind in CLASSES) == split(Shares(), len(TABLE))
    assert len(TABLE) >= 16
    assert {row.script for row in TABLE.values()} == {path.name for path in SCRIPTS.glob("*.py")}
    assert len({(row.script, row.arguments) for row in TABLE.values()}) == len(TABLE)


def test_arrivals_are_those_of_the_trace_scaled_to_the_span() -> None:
    tasks, rows = planned("t2", 16, 90.0, 7), find("t2").tasks[:16]
    assert (tasks[0].arrival_s, tasks[-1].arrival_s) == (0.0, 90.0)
    factor = 90.0 / (rows[-1].arrival_s - rows[0].arrival_s)
    for task, row in zip(tasks, rows, strict=True):
        assert task.arrival_s == pytest.approx((row.arrival_s - rows[0].arrival_s) * factor, abs=0.06)
    assert sorted(task.name for task in tasks) == sorted(TABLE)
    assert planned("t2", 16, 90.0, 7) == tasks
    assert [task.name for task in planned("t2", 16, 90.0, 8)] != [task.name for task in tasks]
    assert planned("t1", 1, 60.0, 1)[0].arrival_s == 0.0


def test_steps_follow_from_the_second_half_of_a_short_run() -> None:
    """Ten steps of 0.1 s after ten slow ones of 1 s, and 8 s of start-up: 40 s leave 22 s for steps of 0.1 s."""
    log = "import\n" + "".join(
        f"step {step}  loss 2.0  {min(step, 10) * 1.0 + max(0, step - 10) * 0.1:.2f} s\n" for step in range(1, 21)
    )
    assert steps_for(40.0, 19.0, log) == 10 + round((40.0 - 8.0 - 10.0) / 0.1)
    assert steps_for(1.0, 19.0, log) == 10, "the start-up alone takes longer"
    assert trained_s(log) == 11.0
    assert trained_s("no progress") is None
    with pytest.raises(CarmaError, match="printed no progress"):
        steps_for(40.0, 19.0, "done")


def test_a_command_runs_the_script_with_its_steps_and_nothing_of_the_bench() -> None:
    assert command_of("resnet34-cifar-fp16", 70, virtual=False)[1:] == (
        *("resnet_cifar.py", "--depth", "34", "--amp"),
        *("--steps", "70", "--seed", "0"),
    )
    stand_in = command_of("unet", 70, virtual=True)
    assert stand_in[2:] == ("--steps", "70", "--memory-mib", "4900", "--sm", "0.75", "--dram", "0.22")


def test_parts_are_consecutive_and_complete() -> None:
    tasks = planned("t1", 5, 60.0, 1)
    first, second = parts_of(tasks, 2)
    assert first + second == tasks
    assert abs(len(first) - len(second)) == 1
    later = study._less([replace(tasks[0], arrival_s=at) for at in (5.0, 20.0)], 12.0)
    assert [task.arrival_s for task in later] == [0.0, 8.0], "the first had arrived before"


# ---- what is worked out of the runs


def shown(**more: Any) -> Shown:
    return Shown(**{"seconds": 100.0, "energy_j": 5000.0, "sm_active": 0.4, "memory_max_mib": 900, **more})


def row(name: str, arrival_s: float, started_s: float, ended_s: float, **more: Any) -> TaskRow:
    given = {"outcome": "succeeded", "attempts": 1, "ooms": 0, "ran_s": ended_s - started_s, **more}
    return TaskRow(name=name, arrival_s=arrival_s, started_s=started_s, ended_s=ended_s, trained_s=None, **given)


def trace_run(policy: str, makespan_s: float, *tasks: TaskRow, **more: Any) -> TraceRun:
    given = {"home": "fresh", "shown": shown(), **more}
    return TraceRun(policy=policy, makespan_s=makespan_s, tasks=tasks, place=PLACE, **given)


def results(*runs: TraceRun, alone: tuple[SoloRun, ...] = ()) -> Results:
    tasks = tuple(Task(name=name, kind="light", arrival_s=at) for name, at in (("a", 0.0), ("b", 10.0)))
    plan = Plan(trace="t1", span_s=10.0, seconds=50.0, seed=1, virtual=True, tasks=tasks)
    head: dict[str, Any] = {"command": "carma bench trace", "machine": {}, "torch": None, "energy_from": None}
    return Results(**head, plan=plan, alone=list(alone), runs=list(runs))


EXCLUSIVE = trace_run("exclusive", 100.0, row("a", 0.0, 0.0, 50.0), row("b", 10.0, 50.0, 100.0))
SHARED = trace_run(
    "magm", 60.0, row("a", 0.0, 0.0, 60.0), row("b", 10.0, 10.0, 60.0, ooms=1), shown=shown(energy_j=4000.0)
)
UNMANAGED = trace_run(
    "none", 50.0, row("a", 0.0, 0.0, 50.0), row("b", 10.0, 10.0, 20.0, outcome="out_of_memory", ooms=1)
)


def by_policy(found: Results) -> dict[str, dict[str, Any]]:
    return {one["policy"]: one for one in summary.rows_of(found)}


def test_a_policy_is_compared_with_exclusive_and_with_no_manager() -> None:
    found = by_policy(results(UNMANAGED, SHARED, EXCLUSIVE))
    assert list(found) == ["exclusive", "magm", "none"]
    magm = found["magm"]
    assert (magm["makespan_of_exclusive"], magm["makespan_of_no_manager"]) == (0.6, 1.2)
    assert magm["energy_of_exclusive"] == 0.8
    assert (magm["completion_mean_s"], magm["ooms"], magm["failed"]) == (55.0, 1, 0)
    assert (found["none"]["ooms"], found["none"]["failed"]) == (1, 1)
    lonely = by_policy(results(SHARED))["magm"]
    assert (lonely["makespan_of_exclusive"], lonely["energy_of_exclusive"], lonely["slowdown_mean"]) == (None,) * 3


def test_a_slowdown_is_relative_to_the_task_alone_or_else_to_its_exclusive_run() -> None:
    magm = by_policy(results(EXCLUSIVE, SHARED))["magm"]
    assert (magm["slowdown_mean"], magm["slowdown_max"]) == (1.1, 1.2)
    alone = SoloRun(name="a", ran_s=30.0, trained_s=None, shown=shown(), place=PLACE)
    found = by_policy(results(EXCLUSIVE, SHARED, UNMANAGED, alone=(alone,)))
    assert (found["magm"]["slowdown_mean"], found["magm"]["slowdown_max"]) == (1.5, 2.0)
    assert found["none"]["slowdown_max"] == pytest.approx(50 / 30), "a task that failed has no slowdown"


def test_repetitions_are_averaged_with_their_range_and_settings_are_a_case_of_their_own() -> None:
    again = replace(SHARED, repetition=2, makespan_s=80.0, shown=shown(energy_j=None))
    other = replace(SHARED, settings={"gate.enabled": "no"}, makespan_s=70.0)
    plain, without = (one for one in summary.rows_of(results(SHARED, again, other)) if one["policy"] == "magm")
    assert (plain["runs"], plain["makespan_s"], plain["makespan_range_s"]) == (2, 70.0, [60.0, 80.0])
    assert plain["energy_j"] is None, "a mean of one of two would be another figure"
    assert (without["runs"], without["settings"]) == (1, {"gate.enabled": "no"})
    assert summary.cells(without)[0] == "magm, gate.enabled=no"
    assert summary.cells(plain)[3] == "70 s (60 to 80)"


def test_parts_are_one_run_when_all_of_them_are_there() -> None:
    """The second part began at its zero; its arrivals on record are those of the whole run."""
    first = trace_run("exclusive", 50.0, row("a", 0.0, 0.0, 50.0), parts=2, shown=shown(seconds=50.0, sm_active=0.2))
    second = trace_run(
        *("exclusive", 150.0, row("b", 10.0, 0.0, 150.0)), part=2, parts=2, shown=shown(seconds=150.0, sm_active=0.6)
    )
    assert summary.rows_of(results(first)) == []
    (found,) = summary.rows_of(results(second, first))
    assert (found["makespan_s"], found["energy_j"], found["tasks"]) == (200.0, 10_000.0, 2)
    assert found["sm_active"] == pytest.approx(0.5)
    assert found["completion_mean_s"] == (50.0 + 190.0) / 2


def test_figures_of_several_gpus_are_sums_of_energy_and_means_of_activity() -> None:
    def looks(gpu: str, joules: tuple[float | None, float | None], sm: float, mib: int) -> list[TimedSample]:
        samples = [
            GpuSample(gpu=GpuId(gpu), at=at, memory_used_mib=mib, activity=Activity(sm_active=sm), power_w=None)
            for at in (0.0, 10.0)
        ]
        return [TimedSample(one.at, one, energy_j, 0.5) for one, energy_j in zip(samples, joules, strict=True)]

    both = gpus.summary([looks("a", (0.0, 100.0), 0.2, 1000), looks("b", (50.0, 80.0), 0.4, 3000)], 10.0)
    assert (both.energy_j, both.memory_mib) == (130.0, 2000.0)
    assert both.sm_active == pytest.approx(0.3)
    assert (both.memory_max_mib, both.sm_occupancy, both.power_w) == (3000, None, None)
    assert gpus.summary([looks("a", (0.0, 100.0), 0.2, 1000), looks("b", (None, None), 0.4, 1)], 10.0).energy_j is None


def test_the_results_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    wanted = results(EXCLUSIVE, SHARED)
    save(wanted, tmp_path, summary.rows_of(wanted))
    assert read(tmp_path) == wanted
    assert len(json.loads((tmp_path / "trace.json").read_text())["results"]) == 2
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(Usage, match="not a file of carma bench trace"):
        read(tmp_path)


def test_the_page_has_a_section_as_soon_as_there_are_results(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# Measured\n")
    assert trace_table.pages(page, tmp_path) == {page: "# Measured\n"}
    save(results(EXCLUSIVE, SHARED), tmp_path, [])
    text = trace_table.pages(page, tmp_path)[page]
    assert "| magm | fresh | 1 | 60 s | 0.60 | - | 4.0 kJ | 0.80 | 55 s | 1.10 | 1.20 | 1 | 0 | 40 % |" in text
    page.write_text(text)
    assert trace_table.pages(page, tmp_path)[page] == text


def test_the_page_of_the_h200_is_up_to_date() -> None:
    for page, text in trace_table.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m lab.tools.trace_table"
