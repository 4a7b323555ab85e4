"""Footprints that the parent reads, and the turns of measuring activity: real forks with scripted footprints."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from test_collect_program import PROGRAMS, SCRIPTED, Place, scripted, wait_for

from gpumemnet_fixtures.torch_programs import run_in_torch

# The footprint of a process follows from its marks: its rough estimate after training, a tenth of it at rest. A run of
# the shape "stays" releases nothing.
FOOTPRINTS = """
CONTEXT_MIB = 640

def start(self, plain=training_run.TrainingRun.start):
    mark("begins", self.config)
    row = plain(self)
    mark("ready", self.config)
    return row

def rest(self, plain=training_run.TrainingRun.rest):
    plain(self)
    mark("rested", self.config)

def release(self, plain=training_run.TrainingRun.release):
    plain(self)
    assert self.training is None
    mark("released", self.config)

class MeterWithoutFootprint(Meter):
    def figures(self):
        return {name: value for name, value in super().figures().items() if name != "footprint"}

def holds(what, config):
    peak = CONTEXT_MIB + config["guess_mib"]
    least = peak if config["shape"] == "stays" else CONTEXT_MIB + config["guess_mib"] // 10
    return {"begins": 0, "ready": CONTEXT_MIB, "train": peak, "rested": least, "released": CONTEXT_MIB}.get(what)

def process_bytes(self):
    configs = {config["id"]: config for config in map(json.loads, open(os.environ["CONFIGS"]))}
    held = {}
    for what, name, _, pid in map(json.loads, open(os.environ["MARKS"])):
        if holds(what, configs[name]) is not None:
            held[pid] = holds(what, configs[name]) << 20
    return held

collect.answer_in_fork = lambda ask: {"gpu": "scripted", "uuid": "GPU-1", "free_bytes": 1 << 50}
training_run.Meter = MeterWithoutFootprint
training_run.TrainingRun.start = start
training_run.TrainingRun.rest = rest
training_run.TrainingRun.release = release
worker_pool.GpuCounters.process_bytes = process_bytes
"""
CONTEXT_MIB = 640


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path, before=SCRIPTED + FOOTPRINTS)
    monkeypatch.setenv("CONFIGS", str(made.configs))
    return made


def timeline(place: Place) -> list[tuple[str, str, int]]:
    """What each process did, in its order."""
    lines = [json.loads(line) for line in place.marks.read_text().splitlines()]
    return [(what, name, pid) for what, name, at, pid in sorted(lines, key=lambda line: line[2])]


def highest_mib(place: Place) -> int:
    """The most that all held together at any time; what is being released counts until it is."""
    configs = {config["id"]: config for config in map(json.loads, place.configs.read_text().splitlines())}
    held: dict[int, int] = defaultdict(int)
    highest = 0
    for what, name, pid in timeline(place):
        peak = CONTEXT_MIB + configs[name]["guess_mib"]
        least = peak if configs[name]["shape"] == "stays" else CONTEXT_MIB + configs[name]["guess_mib"] // 10
        held[pid] = {"ready": CONTEXT_MIB, "train": peak, "rested": least, "released": 0}.get(what, held[pid])
        highest = max(highest, sum(held.values()))
    return highest


def test_the_context_is_read_before_the_run_and_the_footprint_after_it(place: Place) -> None:
    place.write([scripted(str(number), guess_mib=1000 * number) for number in range(4)])
    place.run("--parallel", "3")
    rows = place.rows()
    read = {name: (row["context"] >> 20, row["footprint"] >> 20) for name, row in rows.items()}
    assert read == {str(number): (640, 640 + 1000 * number) for number in range(4)}
    assert all(row["ready_s"] <= row["took_s"] for row in rows.values())


def test_release_frees_all_that_a_run_has_allocated() -> None:
    """As in a fork: the first run of its process, after which torch keeps circles of references."""
    pytest.importorskip("torch")
    program = """
import gc, sys, weakref
sys.path.insert(0, sys.argv[1])
import loop, training_run
gc.disable()
model = [{"op": "linear", "out": 8}, {"op": "linear", "out": 4}]
config = {"id": "a", "family": "mlp", "batch": 4, "input": [16], "outputs": 4, "model": model}
one = training_run.TrainingRun(config, "cpu", 2, loop.random_numbers())
assert one.start() is None
assert one.train()["error"] is None
weights = [weakref.ref(each) for each in one.training.model.parameters()]
state = [weakref.ref(each["exp_avg"]) for each in one.training.optimizer.state.values()]
one.release()
print(len(weights), len(state), sum(each() is not None for each in weights + state))
"""
    assert run_in_torch(program, str(PROGRAMS)).split() == ["4", "4", "0"]


def test_a_run_without_a_device_is_a_row(place: Place) -> None:
    """It is repeated alone, because other runs may be the cause; with activity it has no turn."""
    refuse = "def refuse(self, device):\n    raise RuntimeError('CUDA error: busy')\nMeter.start = refuse\n"
    refused = Place(place.folder, SCRIPTED + FOOTPRINTS + refuse)
    refused.write([scripted("a"), scripted("b")])
    refused.run("--activity")
    for row in refused.rows().values():
        assert row["error"].startswith("RuntimeError: CUDA error: busy [")
        assert (row["steps"], row["finite"], row["alone"], row["step_ms"]) == (0, None, True, None)


def test_memory_is_released_before_the_process_ends(place: Place) -> None:
    place.write([scripted("a"), scripted("b", "broken")])
    place.run()
    assert sorted(name for name, _, _ in place.marked("released")) == ["a", "b"]


def test_some_workers_have_a_context_before_there_is_memory_for_them(place: Place) -> None:
    place.hang.touch()
    place.write([scripted(str(number), "waits", guess_mib=5000) for number in range(6)])
    process = place.start("--parallel", "3", "--capacity-mib", "13000")
    try:
        wait_for(lambda: len(place.marked("waits")) == 1 and len(place.marked("ready")) == 3)
    finally:
        place.hang.unlink()
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert [row["error"] for row in place.rows().values()] == [None] * 6
    assert max(len([s for s in place.spans() if s[0] <= begin < s[1]]) for begin, _, _ in place.spans()) == 1


def test_resting_runs_hold_little_so_that_many_are_prepared_before_the_first_turn(place: Place) -> None:
    """At their peaks only two of them fit."""
    place.write([scripted(str(number), guess_mib=3000) for number in range(6)])
    place.run("--activity", "--parallel", "6", "--window-s", "0.01", "--capacity-mib", "12000")
    did = timeline(place)
    trains = [(place, name) for place, (what, name, _) in enumerate(did) if what == "train"]
    assert {name for _, name in trains[:6]} == set("012345"), "a run was measured before all were prepared"
    assert all(what != "begins" for what, _, _ in did[trains[6][0] :])
    assert highest_mib(place) <= 12_000
    assert {row["footprint"] >> 20 for row in place.rows().values()} == {3640}  # not what it held at rest


def test_no_run_is_released_between_turns_while_memory_suffices(place: Place) -> None:
    place.write([scripted(str(number), guess_mib=1000) for number in range(5)])
    place.run("--activity", "--parallel", "5", "--window-s", "0.01", "--capacity-mib", "50000")
    did = [what for what, _, _ in timeline(place)]
    assert did.count("released") == 5
    assert "trained" not in did[did.index("released") :]


def test_a_run_that_does_not_fit_waits_for_the_next_round(place: Place) -> None:
    sizes = [3000, 5000, 2000, 4000, 1000, 5000, 3000, 2000]
    place.write([scripted(str(number), "stays", guess_mib=size) for number, size in enumerate(sizes)])
    place.run("--activity", "--parallel", "8", "--window-s", "0.01", "--capacity-mib", "16000")
    rows = place.rows()
    assert len(rows) == len(sizes)
    assert all(row["error"] is None and row["window_steps"] and not row["alone"] for row in rows.values())
    assert highest_mib(place) <= 16_000


def test_no_worker_starts_or_ends_while_a_run_is_measured(place: Place) -> None:
    shapes = ["plain", "stays", "oom", "broken", "plain", "exits", "stays", "retries", "plain", "plain"]
    place.write([scripted(str(number), shape, guess_mib=2000) for number, shape in enumerate(shapes)])
    place.run("--activity", "--parallel", "4", "--window-s", "0.02", "--capacity-mib", "14000")
    assert len(place.rows()) == len(shapes)
    measured = 0
    seen: set[int] = set()
    inside: int | None = None
    for what, _, pid in timeline(place):
        assert inside is None or pid == inside, f"{what} of another one in a window"
        if what == "train":
            inside = pid if pid in seen else inside
            seen.add(pid)
        elif what == "trained" and inside == pid:
            inside, measured = None, measured + 1
    assert measured == 7
    assert highest_mib(place) <= 14_000
