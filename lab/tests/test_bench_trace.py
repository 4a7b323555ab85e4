"""`carma bench trace`: the scripts, the plan, what is worked out of the runs, and whole runs on a virtual GPU."""

from __future__ import annotations

import contextlib
import json
import py_compile
import runpy
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from carma.core.model.values import Activity, GpuId, GpuSample
from carma.errors import CarmaError, Usage
from carma.monitor.nvml import NvmlSampler
from carma.traces import find
from carma_lab.bench.gpu.meter import TimedSample
from carma_lab.bench.trace import execution, gpus, study, summary
from carma_lab.bench.trace.execution import CutOff, Process
from carma_lab.bench.trace.gpus import RealGpus, VirtualGpus
from carma_lab.bench.trace.records import Alone, Place, Plan, Results, Shown, TaskRow, TraceRun, read, save
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
from carma_lab.runs import record
from carma_lab.traces.task_classes import CLASSES, Shares, split
from lab.tools import trace_table
from tests.harness import until
from tests.scripted_nvml import Card, ScriptedNvml

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


def results(*runs: TraceRun, alone: tuple[Alone, ...] = ()) -> Results:
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
    alone = Alone(name="a", ran_s=30.0, trained_s=None, shown=shown(), place=PLACE)
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


# ---- processes without a manager, and a real GPU


def test_a_process_ends_with_the_processes_that_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    worker = (
        f"import subprocess, time; p = subprocess.Popen(['sleep', '1000']); open({str(noted)!r}, 'w').write(str(p.pid))"
    )
    with contextlib.closing(Process([sys.executable, "-c", f"{worker}; time.sleep(1000)"], {})):
        until(lambda: noted.exists() and noted.read_text() != "", "the process has started another one")
        child = int(noted.read_text())
    until(lambda: not running(child), "the process that it started has ended")


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("words", "code", "outcome", "ooms"),
    [
        ("step 3  loss 1.0  2.50 s", 0, "succeeded", 0),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 1, "out_of_memory", 1),
        ("ValueError: no", 1, "failed", 0),
    ],
)
def test_a_task_without_a_manager_ends_as_its_exit_code_and_log_say(
    words: str, code: int, outcome: str, ooms: int
) -> None:
    command = [sys.executable, "-c", f"import sys; print({words!r}); sys.exit({code})"]
    with contextlib.closing(Process(command, {})) as process:
        until(process.poll, "it ends")
        found = execution._row_of(Task(name="a", kind="light", arrival_s=1.0), process, process.started - 1.5)
    assert (found.outcome, found.ooms, found.started_s) == (outcome, ooms, 1.5)
    assert found.trained_s == (2.5 if code == 0 else None)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ScriptedNvml:
    scripted = ScriptedNvml(Card("GPU-a", energy_mj=1000), Card("GPU-b", energy_mj=2000))
    monkeypatch.setattr(gpus, "load_nvml", lambda: scripted)
    monkeypatch.setattr(gpus, "open_nvml", lambda engine_s=1.0: NvmlSampler(scripted, engine_s=engine_s))
    return scripted


def test_real_gpus_are_metered_by_nvml_and_taken_in_turns_without_a_manager(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def sharing(mechanism: str) -> Iterator[dict[str, str]]:
        yield {"SHARING": mechanism}

    monkeypatch.setattr(gpus, "sharing", sharing)
    found = RealGpus()
    assert (found.place().gpu, found.count, found.daemon_gpus) == ("2 x NVIDIA H200", 2, 0)
    with found.outside("mps") as outside, contextlib.closing(outside.meter()) as meter:
        assert [outside.environment(place)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]
        assert outside.environment(0)["SHARING"] == "mps"
        nvml.now += 10.0
        nvml.cards[0].energy_mj += 500_000
        nvml.cards[1].energy_mj += 250_000
        reading = meter.shown()
    assert (reading.energy_j, reading.power_w) == (750.0, 241.0)
    nvml.cards.pop()
    with RealGpus().outside("timeslice") as outside:
        assert "CUDA_VISIBLE_DEVICES" not in outside.environment(0), "one GPU need not be named"


# ---- whole runs on a virtual GPU: real daemons and real processes

TASKS = tuple(Task(name=name, kind="light", arrival_s=0.0, steps=100_000) for name in ("unet", "dlrm"))


def test_a_run_whose_time_is_over_is_cut_off_with_its_tasks() -> None:
    with pytest.raises(CutOff):
        execution.unmanaged(TASKS, VirtualGpus(), OVER)
    with pytest.raises(CutOff):
        execution.alone("unet", 100_000, VirtualGpus(), OVER)
    with execution.daemon_of("magm", {}, VirtualGpus(), None) as daemon, pytest.raises(CutOff):
        execution.managed(daemon, TASKS, VirtualGpus(), OVER)


PAIRS = {"monitor.period_s": "0.1"}


def options(folder: Path, **more: Any) -> study.Options:
    """Samples are frequent, so that the daemon sees the memory of short tasks."""
    given: dict[str, Any] = {"tasks": 2, "seconds": 1.5, "span_s": 0.5, "parts": 2, "settings": PAIRS, **more}
    return study.Options(
        out=str(folder), virtual=True, only=("alone", "exclusive", "magm", "magm:known", "none"), **given
    )


def test_a_measurement_that_was_cut_off_is_resumed_and_ends_with_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = "--only alone,exclusive,magm,magm:known,none --set monitor.period_s=0.1 --parts 2"
    work = "--tasks 2 --seconds 1.5 --span 0.5 --virtual"
    command = [sys.executable, "-m", "carma", "bench", "trace", *runs.split(), *work.split(), "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cut:
        assert cut.stdout is not None
        for line in cut.stdout:
            if "magm, fresh home" in line:
                cut.send_signal(signal.SIGTERM)
                break
        cut.stdout.read()
    assert cut.returncode != 0
    before = read(tmp_path)
    assert [(run.policy, run.part) for run in before.runs] == [("exclusive", 1), ("exclusive", 2)]
    assert [one.name for one in before.alone] == [task.name for task in before.plan.tasks]

    with pytest.raises(Usage, match="exists"):
        study.run(options(tmp_path))
    with pytest.raises(Usage, match="another --span"):
        study.run(options(tmp_path, resume=True, span_s=7.0))
    assert study.run(options(tmp_path, resume=True)) == 0
    found = read(tmp_path)
    assert found.runs[:2] == before.runs
    assert [run.settings for run in found.runs] == [PAIRS] * 4 + [{}]
    assert found.plan == before.plan
    assert [(run.policy, run.home) for run in found.runs[2:]] == [
        ("magm", "fresh"),
        ("magm", "known"),
        ("none", "fresh"),
    ]
    for run in found.runs:
        assert [one.outcome for one in run.tasks] == ["succeeded"] * len(run.tasks)
        assert run.shown.energy_j is not None
        assert run.makespan_s >= max(one.trained_s or 1e9 for one in run.tasks)
    rows = summary.rows_of(found)
    assert [one["policy"] for one in rows] == ["exclusive", "magm", "magm", "none"]
    assert None not in [rows[1][name] for name in ("makespan_of_exclusive", "makespan_of_no_manager", "slowdown_mean")]
    assert "no manager" in capsys.readouterr().out

    fresh, known = (
        record.read(tmp_path / f"run-magm+monitor.period_s=0.1-{home}-1.json") for home in ("fresh", "known")
    )
    sources = [[task.asked.estimate for task in one.tasks if task.asked is not None] for one in (fresh, known)]
    assert [estimate and estimate.source for estimate in sources[0]] != ["history"] * 2
    assert [estimate and estimate.source for estimate in sources[1]] == ["history"] * 2, "the home knows both"


def test_runs_that_do_not_fit_into_the_time_are_named_and_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.run(options(tmp_path, seconds=3000.0, limit_s=100.0)) == 1
    assert capsys.readouterr().out.count("missing: steps of") == 2
    assert not (tmp_path / "trace.json").exists()


def test_a_known_home_needs_a_fresh_run_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(results(), tmp_path, [])
    plan = replace(results().plan, tasks=TASKS[:1])
    wanted = study.Options(out=str(tmp_path), tasks=1, virtual=True, only=("magm:known",))
    assert study.Study(wanted, VirtualGpus(), replace_plan(plan)).run() == 1
    assert "home-magm.tar.gz does not exist" in capsys.readouterr().out


def replace_plan(plan: Plan) -> Results:
    found = results()
    found.plan = plan
    return found


@pytest.mark.parametrize("word", ["nosuch", "alone:known", "none:known", "magm:old"])
def test_an_unknown_run_is_an_error(word: str, tmp_path: Path) -> None:
    with pytest.raises(Usage, match="is not a run of carma bench trace"):
        study.run(study.Options(out=str(tmp_path), only=(word,), virtual=True))


def test_settings_reach_the_daemon() -> None:
    with execution.daemon_of("magm", {"window.length_s": "7"}, VirtualGpus(), None) as daemon:
        found = {one.name: one.value for one in daemon.client.settings()}
    assert float(found["window.length_s"]) == 7.0
