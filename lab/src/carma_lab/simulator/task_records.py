"""Rows of a trace as tasks of the core, and simulated tasks as records of a run.

1. A row as a submitted task.
2. The work that an ended attempt leaves behind.
3. The record of an ended task, with the true figures of its attempts.
4. The error for a run that cannot continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carma.core.model.outcome import OutOfMemory
from carma.core.model.status import Finished
from carma.core.model.task import Attempt, Task
from carma.core.model.units import show_count
from carma.core.model.values import Activity, GpuId, Owner, SaveSignal, TaskSpec
from carma.core.scheduling.explanation import waiting
from carma.core.scheduling.queue_order import queued_ids
from carma.core.state import State
from carma.errors import Refused
from carma.traces import TraceTask
from carma_lab.runs.figures import Asked, Ran, TaskRun
from carma_lab.simulator.simulated_server import RunningTask

SIGNAL = 10
GRACE_S = 120.0  # or twice the duration of a save: no simulated save takes longer


def signal_of(row: TraceTask) -> SaveSignal | None:
    """The checkpoint signal that its submission declares."""
    return SaveSignal(SIGNAL, max(GRACE_S, 2.0 * (row.save_s or 0.0))) if row.can_leave else None


def saved_work_s(runner: RunningTask) -> float:
    """Work that an ended attempt leaves behind: all of it if it saved on a signal, otherwise that of its last
    checkpoint. An attempt that is stopped or runs out of memory saves nothing more."""
    row, done_s = runner.row, runner.done_s + runner.progress_s
    if runner.saving and row.save_s is not None:
        return done_s
    if row.checkpoint_s <= 0.0:
        return runner.done_s
    return max(runner.done_s, done_s // row.checkpoint_s * row.checkpoint_s)


def spec_of(row: TraceTask, asked: Asked) -> TaskSpec:
    return TaskSpec(
        command=(row.name,),
        directory="/",
        name=row.name,
        gpus=row.gpus,
        priority=asked.priority,
        exclusive=asked.exclusive,
        time_limit_s=asked.time_limit_s,
        checkpoint=signal_of(row),
    )


def owner_of(user: str) -> Owner:
    """The same UID for the same name in every run."""
    uid = 1000 if not user else 1001 + sum(ord(letter) * 31**place for place, letter in enumerate(user)) % 60_000
    return Owner(uid, uid, user or "user")


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
    """Energy of the task, if the trace has its power: no meter separates it from that of its neighbours."""
    power = runner.demand.power
    if power is None:
        return None
    return sum(power * (board.card.most_w - board.card.idle_w) for board in runner.working) * runner.busy_s


NAMED = 5  # tasks


def stalled(state: State, now: float) -> Refused:
    """No task runs, all have arrived, and the queue is not empty. The error states the reason of its first task."""
    queue = list(queued_ids(state, now))
    named = ", ".join(map(str, queue[:NAMED])) + (", …" if len(queue) > NAMED else "")
    count = f"{show_count(len(queue), 'task')} {'waits' if len(queue) == 1 else 'wait'} ({named})"
    reason = waiting(state, now, queue[:1])[queue[0]]
    return Refused(
        f"no task runs or will arrive, and {count}. Task {queue[0]}: {reason.sentence} ({reason.code})",
        "The policy or the settings place it on no GPU, not even on an idle one.",
    )
