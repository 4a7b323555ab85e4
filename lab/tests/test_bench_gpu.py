"""The studies' parts: worker processes, what a worker counts, what a meter reads, the control daemon, the records."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from carma.core.model.values import Activity, Gpu, GpuId, GpuSample
from carma.errors import NoGpus, Refused, Usage
from carma_lab.bench import results_file as written
from carma_lab.bench.gpu import collocation, interference
from carma_lab.bench.gpu import environment as machine
from carma_lab.bench.gpu.collocated import COLLOCATED, find, resnet26
from carma_lab.bench.gpu.environment import sharing
from carma_lab.bench.gpu.meter import Gauges, TimedSample, integrated, spent_j, summed_up
from carma_lab.bench.gpu.worker import TAIL_S, measure
from carma_lab.bench.gpu.workers import Span, Worker, WorkerDied, all_answers, close_all
from carma_lab.bench.gpu.workloads import WORKLOADS
from tests.scripted_nvml import Card, ScriptedNvml

SPAN = Span(0.0, 0.01)


def worker(code: str, environment: dict[str, str] | None = None, percent: int = 100) -> Worker:
    return Worker("made-up", [sys.executable, "-c", code], environment or {}, percent)


# ---- worker processes


def test_the_error_about_a_worker_that_ended_has_its_exit_code_and_last_line() -> None:
    broken = worker("import sys; print('first', file=sys.stderr); sys.exit('out of luck')")
    with pytest.raises(WorkerDied, match="ended with 1: out of luck"):
        broken.ready()
    broken.close()
    assert not broken.lives


def test_a_worker_that_does_not_answer_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carma_lab.bench.gpu.workers.START_LIMIT_S", 0.0)
    silent = worker("import time; time.sleep(600)")
    with pytest.raises(WorkerDied, match="no answer"):
        silent.ready()
    assert not silent.lives
    silent.close()


def test_an_answer_that_is_not_json_is_quoted() -> None:
    odd = worker("import time; print('hello', flush=True); time.sleep(600)")
    with pytest.raises(WorkerDied, match="it answered 'hello'"):
        odd.ready()
    assert not odd.lives
    odd.close()


def test_an_order_to_a_dead_worker_is_noticed_at_its_answer_and_the_others_stay_in_step() -> None:
    echo = "import sys\nfor n, line in enumerate(sys.stdin): print('{\"n\": %d}' % n, flush=True)"
    living, dead = worker(echo), worker("pass")
    with pytest.raises(WorkerDied):
        dead.ready()
    for one in (dead, living):
        one.order(0.0, SPAN)
    with pytest.raises(WorkerDied):
        all_answers([dead, living], SPAN)
    living.order(0.0, SPAN)
    assert all_answers([living], SPAN) == [{"n": 1}]
    close_all([living, dead])
    assert not living.lives


def test_a_worker_leaves_at_the_end_of_its_input_without_a_signal(tmp_path: Path) -> None:
    mark = tmp_path / "left"
    polite = worker(
        f"import sys, pathlib; print('{{}}', flush=True); sys.stdin.read(); pathlib.Path({str(mark)!r}).touch()"
    )
    polite.ready()
    close_all([polite])
    assert mark.exists()


def test_a_worker_has_the_percentage_and_none_of_the_callers_own_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "7")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/the/callers")
    tell = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CUDA_MPS')}))"
    free, held = worker(tell), worker(tell, {"CUDA_MPS_PIPE_DIRECTORY": "/ours"}, 25)
    assert free.ready() == {}
    assert held.ready() == {"CUDA_MPS_PIPE_DIRECTORY": "/ours", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    close_all([free, held])


def test_what_a_library_prints_does_not_reach_the_answers() -> None:
    code = "from carma_lab.bench.gpu.worker import _answers, _say\na = _answers()\nprint('noise')\n_say(a, {'n': 1})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"n": 1}
    assert done.stderr == "noise\n"


class Mark:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Clock:
    """A clock that only a step moves on; half of a step's time is the processor's."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 100.0, step_s

    def step(self) -> None:
        self.now += self.step_s

    def put(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.now / 2)
        return self


@pytest.mark.parametrize("step_s", [0.01, 0.05, 0.125])
def test_a_worker_counts_the_steps_that_ended_within_the_span(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    clock = Clock(step_s).put(monkeypatch)
    answer = measure(clock.step, 100.0, 0.4, 1.6, Mark)
    assert answer["rate"] == pytest.approx(1 / step_s)
    assert answer["steps"] == pytest.approx(1.6 / step_s, abs=1.01)
    assert answer["cpu"] == pytest.approx(0.5)
    assert clock.now > 102.0 + TAIL_S  # it goes on while the others are still counted


def test_a_worker_that_hardly_moves_still_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.9).put(monkeypatch)
    assert measure(clock.step, 100.0, 0.4, 1.6, Mark) == {"rate": 0.0, "steps": 0, "cpu": None}
    clock = Clock(0.45).put(monkeypatch)
    assert measure(clock.step, 100.0, 0.4, 1.6, Mark) == {"rate": 2 / 1.6, "steps": 2, "cpu": None}


# ---- the meter


def look(
    at: float,
    energy_j: float | None = None,
    util: float | None = None,
    sm_active: float | None = None,
    power_w: float | None = None,
) -> TimedSample:
    sample = GpuSample(gpu=GpuId("GPU-a"), at=at, activity=Activity(sm_active=sm_active), power_w=power_w)
    return TimedSample(at, sample, energy_j, util)


def test_a_reading_is_the_mean_of_the_span_without_the_look_that_opens_it() -> None:
    timed = [look(0.0, sm_active=0.9, util=0.0), look(1.0, sm_active=0.2, util=0.5), look(2.0, sm_active=0.4, util=1.0)]
    reading = summed_up(timed)
    assert reading.sm_active == pytest.approx(0.3)
    assert reading.gpu_util == pytest.approx(0.75)
    assert reading.seconds == 2.0
    assert reading.dram_active is None


def test_energy_is_the_counters_and_without_one_the_integral_of_power() -> None:
    powers = [look(0.0, power_w=100.0), look(1.0, power_w=200.0), look(3.0, power_w=300.0)]
    assert spent_j(powers) == pytest.approx(150 + 500)
    assert spent_j([look(0.0, 1000.0), *powers[1:2], look(3.0, 1700.0)]) == 700.0
    assert spent_j([look(0.0, 1000.0), look(3.0, 20.0)]) is None  # the driver's counter was reset
    assert integrated([(0.0, 100.0), (1.0, None), (2.0, 100.0)]) is None
    assert integrated([(0.0, 100.0)]) is None


def test_gauges_read_the_card_directly_and_nothing_of_an_instance() -> None:
    nvml = ScriptedNvml(Card("GPU-a", gpu_util=11), Card("GPU-b", gpu_util=22, energy_mj=1500))
    nvml.nvmlInit()
    gauges = Gauges(nvml)
    second = Gpu(id=GpuId("GPU-b"), index=1, name="", memory_mib=1)
    assert (gauges.gpu_util(second), gauges.energy_j(second)) == (0.22, 1.5)
    nvml.cards[1].energy_mj = 2500  # read each time: nothing is cached
    assert gauges.energy_j(second) == 2.5
    instance = Gpu(id=GpuId("MIG-a"), index=1, name="", memory_mib=1, kind="mig")
    assert (gauges.gpu_util(instance), gauges.energy_j(instance)) == (None, None)
    nvml.restart_driver()
    assert (gauges.gpu_util(second), gauges.energy_j(second)) == (None, None)


# ---- MPS of our own, and what is missing


def control(directory: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """A program in place of nvidia-cuda-mps-control that notes how it was called."""
    notes = directory / "notes"
    program = directory / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\necho "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {notes}\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return notes


def test_an_mps_control_daemon_of_our_own_is_started_and_quit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = control(tmp_path, monkeypatch)
    with contextlib.suppress(KeyboardInterrupt), sharing("mps") as environment:
        directory = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(directory).is_dir()
        raise KeyboardInterrupt
    assert [line.split() for line in notes.read_text().splitlines()] == [["-d", directory], ["quit", directory]]
    assert not Path(directory).exists()


def test_mps_that_cannot_be_started_is_a_refusal_with_a_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control(tmp_path, monkeypatch, code=1)
    with pytest.raises(Refused) as refused, sharing("mps"):
        pass
    assert "--mechanism timeslice" in refused.value.hint


def test_time_slicing_joins_no_mps_of_the_machine() -> None:
    with sharing("timeslice") as environment:
        assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


@pytest.mark.parametrize("run", [interference.run, collocation.run])
def test_without_a_gpu_a_study_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    def none(**_: object) -> Any:
        raise NoGpus("made up")

    monkeypatch.setattr(machine, "open_nvml", none)
    monkeypatch.chdir(tmp_path)
    options = interference.Options() if run is interference.run else collocation.Options()
    with pytest.raises(NoGpus) as error:
        run(options)
    assert "real NVIDIA GPU" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_the_error_about_missing_torch_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from carma.monitor.nvml import NvmlSampler

    nvml = ScriptedNvml(Card("GPU-a"))
    monkeypatch.setattr(machine, "open_nvml", lambda engine_s: NvmlSampler(nvml, engine_s=engine_s))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Refused, match="torch and torchvision") as refused:
        machine.open_machine()
    assert "pip install torch torchvision" in refused.value.hint


# ---- records


def test_the_command_has_the_flags_that_are_not_at_their_defaults() -> None:
    assert written.command_of("interference", interference.Options()) == "carma bench interference"
    given = interference.Options(percent=(25, 50), limit_s=60.0, json="a b.json", gpu="1")
    command = written.command_of("interference", given)
    assert command == "carma bench interference --percent 25,50 --gpu 1 --limit 60 --out 'a b.json'"
    many = collocation.Options(mechanism=("mps", "mig"))
    assert written.command_of("collocation", many) == "carma bench collocation --mechanism mps --mechanism mig"


def test_a_file_is_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    written.write({"a": 1.23456789, "rows": []}, path)
    assert json.loads(path.read_text()) == {"a": 1.23457, "rows": []}
    with pytest.raises(TypeError):
        written.write({"a": object(), "rows": []}, path)
    assert json.loads(path.read_text()) == {"a": 1.23457, "rows": []}


def test_an_unwritable_directory_is_reported_before_the_study(tmp_path: Path) -> None:
    written.check_place(str(tmp_path / "table.json"))
    with pytest.raises(Usage):
        written.check_place(str(tmp_path / "missing" / "table.json"))


# ---- the tasks


def test_every_task_is_found_by_its_name() -> None:
    for workload in (*WORKLOADS, *COLLOCATED.values()):
        assert find(workload.name) is workload


def test_resnet26_has_the_layers_and_parameters_of_the_paper() -> None:
    torch = pytest.importorskip("torch")
    model = resnet26()
    layers = [part for part in model.modules() if isinstance(part, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 26
    assert sum(weight.numel() for weight in model.parameters()) == 366_938
    answer = model(torch.randn(2, 3, 32, 32))
    assert answer.shape == (2, 10)
    answer.sum().backward()
