"""Requests to the daemon that serves this user.

1. `connect` and `ask`: one request.
2. `for_each` and `for_chosen`: one action on several tasks.
3. `PersistentConnection`: requests that outlast a restart of the daemon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import click

from carma.cli.error_output import complain
from carma.cli.verb import Chosen
from carma.client import MOST_LISTED, REQUEST_S, Client
from carma.errors import CarmaError, NotFound, Unreachable, Usage, WrongState
from carma.paths import find_socket
from carma.wire.api_types import Done, TaskView

T = TypeVar("T")
Action = Callable[[Client, int], Done]
RETRY_S = 0.25
MAX_LINES = 20  # of an action on several tasks
MAX_ABSENCE_S = 300.0  # of a daemon that has answered before


def connect(timeout_s: float = REQUEST_S) -> Client:
    """A client for this user's socket. It sends nothing yet."""
    return Client(find_socket(os.environ), timeout_s=timeout_s)


def ask(question: Callable[[Client], T], timeout_s: float = REQUEST_S) -> T:
    with connect(timeout_s) as client:
        return question(client)


def for_chosen(chosen: Chosen, action: Action, is_wanted: Callable[[TaskView], bool] = lambda _task: True) -> int:
    """Acts on the tasks with these IDs, or on all of the caller's tasks that are wanted."""
    which, ids, name, everything = chosen
    if sum((bool(ids), everything, name is not None)) != 1:
        raise Usage("exactly one of task IDs, --name and --all is required", "`carma queue` lists your tasks")
    with connect() as client:
        if ids:
            return for_each(client, ids, action)
        found = [task.id for task in client.tasks(limit=MOST_LISTED) if is_wanted(task) and name in (None, task.name)]
        if not found and name is not None:
            raise NotFound(f"no {which} of yours with the name {name!r}", "`carma queue` lists your tasks")
        if not found:
            click.echo(f"no {which} of yours")
        return for_each(client, found, action, explicit=False)


def for_each(client: Client, tasks: Iterable[int], action: Action, *, explicit: bool = True) -> int:
    """Acts on each task and prints its result; returns the highest exit code.

    Tasks that the user did not name (`explicit` is false) may have changed their state since they were listed: that is
    no error.
    """
    worst = changed = 0
    for task in tasks:
        try:
            done = action(client, task)
        except Unreachable:
            raise
        except CarmaError as error:
            if explicit or not isinstance(error, WrongState):
                complain(str(error), error.hint)
                worst = max(worst, error.exit_code)
        else:
            changed += 1
            if changed <= MAX_LINES:
                click.echo(done.note or f"task {task}: done")
    if changed > MAX_LINES:
        click.echo(f"… and {changed - MAX_LINES:,} more tasks")
    return worst


class PersistentConnection:
    """Repeats a request while a daemon that has answered before is away. Raises Unreachable for any other daemon."""

    def __init__(self, *, answered: bool = False, until: float | None = None, quiet: bool = False) -> None:
        self._answered = answered
        self._until = until
        self._quiet = quiet
        self._gone_at: float | None = None

    def ask(self, question: Callable[[Client], T]) -> T:
        while True:
            try:
                answer = ask(question)
            except Unreachable as error:
                self.failed(error)
            else:
                self.succeeded()
                return answer

    def succeeded(self) -> None:
        if self._gone_at is not None and not self._quiet:
            complain("the daemon answers again")
        self._answered, self._gone_at = True, None

    def failed(self, error: Unreachable) -> None:
        """Waits before the next request; raises if the daemon never answered or is away for too long."""
        now = time.monotonic()
        if not self._answered or (self._until is not None and now >= self._until):
            raise error
        if self._gone_at is None:
            self._gone_at = now
            if not self._quiet:
                complain(
                    f"the daemon does not answer; waiting up to {MAX_ABSENCE_S / 60:.0f} minutes for its restart",
                    "running tasks continue",
                )
        if now - self._gone_at >= MAX_ABSENCE_S:
            raise error
        time.sleep(RETRY_S)
