"""Words and exit codes for what the daemon answers."""

from __future__ import annotations

import msgspec

from carma.core import outcome as outcomes
from carma.wire.types import Outcome, TaskView


def outcome_text(value: Outcome) -> str:
    """The core's sentence; an outcome of a newer daemon is named by its kind."""
    try:
        return outcomes.describe(msgspec.convert(value, outcomes.Outcome))
    except msgspec.ValidationError:
        return str(value.get("kind", "ended"))


def exit_code_of(task: TaskView) -> int:
    """What `wait` and `run` return for a finished task."""
    if task.exit_code is not None:
        return task.exit_code
    if task.outcome is None:
        return 0
    try:
        return outcomes.exit_code(msgspec.convert(task.outcome, outcomes.Outcome))
    except msgspec.ValidationError:
        return 1


def ending(task: TaskView) -> str:
    """`task 12 succeeded`, for the line after following it."""
    return f"task {task.id} " + (outcome_text(task.outcome) if task.outcome else task.state)
