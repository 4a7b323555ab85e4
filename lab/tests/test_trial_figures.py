"""The trial's sums, sizes and judgements; what runs is in tests/integration/test_trial.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carma.errors import Usage
from carma.testing.private_daemon import wait_until
from carma_lab.bench.gpu import trial, trial_oom, trial_restart, trial_task, trial_tasks, workloads
from carma_lab.bench.gpu.trial_figures import expected_sm, held_against, side_by_side, steps_at
from carma_lab.bench.gpu.trial_oom import RUNGS, Sizes
from carma_lab.bench.gpu.trial_restart import mps_of
from carma_lab.bench.gpu.trial_server import NOT_VIRTUAL, PARTS, Stage
from carma_lab.bench.gpu.trial_shapes import SHAPES, Solo, solos, training
from carma_lab.bench.gpu.workloads import BY_NAME

TABLE = Path(__file__).parents[2] / "lab" / "results" / "h200" / "interference-mps.json"
CONTEXT_MIB = 760
H200_MIB = 143_155


def test_every_task_is_a_workload_and_says_enough_memory() -> None:
    reserved = json.loads(TABLE.read_text())["reserved_mib"]
    assert len(SHAPES) == 20
    assert len({shape.workload for shape in SHAPES}) == 20
    for shape in SHAPES:
        assert shape.workload in BY_NAME
        if shape.declared_mib is not None:
            assert shape.declared_mib > reserved[shape.workload] + CONTEXT_MIB, "its cap would be the end of it"
            assert shape.declared_mib >= shape.virtual.memory_mib
    assert sum(shape.declared_mib is None for shape in SHAPES) == 3


def test_a_task_of_the_trial_is_what_its_shape_says() -> None:
    shape = SHAPES[0]
    real = training(shape, virtual=False, scale=0.5)
    assert real.arguments == ("train", "--steps", "475", "--workload", "resnet18-cifar-b32")
    assert real.gpu_memory_mib == 1536
    assert training(shape, virtual=True, scale=0.5).arguments[:3] == ("train", "--steps", "400")
    assert training(shape, virtual=False, scale=1e-9).arguments[2] == "1"


def test_solo_figures_come_from_the_table_and_are_none_without_one() -> None:
    found = solos(str(TABLE), virtual=False)
    assert {shape.workload for shape in SHAPES} <= set(found)
    assert 0 < found["vgg16-224-b32"].sm_active <= 1
    assert solos("no-such-file.json", virtual=False) == {}


def test_steps_between_two_lines_of_a_log_are_in_proportion() -> None:
    progress = [(10.0, 0), (20.0, 100), (30.0, 150)]
    assert [steps_at(progress, at) for at in (5.0, 10.0, 15.0, 20.0, 25.0, 40.0)] == [0, 0, 50, 100, 125, 150]


def test_what_the_steps_ask_for_is_the_solo_activity_at_their_speed() -> None:
    solo = {"a": Solo(10.0, 0.6), "b": Solo(100.0, 0.2)}
    rows: list[dict[str, Any]] = [
        {"name": "a", "own": {"progress": [(0.0, 0), (10.0, 50)]}},  # half its speed alone
        {"name": "b", "own": {"progress": [(0.0, 0), (10.0, 1000)]}},
        {"name": "c", "own": {}},  # never trained
    ]
    assert expected_sm(rows, solo, 2.0, 7.0) == pytest.approx(0.3 + 0.2)
    assert expected_sm(rows, {"a": solo["a"]}, 2.0, 7.0) is None, "one that is not known alone"
    samples: list[dict[str, Any]] = [
        {"at": 7.0, "sm_active": 0.45},
        {"at": 8.0, "sm_active": None},
        {"at": 40.0, "sm_active": 0.1},
    ]
    found = held_against(rows, samples, solo, 5.0)
    assert found is not None
    assert found["samples"] == 1, "a sample without a figure and a sample during which no task trained do not count"
    assert found["mean_absolute_difference"] == pytest.approx(0.05)
    assert held_against(rows, [], solo, 5.0) is None


def a_run(*rows: tuple[str, str, float]) -> dict[str, Any]:
    """(name, outcome, seconds) each."""
    return {
        "tasks_submitted": 2,
        "makespan_s": sum(row[2] for row in rows),
        "energy_j": 100.0,
        "tasks": [
            {"name": name, "outcome": outcome, "ran_s": ran_s, "energy_j": 5.0, "own": {"trained_s": ran_s}}
            for name, outcome, ran_s in rows
        ],
    }


def test_makespans_are_compared_only_when_both_runs_have_all_tasks() -> None:
    shared = a_run(("a", "succeeded", 30.0), ("b", "succeeded", 20.0))
    whole = side_by_side(shared, a_run(("a", "succeeded", 60.0), ("b", "succeeded", 40.0)))
    assert whole["complete"]
    assert whole["makespan_s"]["change_percent"] == pytest.approx(-50)
    part = side_by_side(shared, a_run(("a", "succeeded", 10.0)))
    assert (part["tasks"], part["complete"], part["makespan_s"], part["energy_j"]) == (1, False, None, None)
    assert part["ran_s"] == {"collocated": 30.0, "exclusive": 10.0, "change_percent": pytest.approx(200)}
    assert part["slowdown_median"] == pytest.approx(3.0)


@pytest.mark.parametrize("gpu_mib", [40_960, 81_920, H200_MIB])
def test_bookings_fit_on_the_gpu_and_what_the_grower_wants_does_not(gpu_mib: int) -> None:
    sizes = Sizes.of(gpu_mib)
    booked = 2 * sizes.innocent + sizes.filler + sizes.grower
    assert booked < gpu_mib
    taken_last = sizes.filled + sizes.target + 2 * 700  # the innocents' own
    assert taken_last > gpu_mib, "without guards the filler must fail"
    assert sizes.filled + 2 * sizes.block < sizes.filler, "within its booking, the context included"
    for rung in RUNGS:
        recovery = trial_oom._settings(rung, sizes)["recovery"]
        margin = recovery["margin_mib"]
        assert isinstance(margin, int)
        if not rung.caps:
            again = 9 * sizes.grower
        else:
            again = margin + sizes.target if rung.jump else margin + sizes.grower - sizes.block
        assert sizes.target + CONTEXT_MIB < again < gpu_mib - 2 * sizes.innocent, rung.name


def a_record(name: str, *kinds: str) -> dict[str, Any]:
    attempts = [{"outcome": {"kind": kind}, "observed_mib": 5, "energy_j": 1.0} for kind in kinds]
    return {"name": name, "outcome": kinds[-1], "attempts": attempts}


def restarted(*records: dict[str, Any], **mps: Any) -> dict[str, Any]:
    adopted = {"tasks": [{"name": "a", "kept": True}], "mps_control_kept": None}
    return {"daemon": adopted, "mps": mps or {"skipped": NOT_VIRTUAL}, "tasks": list(records)}


def test_a_restart_fails_if_a_task_was_lost_or_restarted_or_has_no_figures() -> None:
    judge = trial_restart.shortfalls
    assert judge(restarted(a_record("a", "succeeded"))) == []
    assert "went through lost, succeeded" in judge(restarted(a_record("a", "lost", "succeeded")))[0]
    assert "ended as lost" in judge(restarted(a_record("a", "lost")))[0]
    bare = a_record("a", "succeeded")
    bare["attempts"][0]["energy_j"] = None
    assert "without memory or energy" in judge(restarted(bare))[0]
    other = restarted(a_record("a", "succeeded"))
    other["daemon"] = {"tasks": [{"name": "a", "kept": False}], "mps_control_kept": False}
    assert len(judge(other)) == 2


def test_a_task_whose_mps_server_was_killed_must_be_disrupted_and_come_back() -> None:
    name = trial_restart.LONG[0][0]
    killed = {"killed": [{"pid": 1, "kind": "server"}]}
    assert trial_restart.shortfalls(restarted(a_record(name, "disrupted", "succeeded"), **killed)) == []
    assert trial_restart.shortfalls(restarted(a_record(name, "failed", "succeeded"), **killed)) != []
    assert trial_restart.shortfalls(restarted(a_record(name, "succeeded"), **killed)) != []


def test_the_contrast_round_may_fail_and_the_guarded_ones_may_not() -> None:
    fell = {"shortfalls": ["filler failed, and it is innocent"]}
    found = {"rounds": [{"rung": "nothing", **fell}, {"rung": "mps", **fell}]}
    assert trial_oom.shortfalls(found) == ["oom, mps: filler failed, and it is innocent"]
    assert trial_oom.shortfalls({"rounds": [{"rung": "nothing", "error": "it broke"}]}) == ["oom, nothing: it broke"]


def test_what_there_was_no_time_for_was_not_shown_and_what_cannot_be_was_never_promised() -> None:
    late = {"rounds": [{"rung": "nothing", "skipped": "only 3 s were left"}]}
    assert trial_oom.shortfalls(late) == ["oom, nothing: skipped: only 3 s were left"]
    assert trial_oom.shortfalls({"rounds": [{"rung": "mps", "skipped": NOT_VIRTUAL}]}) == []
    without = restarted(a_record("a", "succeeded"), skipped="no MPS server serves the tasks")
    assert "the MPS server was not killed" in trial_restart.shortfalls(without)[0]
    shared, alone = a_run(("a", "succeeded", 3.0), ("b", "succeeded", 2.0)), a_run(("a", "succeeded", 6.0))
    (short,) = trial_tasks.not_compared({**shared, "side_by_side": side_by_side(shared, alone)})
    assert short == "exclusive: 1 of 2 tasks had not succeeded when the time was over"
    assert trial_tasks.not_compared({**shared, "side_by_side": side_by_side(shared, shared)}) == []


def test_the_time_is_shared_out_among_what_is_still_to_come() -> None:
    assert trial.share_of("oom", trial.Options(parts=("oom",))) == 1.0
    assert trial.share_of(PARTS[-1], trial.Options()) == 1.0
    left_s, usual_s = trial.Options().limit_s, trial.USUAL_S
    for name in PARTS:
        got_s = left_s * trial.share_of(name, trial.Options())
        assert got_s >= usual_s[name], "the usual limit is enough for what is usual"
        left_s -= usual_s[name]
    one = trial.Options(parts=("oom", "restart"), rungs=("watchdog",))
    assert trial.share_of("oom", one) < trial.share_of("oom", trial.Options(parts=("oom", "restart")))


def test_a_rung_and_a_part_without_time_are_said_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trial.run(trial.Options(out=str(tmp_path), virtual=True, parts=("oom",), limit_s=20.0)) == 1
    said = capsys.readouterr().out
    assert "oom: watchdog: skipped: only" in said
    assert "falls short: oom, watchdog: skipped: only" in said
    assert "oom: mps: skipped: virtual GPUs have no MPS" in said
    assert "falls short: oom, mps:" not in said

    def too_long(_stage: Stage) -> dict[str, Any]:
        monkeypatch.setattr(trial, "LEAST_S", 1e9)
        return {"tasks_submitted": 0, "tasks": [], "samples": []}

    monkeypatch.setattr(trial_tasks, "run", too_long)
    assert trial.run(trial.Options(out=str(tmp_path), virtual=True, parts=("tasks", "exclusive"))) == 1
    assert "falls short: exclusive: skipped: only" in capsys.readouterr().out
    found = json.loads((tmp_path / "tasks.json").read_text())
    assert found["tasks"] == []
    assert "were left" in found["exclusive"]["skipped"]


def test_a_task_without_its_figures_on_record_falls_short() -> None:
    row = {"name": "a", "outcome": "succeeded", "observed_mib": 5, "energy_j": 1.0, "activity": {}, "mechanism": "mps"}
    judge = trial_tasks.shortfalls
    assert judge({"tasks_submitted": 1, "tasks": [row]}) == []
    assert judge({"tasks_submitted": 1, "tasks": [{**row, "energy_j": None, "activity": None}]}) == [
        "tasks: a is on record without energy_j, activity"
    ]
    assert "1 tasks had not ended" in judge({"tasks_submitted": 2, "tasks": [row]})[0]
    assert "ended as failed" in judge({"tasks_submitted": 1, "tasks": [{**row, "outcome": "failed"}]})[0]


@contextmanager
def called(directory: Path, name: str, pipe: str) -> Iterator[int]:
    """A process of that name, with that pipe directory in its environment."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    process = subprocess.Popen(
        [str(directory / name), "600"], executable=sleep, env={"CUDA_MPS_PIPE_DIRECTORY": pipe, "PATH": os.defpath}
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_mps_processes_are_found_by_name_and_pipe_directory(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    with (
        called(tmp_path, "nvidia-cuda-mps-control", pipe) as control,
        called(tmp_path, "nvidia-cuda-mps-server", pipe) as server,
        called(tmp_path, "nvidia-cuda-mps-server", str(tmp_path / "another")),
        called(tmp_path, "train", pipe),
    ):
        wait_until(lambda: len(mps_of(pipe)) == 2, 60.0, "the two processes are not found")
        assert {(process.pid, process.kind) for process in mps_of(pipe)} == {(control, "control"), (server, "server")}
    wait_until(lambda: not mps_of(pipe), 60.0, "processes that are gone are still found")


def test_a_part_that_fails_is_on_record_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(stage: Stage) -> dict[str, Any]:
        raise RuntimeError(f"{stage.name} broke")

    monkeypatch.setattr(trial_oom, "run", broken)
    monkeypatch.setattr(trial_restart, "run", lambda _stage: restarted(a_record("a", "succeeded")))
    options = trial.Options(out=str(tmp_path / "out"), virtual=True, parts=("oom", "restart"))
    assert trial.run(options) == 1
    assert json.loads((tmp_path / "out" / "oom.json").read_text())["error"] == "RuntimeError: oom broke"
    restart = json.loads((tmp_path / "out" / "restart.json").read_text())
    assert restart["about"]["command"] == "carma bench gpu --only oom,restart --virtual"
    assert restart["about"]["gpus"][0]["kind"] == "virtual"
    assert restart["tasks"][0]["outcome"] == "succeeded"
    assert "falls short: oom: oom broke" in capsys.readouterr().out


def test_a_comparison_that_fails_leaves_what_it_would_have_been_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(stage: Stage, shared: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError(f"{stage.name} broke with {len(shared)}")

    monkeypatch.setattr(trial_tasks, "run", lambda _stage: {"tasks_submitted": 0, "tasks": [], "samples": []})
    monkeypatch.setattr(trial_tasks, "exclusive", broken)
    assert trial.run(trial.Options(out=str(tmp_path), virtual=True, parts=("tasks", "exclusive"))) == 1
    found = json.loads((tmp_path / "tasks.json").read_text())
    assert found["tasks"] == []
    assert "broke with 3" in found["exclusive"]["error"]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(Usage, match="no part ooom"):
        trial.run(trial.Options(virtual=True, parts=("ooom",)))


class PlayedTorch:
    """As much of torch as the program uses; `taken` are the bytes of each allocation on the GPU."""

    uint8 = "uint8"
    __version__ = "2.11"

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.synchronized = 0
        self.limits: list[str | None] = []
        self.cuda = SimpleNamespace(
            Event=lambda blocking: SimpleNamespace(record=lambda: blocking, synchronize=self._synchronize),
            max_memory_reserved=lambda: sum(self.taken),
            memory_reserved=lambda: sum(self.taken),
            synchronize=self._synchronize,
        )

    def _synchronize(self) -> None:
        self.synchronized += 1

    def set_num_threads(self, _count: int) -> None:
        self.limits = [os.environ.get(name) for name in trial_task.FRAMEWORK_LIMITS]

    def zeros(self, count: int, device: str) -> tuple[int, str]:
        return count, device

    def empty(self, count: int, dtype: str, device: str) -> bytes:
        assert (dtype, device) == ("uint8", "cuda")
        self.taken.append(count)
        return b""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> PlayedTorch:
    played = PlayedTorch()
    monkeypatch.setitem(sys.modules, "torch", played)
    return played


def program(monkeypatch: pytest.MonkeyPatch, log: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs it as attempt 2; what it wrote into its log."""
    monkeypatch.setenv("CARMA_ATTEMPT", "2")
    monkeypatch.setattr(sys, "argv", ["trial_task.py", *arguments, "--log", str(log)])
    assert trial_task.main() == 0
    return [json.loads(line) for line in Path(f"{log}.2").read_text().splitlines()]


def test_the_program_allocates_blocks_after_go_and_drops_a_limit_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: PlayedTorch
) -> None:
    for name in trial_task.FRAMEWORK_LIMITS:
        monkeypatch.setenv(name, "per_process_memory_fraction:0.1")
    go = tmp_path / "go"
    go.touch()
    sizes = ("--target-mib", "250", "--block-mib", "100", "--pace-s", "0")
    lines = program(monkeypatch, tmp_path / "log", "grow", "--go", str(go), *sizes, "--without-framework-limit")
    assert torch.taken == [100 << 20, 100 << 20, 50 << 20]
    assert torch.limits == [None, None]
    whats = [line["what"] for line in lines]
    assert whats == ["started", "ready", *["takes", "took"] * 3, "grown", "done"]
    assert [line["taken_mib"] for line in lines if line["what"] == "took"] == [100, 200, 250]
    assert lines[-1]["reserved_mib"] == 250
    asks = [line["at"] for line in lines if line["what"] == "takes"]
    assert trial_oom._oversteps_at(lines, 150) == asks[1], "when it asked for what takes it beyond 150 MiB"


def test_the_program_trains_the_given_steps_and_reports_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: PlayedTorch
) -> None:
    made = 0

    def build() -> Any:
        def step() -> None:
            nonlocal made
            made += 1

        return step

    monkeypatch.setitem(workloads.BY_NAME, "played", workloads.Workload("played", "none", build))
    lines = program(monkeypatch, tmp_path / "log", "train", "--workload", "played", "--steps", "5")
    assert made == trial_task.WARM_STEPS + 5
    assert torch.synchronized > 0
    assert [line["what"] for line in lines] == ["started", "ready", "trained", "done"]
    assert lines[2]["steps"] == 5
    assert lines[2]["torch"] == "2.11"
