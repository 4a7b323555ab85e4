"""How and when processes are weighed: seldom, since a reading makes others wait. No process is needed."""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODULE = "gpumemnet.dataset.inside.workers"
MIB = 1 << 20


class Footprints:
    """`held` by process; counts its readings."""

    def __init__(self, _uuid: str | None) -> None:
        self.held: dict[int, int] = {}
        self.readings = 0

    def read(self) -> dict[int, int]:
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
    monkeypatch.setitem(sys.modules, "measure", SimpleNamespace(Footprints=Footprints))
    monkeypatch.setitem(sys.modules, "activity", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "parent", SimpleNamespace(end_with=None))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    made = importlib.import_module(MODULE)
    monkeypatch.setattr(made, "time", clock)
    return made


class Talk:
    """A crew whose children are told what to say."""

    def __init__(self, module: ModuleType) -> None:
        self.crew = module.Crew({"uuid": "GPU-1"}, None, lambda *_: None)
        self.module = module
        self.ends: dict[int, socket.socket] = {}

    def add(self, pid: int) -> Any:
        ours, theirs = socket.socketpair()
        self.ends[pid] = theirs
        self.crew.children.append(self.module.Child(pid, ours, {}, 1, False))
        return self.crew.children[-1]

    def say(self, child: Any, said: str, row: dict[str, Any] | None = None) -> None:
        self.ends[child.pid].sendall(json.dumps({"said": said, "row": row}).encode() + b"\n")
        child.hear()


@pytest.fixture
def talk(module: ModuleType) -> Iterator[Talk]:
    made = Talk(module)
    yield made
    for child in made.crew.children:
        child.line.close()
        made.ends[child.pid].close()


def test_those_that_have_a_context_are_weighed_together(talk: Talk, clock: Clock, module: ModuleType) -> None:
    first, second = talk.add(1), talk.add(2)
    talk.crew.footprints.held = {1: 600 * MIB, 2: 610 * MIB}
    talk.say(first, "ready")
    talk.add(3)  # starts all the while
    talk.crew._weigh()
    assert talk.crew.weighed("waiting") == []  # it may not go on yet
    clock.now_s += module.WEIGH_S / 2
    talk.say(second, "ready")
    clock.now_s += module.WEIGH_S * 0.6
    talk.crew._weigh()
    assert (talk.crew.footprints.readings, talk.crew.weighed("waiting")) == (1, [first, second])
    assert (first.context, second.context, second.footprint) == (600 * MIB, 610 * MIB, None)
    clock.now_s += 10
    talk.crew._weigh()
    assert talk.crew.footprints.readings == 1


def test_where_nobody_starts_there_is_nothing_to_wait_for(talk: Talk) -> None:
    first, second = talk.add(1), talk.add(2)
    talk.say(first, "ready")
    talk.crew._weigh()
    assert talk.crew.footprints.readings == 0
    talk.say(second, "ready")
    talk.crew._weigh()
    assert (talk.crew.footprints.readings, talk.crew.weighed("waiting")) == (1, [first, second])
    talk.crew._weigh()
    assert talk.crew.footprints.readings == 1


def test_one_with_a_row_is_weighed_at_once_and_the_others_with_it(talk: Talk) -> None:
    first, second = talk.add(1), talk.add(2)
    talk.crew.footprints.held = {1: 600 * MIB, 2: 900 * MIB}
    talk.say(first, "ready")
    talk.say(second, "row", {"oom": False})
    talk.crew._weigh()
    assert (first.context, talk.crew.footprints.readings) == (600 * MIB, 1)
    assert (second.row["footprint"], second.row["context"]) == (900 * MIB, None)


def test_the_footprint_is_what_it_held_when_it_had_trained(talk: Talk, clock: Clock) -> None:
    child = talk.add(1)
    for said, held in (("ready", 600), ("prepared", 5000), ("resting", 900), ("row", 4800)):
        talk.crew.footprints.held = {1: held * MIB}
        talk.say(child, said, {"oom": False} if said == "row" else None)
        clock.now_s += 1
        talk.crew._weigh()
        assert child.weight == held * MIB
    assert (child.row["footprint"], child.row["context"]) == (5000 * MIB, 600 * MIB)


def test_what_nvml_does_not_know_is_absent(talk: Talk) -> None:
    child = talk.add(1)
    talk.say(child, "row", {"oom": False})
    talk.crew._weigh()
    assert (child.is_weighed, child.row["footprint"], child.row["context"]) == (True, None, None)


def test_a_child_is_dismissed_once(talk: Talk) -> None:
    child = talk.add(1)
    child.dismiss()
    child.dismiss()
    assert talk.ends[1].recv(100) == b"end\n"


class Nvml:
    """Fails as often as it is told to; one process whose memory the driver does not tell."""

    NVMLError = RuntimeError

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
            raise self.NVMLError("not now")
        return [SimpleNamespace(pid=7, usedGpuMemory=5 * MIB), SimpleNamespace(pid=8, usedGpuMemory=None)]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "loop", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "gpumemnet.dataset.inside.measure", raising=False)
    return importlib.import_module("gpumemnet.dataset.inside.measure")


@pytest.mark.parametrize(("failures", "held"), [(0, {7: 5 * MIB}), (2, {7: 5 * MIB}), (3, {})])
def test_a_reading_that_fails_is_made_again(
    measure: ModuleType, monkeypatch: pytest.MonkeyPatch, failures: int, held: dict[int, int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(failures))
    assert measure.Footprints("GPU-1").read() == held


def test_without_a_binding_nvidia_smi_is_asked(measure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(measure, "ask_smi", lambda _query: "7, 5\n8, [N/A]\n")
    assert measure.Footprints("GPU-1").read() == {7: 5 * MIB}
    assert measure.Footprints(None).read() == {}
