"""The record of a simulated task, with the true figures of its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carma.core.model.outcome import OutOfMemory
from carma.core.model.status import Finished
from carma.core.model.task import Attempt, Task
from carma.core.model.values import Activity, GpuId
from carma.traces import TraceTask
from carma_lab.runs.figures import Asked, Ran, TaskRun
from carma_lab.simulator.simulated_server import RunningTask


def run_of(task: Task, row: TraceTask, index: Mapping[GpuId, int], runners: Sequence[RunningTask | None]) -> TaskRun:
    """`runners`: its attempts at their ends; None for an attempt that never used a GPU."""
    status = task.status
    assert isinstance(status, Finished)
    return TaskRun(
        task=task.id,
        name=row.name,
        user=row.user,
        gpus=row.gpus,
        arrival_s=task.submitted_at,
        ended_s=status.at,
        alone_s=row.seconds,
        demand=row.demand,
        busy_gpus=row.busy_gpus,
        outcome=str(status.outcome.__struct_config__.tag),
        attempts=tuple(
            _ran(attempt, runner, index, status.at) for attempt, runner in zip(task.attempts, runners, strict=True)
        ),
        asked=Asked(
            estimate=task.estimate,
            priority=task.spec.priority,
            exclusive=task.spec.exclusive,
            time_limit_s=task.spec.time_limit_s,
        ),
    )


def _ran(attempt: Attempt, runner: RunningTask | None, index: Mapping[GpuId, int], end: float) -> Ran:
    ended_at = attempt.ended_at or end
    outcome = attempt.outcome
    used_s = 0.0 if runner is None else max(0.0, ended_at - runner.began)
    return Ran(
        gpus=tuple(index[gpu] for gpu in attempt.placement.gpus),
        placed_at=attempt.placed_at,
        ended_at=ended_at,
        outcome=str(outcome.__struct_config__.tag) if outcome is not None else "",
        blame=attempt.blame or "",
        started_at=attempt.started_at,
        used_s=used_s,
        ramp_s=None if runner is None else runner.grown_at - runner.began,
        memory_mib=None if runner is None else runner.held_mib,
        asked_mib=outcome.asked_mib if isinstance(outcome, OutOfMemory) else None,
        activity=None if runner is None or used_s <= 0.0 else _activity(runner, runner.busy_s / used_s),
        energy_j=None if runner is None else _energy_j(runner),
    )


def _activity(runner: RunningTask, part: float) -> Activity:
    """`part`: mean share of its demand."""
    demand = runner.demand
    return Activity(
        sm_active=demand.sm_active * part,
        sm_occupancy=demand.sm_occupancy * part,
        dram_active=demand.dram_active * part,
        gr_active=None if demand.gr_active is None else demand.gr_active * part,
    )


def _energy_j(runner: RunningTask) -> float | None:
    """Only if the trace has the power of the task: no meter separates it from that of its neighbours."""
    power = runner.demand.power
    if power is None:
        return None
    return sum(power * (board.card.most_w - board.card.idle_w) for board in runner.working) * runner.busy_s
