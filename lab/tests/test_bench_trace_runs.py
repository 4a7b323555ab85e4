"""`carma bench trace`: processes without a manager, a scripted NVML, and whole runs on a virtual GPU."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carma.errors import Usage
from carma.monitor.nvml import NvmlSampler
from carma_lab.bench.trace import execution, gpus, study, summary
from carma_lab.bench.trace.execution import CutOff, Process
from carma_lab.bench.trace.gpus import RealGpus, VirtualGpus
from carma_lab.bench.trace.records import Place, Plan, Results, read
from carma_lab.bench.trace.tasks import (
    Task,
)
from carma_lab.runs import record
from tests.harness import until
from tests.scripted_nvml import Card, ScriptedNvml

PLACE = Place(gpu="virtual", driver="", date="2026-01-01")
OVER = float("-inf")  # a time limit that has passed


# ---- processes without a manager, and a real GPU


@pytest.mark.parametrize("ignores", ["", "trap '' TERM; "])
def test_a_process_ends_with_the_processes_that_it_started(tmp_path: Path, ignores: str) -> None:
    noted = tmp_path / "pid"
    worker = f"import subprocess, time; subprocess.Popen(['sh', '-c', \"{ignores}echo $$ > {noted}; exec sleep 1000\"])"
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
    given: dict[str, Any] = {"tasks": 2, "seconds": 1.5, "span_s": 0.5, "split": 2, "settings": PAIRS, **more}
    return study.Options(
        out=str(folder), virtual=True, only=("alone", "exclusive", "magm", "magm:known", "none"), **given
    )


def test_a_measurement_that_was_cut_off_is_resumed_and_ends_with_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = "--only alone,exclusive,magm,magm:known,none --set monitor.period_s=0.1 --split 2"
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

    exclusive = record.read(tmp_path / "run-exclusive+monitor.period_s=0.1-fresh-1.json")
    assert [task.task for task in exclusive.tasks] == [1, 2]
    assert [task.arrival_s for task in exclusive.tasks] == [task.arrival_s for task in found.plan.tasks]
    first, second = exclusive.tasks
    assert second.attempts[0].placed_at >= first.ended_s, "the second part begins when the first has ended"
    assert exclusive.figures.makespan_s == second.ended_s

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
    plan = Plan(trace="t1", span_s=0.0, seconds=1.0, seed=1, virtual=True, tasks=TASKS[:1])
    found = Results(command="", machine={}, torch=None, energy_from=None, plan=plan)
    wanted = study.Options(out=str(tmp_path), tasks=1, virtual=True, only=("magm:known",))
    assert study.Study(wanted, VirtualGpus(), found).run() == 1
    assert "home-magm.tar.gz does not exist" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["nosuch", "alone:known", "none:known", "magm:old"])
def test_an_unknown_run_is_an_error(word: str, tmp_path: Path) -> None:
    with pytest.raises(Usage, match="is not a run of carma bench trace"):
        study.run(study.Options(out=str(tmp_path), only=(word,), virtual=True))


def test_settings_reach_the_daemon() -> None:
    with execution.daemon_of("magm", {"window.length_s": "7"}, VirtualGpus(), None) as daemon:
        found = {one.name: one.value for one in daemon.client.settings()}
    assert float(found["window.length_s"]) == 7.0
