"""The collector as a program of its own, with real forks on the CPU; in most tests the training is scripted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gpumemnet.dataset
from gpumemnet.dataset.torch_interpreter import environment

PROGRAMS = Path(gpumemnet.dataset.__file__).parent / "inside"
LIMIT_S = 120.0
# Importing torch takes seconds, and here training is scripted: what a config does is its `shape`.
SCRIPTED = """
import json, os, signal, sys, time, types

class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None})

for name in ("torch", "torch.nn", "torch.nn.functional", "torch.profiler", "torch.utils", "torch.utils.checkpoint"):
    sys.modules[name] = StandIn(name)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, sys.modules[name])
torch = sys.modules["torch"]
torch.__version__, torch.version = "0.0", types.SimpleNamespace(cuda=None)
torch.cuda = types.SimpleNamespace(is_initialized=lambda: False, empty_cache=lambda: None, memory_stats=dict)

import activity, collect, loop, training_run, worker_pool

class OutOfMemoryError(RuntimeError):
    pass

class Model:
    def parameters(self):
        return [types.SimpleNamespace(numel=lambda: count) for count in (8,)]

def mark(what, config):
    with open(os.environ["MARKS"], "a") as file:
        file.write(json.dumps([what, config["id"], time.monotonic(), os.getpid()]) + "\\n")

def times(what, config):
    with open(os.environ["MARKS"]) as file:
        return sum(json.loads(line)[:2] == [what, config["id"]] for line in file)

class Training:
    stepped = 3

    def __init__(self, config, device, numbers, made):
        self.config, self.model = config, Model()

    def step(self):
        shape = self.config["shape"]
        mark(shape, self.config)
        if shape == "exits":
            os._exit(3)
        if shape == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if shape == "oom" or (shape == "oom-beside" and times(shape, self.config) == 1):
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if shape == "library" and times(shape, self.config) == 1:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        if shape == "broken":
            raise ValueError("no such\\n  thing")
        if shape == "nan":
            return float("nan")
        if shape == "lasts":
            time.sleep(0.05)
        while shape == "waits" and os.path.exists(os.environ["HANG"]):
            time.sleep(0.01)
        if shape == "hangs" and os.path.exists(os.environ["HANG"]):
            time.sleep(600)
        return 1.0

class Meter(training_run.Meter):
    def figures(self):
        retried = self.config["shape"] == "retries" and times("retries", self.config) <= 3
        return {"allocated_peak": 5, "reserved_peak": 7, "footprint": 9, "retries": int(retried)}

def train(self, plain=training_run.TrainingRun.train):
    self.meter.config = self.config
    mark("train", self.config)
    row = plain(self)
    mark("trained", self.config)
    return row

def measure(run, probe, window_s, plain=activity.measure):
    mark("train", run.config)
    figures = plain(run, probe, window_s)
    mark("trained", run.config)
    return figures | {"sm_active": 0.5}

training_run.Meter = Meter
training_run.TrainingRun.train = train
activity.measure = measure
activity.WARM_S = 0.0
loop.Training = Training
loop.make = lambda config, numbers: None
loop.random_numbers = lambda: None
collect.WARM_UP_MODELS = 0
"""
DRIVER = """
import sys
sys.path.insert(0, {inside!r})
{before}
import collect
sys.exit(collect.main(sys.argv[1:]))
"""


class Place:
    """A directory with configs, a driver, and what came of them."""

    def __init__(self, folder: Path, before: str = SCRIPTED) -> None:
        self.folder, self.out = folder, folder / "out"
        self.driver, self.configs = folder / "driver.py", folder / "configs.jsonl"
        self.marks, self.hang = folder / "marks", folder / "hang"
        self.marks.touch()
        self.driver.write_text(DRIVER.format(inside=str(PROGRAMS), before=before))

    def write(self, configs: Sequence[dict[str, Any]]) -> None:
        self.configs.write_text("".join(json.dumps(config) + "\n" for config in configs))

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.driver), str(self.configs), str(self.out), "--device", "cpu", *words]
        env = {**environment(), "MARKS": str(self.marks), "HANG": str(self.hang)}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *words: str) -> str:
        process = self.start(*words)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
        return said

    def rows(self) -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in (self.out / "rows.jsonl").read_text().splitlines()]
        assert "id" not in lines[0]
        ids = [row["id"] for row in lines if "id" in row]
        assert len(ids) == len(set(ids)), "a config has two rows"
        return {row["id"]: row for row in lines if "id" in row}

    def marked(self, what: str) -> list[tuple[str, float, int]]:
        lines = [json.loads(line) for line in self.marks.read_text().splitlines()]
        return [(name, at, pid) for kind, name, at, pid in lines if kind == what]

    def spans(self) -> list[tuple[float, float, str]]:
        """When each run trained: every process is alone with its config, and trains once or twice."""
        spans: list[tuple[float, float, str]] = []
        begun: dict[int, float] = {}
        for line in self.marks.read_text().splitlines():
            kind, name, at, pid = json.loads(line)
            if kind == "train":
                begun[pid] = at
            elif kind == "trained":
                spans.append((begun[pid], at, name))
        return sorted(spans)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def scripted(name: str, shape: str = "plain", guess_mib: int = 0) -> dict[str, Any]:
    return {"id": name, "family": "mlp", "shape": shape, "guess_mib": guess_mib}


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def mlp(name: str, **fields: Any) -> dict[str, Any]:
    model = [{"op": "linear", "out": 8}, {"op": "act", "f": "relu"}, {"op": "linear", "out": 4}]
    plain = {"id": name, "family": "mlp", "shape": "uniform", "batch": 4, "input": [16], "outputs": 4, "model": model}
    return plain | fields


def test_real_models_are_trained_and_a_bad_config_has_a_row_with_its_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    place = Place(tmp_path, before="")
    place.write([mlp("a"), mlp("b", precision="bf16"), mlp("c", model=[{"op": "nothing"}])])
    said = place.run("--parallel", "2", "--steps", "2")
    rows = place.rows()
    assert rows["a"]["parameters"] == 16 * 8 + 8 + 8 * 4 + 4
    assert (rows["a"]["steps"], rows["a"]["finite"], rows["a"]["error"], rows["a"]["footprint"]) == (
        2,
        True,
        None,
        None,
    )
    assert rows["b"]["error"] is None
    assert rows["c"]["error"].startswith("ValueError: there is no op 'nothing'")
    assert "3 of 3" in said
    assert "2 measured, 0 out of memory, 1 failed, 0 left" in said
    head = json.loads((place.out / "rows.jsonl").read_text().splitlines()[0])
    assert head["gpu"] is None
    assert head["torch"]
    assert (head["parallel"], head["seed"], head["activity"]) == (2, 0, False)


def test_each_end_of_a_run_is_a_row_and_a_run_short_of_memory_is_repeated_alone(place: Place) -> None:
    shapes = ("plain", "exits", "dies", "oom", "oom-beside", "library", "broken", "nan", "retries")
    place.write([scripted(shape, shape) for shape in shapes])
    place.run("--parallel", "4")
    rows = place.rows()
    assert set(rows) == set(shapes)
    assert all("again" not in row for row in rows.values())
    ends = {name: (row["oom"], row["error"], row["alone"]) for name, row in rows.items() if name != "broken"}
    assert ends == {
        "plain": (False, None, False),
        "exits": (False, "the process ended with status 3 and no row", True),
        "dies": (False, "the process was ended by SIGSEGV", True),
        "oom": (True, None, True),
        "oom-beside": (False, None, True),
        "library": (False, None, True),
        "nan": (False, None, False),
        "retries": (False, None, True),
    }
    assert rows["broken"]["error"].startswith("ValueError: no such thing [")
    assert rows["broken"]["alone"] is False
    assert (rows["nan"]["finite"], rows["plain"]["finite"], rows["plain"]["steps"]) == (False, True, 3)
    assert (rows["oom"]["allocated_peak"], rows["oom"]["steps"]) == (5, 0)
    assert rows["plain"]["parameters"] == 8


def test_a_run_over_its_limit_is_killed_and_not_repeated(place: Place) -> None:
    place.hang.touch()
    place.write([scripted("slow", "hangs")])
    place.run("--config-limit-s", "2")
    row = place.rows()["slow"]
    assert row["error"].startswith("it took more than 2 s")
    assert row["alone"] is False


def test_parallel_runs_never_reserve_more_than_the_capacity(place: Place) -> None:
    guesses = {f"{number}": 1000 * (number % 5 + 1) for number in range(16)}
    place.write([scripted(name, "lasts", guess) for name, guess in guesses.items()])
    place.run("--parallel", "6", "--capacity-mib", "16000")
    spans = place.spans()
    assert len(place.rows()) == len(spans) == 16
    for begin, _, _ in spans:
        held = [name for since, until, name in spans if since <= begin < until]
        assert sum(guesses[name] * 1.15 + 1024 for name in held) <= 16_000


def test_a_run_larger_than_the_capacity_runs_alone(place: Place) -> None:
    place.write([scripted("huge", "lasts", 90_000), *(scripted(str(number), "lasts") for number in range(6))])
    place.run("--parallel", "4", "--capacity-mib", "9000")
    assert {name for name, row in place.rows().items() if row["alone"]} == {"huge"}
    (begin, end) = next(span[:2] for span in place.spans() if span[2] == "huge")
    assert all(until <= begin or since >= end for since, until, name in place.spans() if name != "huge")


def test_a_repeated_run_waits_until_the_others_have_ended(place: Place) -> None:
    place.write([scripted("short", "retries"), *(scripted(str(number), "lasts") for number in range(4))])
    place.run("--parallel", "5")
    spans = place.spans()
    begin = max(since for since, _, name in spans if name == "short")
    assert len([name for _, _, name in spans if name == "short"]) == 2
    assert all(until <= begin for _, until, name in spans if name != "short")


def test_activity_is_measured_for_one_run_at_a_time_while_no_other_trains(place: Place) -> None:
    place.write([*(scripted(str(number), guess_mib=1000) for number in range(7)), scripted("oom", "oom")])
    place.run("--activity", "--parallel", "3", "--window-s", "0.02")
    rows = place.rows()
    assert len(rows) == 8
    watched = [row for name, row in rows.items() if name != "oom"]
    assert all(row["window_steps"] >= 2 and row["step_ms"] >= 0 and row["sm_active"] == 0.5 for row in watched)
    assert all(row["footprint"] == 9 and row["power_w"] is None for row in watched)
    assert (rows["oom"]["oom"], rows["oom"]["step_ms"], rows["oom"]["alone"]) == (True, None, True)
    windows = _windows(place)
    assert len(windows) == 7
    for begin, end, name in windows:
        others = [span for span in place.spans() if span[2] != name]
        assert all(until <= begin or since >= end for since, until, _ in others)


def _windows(place: Place) -> list[tuple[float, float, str]]:
    """The second span of each that was prepared."""
    seen: set[str] = set()
    windows = []
    for span in place.spans():
        if span[2] in seen and span[2] != "oom":
            windows.append(span)
        seen.add(span[2])
    return windows


def test_it_resumes_by_default_and_restarts_with_no_resume(place: Place) -> None:
    place.write([scripted("a"), scripted("b")])
    place.run()
    place.write([scripted("a"), scripted("b"), scripted("c")])
    assert "1 of 1" in place.run()
    assert set(place.rows()) == {"a", "b", "c"}
    assert "nothing is left" in place.run()
    assert "3 of 3" in place.run("--no-resume")
    assert set(place.rows()) == {"a", "b", "c"}
    assert len((place.out / "rows.jsonl.old").read_text().splitlines()) == 5  # two heads and three rows


def test_nothing_starts_after_the_limit(place: Place) -> None:
    place.write([scripted("a"), scripted("b")])
    assert "2 left" in place.run("--limit-s", "0")
    assert place.rows() == {}


@pytest.fixture
def hanging(place: Place) -> Iterator[tuple[Place, subprocess.Popen[str]]]:
    """One run is over and in the file, two hang."""
    place.hang.touch()
    place.write([scripted("a", "hangs"), scripted("b"), scripted("c", "hangs")])
    process = place.start("--parallel", "3")
    rows = place.out / "rows.jsonl"
    try:
        wait_for(lambda: len(place.marked("hangs")) == 2 and rows.exists() and '"b"' in rows.read_text())
        yield place, process
    finally:
        for _, _, pid in place.marked("hangs"):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_its_processes_end_with_it_and_the_next_run_resumes(
    hanging: tuple[Place, subprocess.Popen[str]], how: signal.Signals
) -> None:
    place, process = hanging
    process.send_signal(how)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (-how if how == signal.SIGKILL else 130)
    wait_for(lambda: not any(is_alive(pid) for _, _, pid in place.marked("hangs")))
    assert set(place.rows()) == {"b"}
    with (place.out / "rows.jsonl").open("a") as file:
        file.write('{"id":"a","steps":')  # as a kill would leave it
    place.hang.unlink()
    place.run()
    assert {name: row["error"] for name, row in place.rows().items()} == {"a": None, "b": None, "c": None}


def test_without_a_gpu_it_fails_with_a_reason(place: Place) -> None:
    place.write([scripted("a")])
    process = place.start("--device", "cuda")
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "there is no GPU to measure on" in said
    assert (place.out / "rows.jsonl").read_text() == ""
