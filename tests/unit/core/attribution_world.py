"""One GPU that was seen idle, and what was given to the tasks on it."""

from __future__ import annotations

import pytest

from carma.core.model.settings import Gate, Rules, WarmUp
from carma.core.model.values import GpuId, GpuUsage, TaskId
from carma.core.telemetry.measurements import Track
from carma.core.telemetry.usage import note
from carma.testing.builders import World

G0 = GpuId("GPU-0")

OPEN = Rules(gate=Gate(enabled=False), warmup=WarmUp(settle_s=5.0))


def idle_world(rules: Rules = OPEN) -> World:
    """One GPU that was seen idle: it takes 50 W then (tests/builders.py)."""
    world = World(1, rules=rules)
    world.wait(6)
    assert world.state.idle_w == {G0: pytest.approx(50.0)}
    return world


def taken(world: World) -> tuple[GpuUsage, ...]:
    """What the GPUs did since the last time."""
    noted = note(world.state)
    world.emit(noted)
    return noted.gpus


def track(world: World, task: TaskId) -> Track:
    return world.state.tracks[world.state.active[task]]


def energy(world: World, *tasks: TaskId) -> list[float]:
    return [track(world, task).energy_j or 0.0 for task in tasks]


def spent(world: World, seconds: float, *tasks: TaskId) -> list[float]:
    """What each was given over that time."""
    before = energy(world, *tasks)
    world.wait(seconds)
    return [after - then for after, then in zip(energy(world, *tasks), before, strict=True)]
