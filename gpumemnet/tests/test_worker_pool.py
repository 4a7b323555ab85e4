"""When footprints of workers are read: seldom, because a reading delays starting processes. Without processes."""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from carma.trial.inside.carma_measure.gpu_counters import GpuCounters
from gpumemnet.dataset.inside import forks
from gpumemnet.dataset.torch_interpreter import INSIDE

MODULE = "gpumemnet.dataset.inside.worker_pool"
MIB = 1 << 20


class Counters:
    """`held` by process; counts its readings."""

    def __init__(self, _uuid: str) -> None:
        self.held: dict[int, int] = {}
        self.readings = 0

    def process_bytes(self) -> dict[int, int]:
        self.readings += 1
        return dict(self.held)


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> ModuleType:
    monkeypatch.syspath_prepend(str(INSIDE))
    monkeypatch.setitem(sys.modules, "training_run", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "activity", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "forks", forks)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    made = importlib.import_module(MODULE)
    monkeypatch.setattr(made, "time", clock)
    monkeypatch.setattr(made, "GpuCounters", Counters)
    return made


class Talk:
    """A pool whose workers say what the test says."""

    def __init__(self, module: ModuleType) -> None:
        self.pool = module.WorkerPool(None, lambda *_: None, 60.0, "GPU-1")
        self.module = module
        self.ends: dict[int, socket.socket] = {}

    def add(self, pid: int) -> Any:
        ours, theirs = socket.socketpair()
        self.ends[pid] = theirs
        self.pool.workers.append(self.module.Worker(pid, ours, {}, 1, False))
        return self.pool.workers[-1]

    def say(self, worker: Any, said: str, row: dict[str, Any] | None = None) -> None:
        self.ends[worker.pid].sendall(json.dumps({"said": said, "row": row}).encode() + b"\n")
        worker.receive()


@pytest.fixture
def talk(module: ModuleType) -> Iterator[Talk]:
    made = Talk(module)
    yield made
    for worker in made.pool.workers:
        worker.line.close()
        made.ends[worker.pid].close()


def test_footprints_of_workers_with_a_context_are_read_together(talk: Talk, clock: Clock, module: ModuleType) -> None:
    first, second = talk.add(1), talk.add(2)
    talk.pool.gpu.held = {1: 600 * MIB, 2: 610 * MIB}
    talk.say(first, "ready")
    talk.add(3)  # is starting throughout
    talk.pool._read_footprints()
    assert talk.pool.read_among("waiting") == []  # it may not train yet
    clock.now_s += module.FOOTPRINT_DELAY_S / 2
    talk.say(second, "ready")
    clock.now_s += module.FOOTPRINT_DELAY_S * 0.6
    talk.pool._read_footprints()
    assert (talk.pool.gpu.readings, talk.pool.read_among("waiting")) == (1, [first, second])
    assert (first.context, second.context, second.footprint) == (600 * MIB, 610 * MIB, None)
    clock.now_s += 10
    talk.pool._read_footprints()
    assert talk.pool.gpu.readings == 1


def test_without_starting_workers_footprints_are_read_at_once(talk: Talk) -> None:
    first, second = talk.add(1), talk.add(2)
    talk.say(first, "ready")
    talk.pool._read_footprints()
    assert talk.pool.gpu.readings == 0
    talk.say(second, "ready")
    talk.pool._read_footprints()
    assert (talk.pool.gpu.readings, talk.pool.read_among("waiting")) == (1, [first, second])
    talk.pool._read_footprints()
    assert talk.pool.gpu.readings == 1


def test_the_footprint_of_a_worker_with_a_row_is_read_at_once_and_the_others_with_it(talk: Talk) -> None:
    first, second = talk.add(1), talk.add(2)
    talk.pool.gpu.held = {1: 600 * MIB, 2: 900 * MIB}
    talk.say(first, "ready")
    talk.say(second, "row", {"oom": False})
    talk.pool._read_footprints()
    assert (first.context, talk.pool.gpu.readings) == (600 * MIB, 1)
    assert (second.row["footprint"], second.row["context"]) == (900 * MIB, None)


def test_the_footprint_of_a_run_is_the_one_after_training(talk: Talk, clock: Clock) -> None:
    worker = talk.add(1)
    for said, held in (("ready", 600), ("prepared", 5000), ("resting", 900), ("row", 4800)):
        talk.pool.gpu.held = {1: held * MIB}
        talk.say(worker, said, {"oom": False} if said == "row" else None)
        clock.now_s += 1
        talk.pool._read_footprints()
        assert worker.last_footprint == held * MIB
    assert (worker.row["footprint"], worker.row["context"]) == (5000 * MIB, 600 * MIB)


def test_a_process_that_nvml_does_not_list_has_no_footprint(talk: Talk) -> None:
    worker = talk.add(1)
    talk.say(worker, "row", {"oom": False})
    talk.pool._read_footprints()
    assert (worker.is_read, worker.row["footprint"], worker.row["context"]) == (True, None, None)


def test_a_worker_is_released_once(talk: Talk) -> None:
    worker = talk.add(1)
    worker.release()
    worker.release()
    assert talk.ends[1].recv(100) == b"end\n"


class Nvml:
    """Fails `failures` times; the driver does not provide the memory of one process."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def nvmlInit(self) -> None:
        return

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"card {uuid}"

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[Any]:
        assert card == "card GPU-1"
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("not now")
        return [SimpleNamespace(pid=7, usedGpuMemory=5 * MIB), SimpleNamespace(pid=8, usedGpuMemory=None)]


@pytest.mark.parametrize(("failures", "held"), [(0, {7: 5 * MIB}), (2, {7: 5 * MIB}), (3, {})])
def test_a_reading_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch, failures: int, held: dict[int, int]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(failures))
    assert GpuCounters("GPU-1").process_bytes() == held


def test_without_a_binding_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counters = GpuCounters("GPU-1")
    monkeypatch.setattr(counters, "smi", lambda _query: [["7", "5"], ["8", "[N/A]"]])
    assert counters.process_bytes() == {7: 5 * MIB}
    assert counters.source == "nvidia-smi"
