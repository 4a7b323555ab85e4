"""What became of the acknowledged tasks: lost, run twice, stuck, or with a wrong outcome.

- lost: acknowledged, and unknown to the daemon afterwards
- run twice: two starts of the same attempt, a start of an attempt that the daemon has no record of, or an attempt that
  follows one whose end is not on record or was a success
- stuck: not finished after everything was continued and a generous time
- wrong outcome: neither runner nor command was killed, and the exit code is not the task's; or an attempt is on record
  whose command never started
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from carma.client import Client
from carma.core.model.values import Record
from carma.errors import NotFound
from carma.wire.api_types import TaskView
from carma_lab.bench.crash.server import CrashServer
from carma_lab.bench.crash.stream import SubmissionStream, starts_of

FINISH_LIMIT_S = 240.0


class Excused(Record, frozen=True):
    """Tasks for which less is asked.

    hit: runner or command was killed, so any outcome is right.
    rolled_back: may be unknown to a copy that took the database's place.
    replayed: unfinished in such a copy, so that later attempts are not on record. Still no attempt may start twice.
    """

    hit: frozenset[int] = frozenset()
    rolled_back: frozenset[int] = frozenset()
    replayed: frozenset[int] = frozenset()


class Verdict(Record, frozen=True, kw_only=True):
    acknowledged: int
    started: int  # tasks whose command ran
    lost: tuple[str, ...] = ()
    run_twice: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    wrong_outcome: tuple[str, ...] = ()
    survivors: int = 0  # processes of finished tasks that still run
    still_booked_mib: int = 0
    outcomes: dict[str, int] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.lost, *self.run_twice, *self.stuck, *self.wrong_outcome)


def judge(server: CrashServer, stream: SubmissionStream, excused: Excused) -> Verdict:
    """Waits until every task has finished. The daemon must serve, and nothing may be stopped."""
    with Client(server.paths.socket) as client:
        stuck = [f"task {view.id} is {view.state}: {view.reason}" for view in _unfinished(client)]
        found = {task: _view(client, task) for task in sorted(stream.acknowledged)}
        ran = sorted(int(file.name) for file in (server.work / "runs").iterdir())
        others = {task: _view(client, task) for task in ran if task not in found}
        booked_mib = sum(gpu.booked_mib for gpu in client.gpus())
    known = {task: view for task, view in {**found, **others}.items() if view is not None}
    finished = {task: view for task, view in known.items() if view.state == "finished"}
    unknown = [task for task in ran if task not in known and task not in excused.rolled_back]
    return Verdict(
        acknowledged=len(stream.acknowledged),
        started=len(ran),
        lost=tuple(f"task {task} was acknowledged and is unknown" for task, view in found.items() if view is None),
        run_twice=(
            *(text for task in ran for text in _repeats(server, excused, task, known.get(task))),
            *(f"task {task} ran and is unknown" for task in unknown),
        ),
        stuck=tuple(stuck),
        wrong_outcome=tuple(
            text for view in finished.values() for text in _wrong(server, stream, excused, view) if text
        ),
        survivors=len(server.strays()),
        still_booked_mib=booked_mib,
        outcomes=dict(Counter(str((view.outcome or {}).get("kind")) for view in finished.values())),
    )


def _unfinished(client: Client) -> list[TaskView]:
    deadline_s = time.monotonic() + FINISH_LIMIT_S
    while left := client.tasks(user="all"):
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)
    return []


def _view(client: Client, task: int) -> TaskView | None:
    try:
        return client.task(task)
    except NotFound:
        return None


def _repeats(server: CrashServer, excused: Excused, task: int, view: TaskView | None) -> Iterator[str]:
    starts = starts_of(server.work, task)
    for attempt, count in Counter(attempt for attempt, _ in starts).items():
        if count > 1:
            yield f"attempt {attempt} of task {task} started {count} times"
    if view is None or task in excused.replayed:
        return
    on_record = {attempt.number: attempt for attempt in view.attempts}
    for attempt in sorted({attempt for attempt, _ in starts}):
        before = on_record.get(attempt - 1)
        if attempt not in on_record:
            yield f"attempt {attempt} of task {task} started and is not on record"
        elif attempt > 1 and (before is None or (before.outcome or {}).get("kind") in (None, "succeeded")):
            yield f"attempt {attempt} of task {task} started without a reason"


def _wrong(server: CrashServer, stream: SubmissionStream, excused: Excused, view: TaskView) -> Iterator[str]:
    task, kind = view.id, (view.outcome or {}).get("kind")
    if task in excused.hit or task in excused.replayed or (kind == "cancelled" and task in stream.cancelled):
        return
    code = stream.acknowledged.get(task)
    if code is not None and view.exit_code != code:
        yield f"task {task} ended with {code} and is on record as {view.outcome}"
    kinds = [(attempt.outcome or {}).get("kind") for attempt in view.attempts]
    if set(kinds[:-1]) - {"preempted"}:
        yield f"task {task} had no reason for another attempt: {kinds}"
    missing = {attempt.number for attempt in view.attempts} - {attempt for attempt, _ in starts_of(server.work, task)}
    if missing and kind != "cancelled":
        yield f"attempts {sorted(missing)} of task {task} are on record and never started"
