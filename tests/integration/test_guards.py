"""A task that grows past its booking beside two innocent ones, under each rung that virtual GPUs have.

Nothing here depends on who is quick: the innocent tasks neither grow nor end before the test opens their gate, and the
grower's first attempt never ends by itself.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from carma.wire.api_types import TaskView
from tests.harness import Daemon, serving, until, virtual

CAPACITY_MIB = 16_384
BOOKED_MIB = 5_000  # by each of the innocent: 1,000 at first, the rest when the gate opens
GROWER_MIB = 3_000
GROWN_MIB = 11_500  # which leaves less than the innocent still have to come
OPEN = {"warmup__enabled": "false", "gate__enabled": "false"}


def innocents(daemon: Daemon, gate: Path) -> list[int]:
    later = ("--grow-mib", "3900", "--grow-s", "1", "--gate", str(gate))
    tasks = [daemon.submit(*virtual(1_000, 3, *later), gpu_memory_mib=BOOKED_MIB) for _ in range(2)]
    for task in tasks:
        daemon.until_state(task, "running")
    return tasks


def grower(daemon: Daemon) -> int:
    """A task whose first attempt grows and stays; later ones end soon."""
    long = shlex.join(virtual(2_500, 100_000, "--grow-mib", str(GROWN_MIB - 2_500), "--grow-at-s", "3"))
    short = shlex.join(virtual(GROWN_MIB, 1))
    script = f'if [ "$CARMA_ATTEMPT" = 1 ]; then exec {long}; else exec {short}; fi'
    return daemon.submit("/bin/sh", "-c", script, gpu_memory_mib=GROWER_MIB)


def one_attempt_ended(daemon: Daemon, task: int) -> TaskView:
    until(lambda: daemon.client.task(task).attempts[:1] != (), f"task {task} was placed")
    until(lambda: daemon.client.task(task).attempts[0].outcome is not None, f"attempt 1 of task {task} ended")
    return daemon.client.task(task)


def all_finish(daemon: Daemon, gate: Path, tasks: list[int]) -> list[TaskView]:
    gate.touch()
    views = [daemon.wait(task) for task in tasks]
    assert [view.outcome for view in views] == [{"kind": "succeeded"}] * len(tasks), [view.reason for view in views]
    return views


def test_a_limit_stops_the_grower_and_the_innocent_finish_in_one_attempt(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(gpus=1, memory_mib=CAPACITY_MIB, virtual__speed=10, **OPEN) as daemon:
        calm = innocents(daemon, gate)
        wild = grower(daemon)
        first = one_attempt_ended(daemon, wild).attempts[0]
        assert first.cap_mib == GROWER_MIB
        assert [guard.rung for guard in first.guards] == ["framework", "watchdog"]
        assert first.outcome is not None
        assert first.outcome["kind"] == "out_of_memory"
        assert "watchdog" not in first.outcome["message"]
        assert first.blame == "own"
        views = all_finish(daemon, gate, [*calm, wild])
        assert [len(view.attempts) for view in views[:2]] == [1, 1]
        last = views[2].attempts[-1]
        assert last.alone or (last.cap_mib or 0) >= GROWN_MIB, "held to what was free, whatever it booked"
        assert last.booking_mib > GROWER_MIB


def test_without_limits_the_watchdog_stops_the_grower_and_the_innocent_finish_in_one_attempt(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    settings = {**OPEN, "sharing__caps": "false"}
    with serving(gpus=1, memory_mib=CAPACITY_MIB, virtual__speed=10, **settings) as daemon:
        calm = innocents(daemon, gate)
        wild = grower(daemon)
        first = one_attempt_ended(daemon, wild).attempts[0]
        assert first.cap_mib is None
        assert first.outcome is not None
        assert first.outcome["kind"] == "out_of_memory"
        assert first.outcome["message"].startswith("stopped by the watchdog: it held ")
        assert first.blame == "own"
        assert first.observed_mib is not None
        assert first.observed_mib > GROWER_MIB
        views = all_finish(daemon, gate, [*calm, wild])
        assert [len(view.attempts) for view in views[:2]] == [1, 1]
        assert views[2].attempts[1].booking_mib > first.observed_mib


def test_with_nothing_to_hold_the_grower_an_innocent_fails_and_is_brought_back(tmp_path: Path) -> None:
    """The contrast: the other two tests would notice if their guards did nothing."""
    gate = tmp_path / "gate"
    settings = {**OPEN, "sharing__caps": "false", "sharing__watchdog": "false"}
    with serving(gpus=1, memory_mib=CAPACITY_MIB, virtual__speed=10, **settings) as daemon:
        calm = innocents(daemon, gate)
        wild = grower(daemon)
        until(lambda: daemon.client.task(wild).observed_mib == GROWN_MIB, "the grower has grown")
        gate.touch()
        until(lambda: any(_failed(daemon, task) for task in calm), "an innocent task ran out of memory")
        daemon.client.cancel(wild)
        views = [daemon.wait(task) for task in calm]
        assert [view.outcome for view in views] == [{"kind": "succeeded"}] * 2
        failed = [attempt for view in views for attempt in view.attempts if attempt.blame is not None]
        assert {attempt.blame for attempt in failed} == {"neighbour"}


def _failed(daemon: Daemon, task: int) -> bool:
    return any(attempt.blame is not None for attempt in daemon.client.task(task).attempts)
