"""Rows of a trace as they are submitted: who it is, and what is asked for."""

from __future__ import annotations

from carma.core.model.values import Owner, TaskSpec
from carma.traces import TraceTask
from carma_lab.runs.figures import Asked
from carma_lab.simulator import checkpoints as saving


def spec_of(row: TraceTask, asked: Asked) -> TaskSpec:
    return TaskSpec(
        command=(row.name,),
        directory="/",
        name=row.name,
        gpus=row.gpus,
        priority=asked.priority,
        exclusive=asked.exclusive,
        time_limit_s=asked.time_limit_s,
        checkpoint=saving.signal_of(row),
    )


def owner_of(user: str) -> Owner:
    """The same number for the same name, in every run."""
    uid = 1000 if not user else 1001 + sum(ord(letter) * 31**place for place, letter in enumerate(user)) % 60_000
    return Owner(uid, uid, user or "user")
