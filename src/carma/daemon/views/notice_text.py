"""The text of a notice: what happened to which task, for how long it ran, and its memory."""

from __future__ import annotations

from carma.core.model.outcome import (
    Cancelled,
    Disrupted,
    Lost,
    Outcome,
    OutOfMemory,
    describe,
    describe_to_others,
    exit_code,
)
from carma.core.model.status import Finished, Running
from carma.core.model.task import Attempt, Notice, Task
from carma.core.model.units import show_count, show_mib, show_s
from carma.launch.output_paths import program_name

Facts = dict[str, str | int | float | None]


class NoticeText:
    """`whole`: for the task's owner. Otherwise words of programs and users are left out: a notice leaves the server."""

    def __init__(self, task: Task, notice: Notice, host: str, *, whole: bool, reason: str = "") -> None:
        """`reason`: why the task waits."""
        self._task = task
        self._notice = notice
        self._host = host
        self._whole = whole
        self._reason = reason if whole else ""
        self._name = task.spec.name or (program_name(task.spec.command) if whole else "-")
        self._attempt = next((one for one in task.attempts if one.number == notice.attempt), None)
        self._retried = notice.kind == "retry" or (notice.kind == "oom" and self._outcome_of_task() is None)

    @property
    def subject(self) -> str:
        outcome = self._outcome()
        what = self._condition() if outcome is None else describe_to_others(outcome)
        return f"CARMA: task {self._task.id} ({self._name}) {what}" + ("; it is retried" if self._retried else "")

    @property
    def text(self) -> str:
        task = self._task
        first = f"Task {task.id} ({self._name}) of {task.owner.name} on {self._host} {self._what()}."
        output = f"; output: carma logs {task.id}" if self._attempt is not None else ""
        return "\n".join([first, *self._lines(), f"Details: carma show {task.id}{output}"]) + "\n"

    @property
    def facts(self) -> Facts:
        outcome, attempt = self._outcome_of_task(), self._attempt
        return {
            "notice": self._notice.kind,
            "task_id": self._task.id,
            "task_name": self._name,
            "user": self._task.owner.name,
            "host": self._host,
            "attempt": self._notice.attempt,
            "exit_code": None if outcome is None else exit_code(outcome),
            "ran_s": None if attempt is None else _ran_s(attempt),
            "gpu_memory_used_mib": None if attempt is None else attempt.observed_mib,
            "gpu_memory_booked_mib": None if attempt is None else attempt.placement.booking.memory_mib,
        }

    def _outcome_of_task(self) -> Outcome | None:
        """If the notice is of its end."""
        status, ended = self._task.status, self._notice.kind in ("finish", "failure", "oom")
        is_last = self._notice.attempt == self._task.key.attempt
        return status.outcome if isinstance(status, Finished) and ended and is_last else None

    def _outcome(self) -> Outcome | None:
        if self._notice.kind in ("wait", "idle"):
            return None
        return self._outcome_of_task() or (self._attempt.outcome if self._attempt is not None else None)

    def _what(self) -> str:
        outcome = self._outcome()
        if outcome is None:
            return self._condition() + (f": {self._reason}" if self._reason else "")
        retried = "; it is retried" if self._retried else ""
        return (_verb(outcome) + describe(outcome) if self._whole else describe_to_others(outcome)) + retried

    def _condition(self) -> str:
        """What lasts too long, for a notice that is not of an end."""
        at, status = self._notice.at, self._task.status
        if self._notice.kind == "wait":
            return f"has waited for {show_s(at - self._waits_since())}"
        if not isinstance(status, Running) or status.idle is None:
            return "held GPU memory without using the SMs for a while"
        ends = "; it is ended unless it uses them again" if status.idle.action == "end" else ""
        return f"has held GPU memory for {show_s(at - status.idle.since)} without using the SMs{ends}"

    def _waits_since(self) -> float:
        ends = [attempt.ended_at for attempt in self._task.attempts if attempt.ended_at is not None]
        return max([self._task.submitted_at, *ends])

    def _lines(self) -> list[str]:
        attempt = self._attempt
        if attempt is None or self._notice.kind == "wait":
            return []
        ran_s, gpus = _ran_s(attempt), show_count(len(attempt.placement.gpus), "GPU")
        used = "not measured" if attempt.observed_mib is None else f"{show_mib(attempt.observed_mib)} used"
        booked = show_mib(attempt.placement.booking.memory_mib)
        ran = [] if ran_s is None else [f"Attempt {attempt.number} ran for {show_s(ran_s)} on {gpus}."]
        return [*ran, f"GPU memory: {used}, {booked} booked."]


def _verb(outcome: Outcome) -> str:
    match outcome:
        case OutOfMemory():
            return "ran "
        case Cancelled() | Lost() | Disrupted():
            return "was "
        case _:
            return ""


def _ran_s(attempt: Attempt) -> float | None:
    if attempt.started_at is None or attempt.ended_at is None:
        return None
    return attempt.ended_at - attempt.started_at
