"""Small runs for tests of reports."""

from __future__ import annotations

from collections.abc import Sequence

from carma_lab.runs.figures import Ran, TaskRun, figures
from carma_lab.runs.record import About, Point, Run


def task(
    number: int,
    arrival_s: float,
    placed_s: float,
    ended_s: float,
    *,
    alone_s: float | None = 100.0,
    gpu: int = 0,
    user: str = "",
    name: str = "",
    outcome: str = "succeeded",
    before: Sequence[Ran] = (),
) -> TaskRun:
    """One attempt, after those that are named."""
    last = Ran(gpus=(gpu,), placed_at=placed_s, ended_at=ended_s, outcome=outcome)
    return TaskRun(
        task=number,
        name=name or f"task-{number}",
        user=user,
        gpus=1,
        arrival_s=arrival_s,
        ended_s=ended_s,
        alone_s=alone_s,
        attempts=(*before, last),
        outcome=outcome,
    )


def about(**changes: object) -> About:
    given: dict[str, object] = {
        "simulated": True,
        "trace": "made",
        "policy": "magm",
        "memory": "measured",
        "mechanism": "mps",
        "gpu": "card",
        "gpus": 2,
        **changes,
    }
    return About(**given)  # type: ignore[arg-type]


def run(*tasks: TaskRun, course: Sequence[Point] = (), of: About | None = None, **of_gpus: float | None) -> Run:
    means = dict.fromkeys(
        ("energy_j", "sm_active_mean", "sm_occupancy_mean", "dram_active_mean", "memory_mib_mean", "power_w_mean")
    )
    made = figures(tasks, took_s=None, **{**means, **of_gpus})
    return Run(about=of or about(), figures=made, tasks=tasks, course=tuple(course))


def point(at_s: float, **changes: float | None) -> Point:
    given: dict[str, float | None] = {
        "sm_active": 0.5,
        "sm_occupancy": 0.2,
        "dram_active": 0.3,
        "memory_mib": 2_048.0,
        "power_w": 200.0,
        "running": 2.0,
        "waiting": 1.0,
        **changes,
    }
    return Point(at_s=at_s, **given)  # type: ignore[arg-type]
