"""CARMA lets deep-learning tasks share the GPUs of a server safely.

`carma.submit` queues a task (submitted_task.py). It is imported when it is first used: the command line imports this
module too.
"""

__version__ = "0.3.0"
TYPE_CHECKING = False  # as in typing, whose import takes a while
if TYPE_CHECKING:
    from carma.submitted_task import SubmittedTask as SubmittedTask
    from carma.submitted_task import submit as submit


def __getattr__(name: str) -> object:
    if name not in ("submit", "SubmittedTask"):
        raise AttributeError(f"module 'carma' has no attribute {name!r}")
    from carma import submitted_task

    return getattr(submitted_task, name)
