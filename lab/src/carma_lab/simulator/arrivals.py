"""Rows of a trace as they are submitted: who it is, and what is asked for."""

from __future__ import annotations

from carma.core.model.values import Owner, SaveSignal, TaskSpec
from carma.traces import TraceTask
from carma_lab.runs.figures import Asked
from carma_lab.simulator.simulated_server import RunningTask

SIGNAL = 10
GRACE_S = 120.0  # or twice what a save takes: none is too late here


def signal_of(row: TraceTask) -> SaveSignal | None:
    """What its submission declares."""
    return SaveSignal(SIGNAL, max(GRACE_S, 2.0 * (row.save_s or 0.0))) if row.can_leave else None


def saved_work_s(row: TraceTask, runner: RunningTask) -> float:
    """How much of its work an attempt that ended leaves behind: all of it if it saved on a signal, else what its last
    checkpoint has. An attempt that is told to stop, or that ran out of memory, saves nothing more."""
    done_s = runner.done_s + runner.progress_s
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
    """The same number for the same name, in every run."""
    uid = 1000 if not user else 1001 + sum(ord(letter) * 31**place for place, letter in enumerate(user)) % 60_000
    return Owner(uid, uid, user or "user")
