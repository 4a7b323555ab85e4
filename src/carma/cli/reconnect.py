"""Speaking with a daemon that may be restarted meanwhile. Tasks outlive that, so waiting for one does too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from carma.cli.connection import connect
from carma.cli.error_output import complain
from carma.cli.owned_output import open_output
from carma.client import Client
from carma.errors import Unreachable
from carma.wire.api_types import TaskView

T = TypeVar("T")
LOOK_S = 0.25
RETURN_S = 300.0  # how long a daemon that went away is waited for


class Steady:
    """Asks until there is an answer, once the daemon has answered at all: one that was there may come back."""

    def __init__(self, *, answered: bool = False, until: float | None = None, quiet: bool = False) -> None:
        self._answered = answered
        self._until = until
        self._quiet = quiet
        self._gone_at: float | None = None

    def ask(self, question: Callable[[Client], T]) -> T:
        while True:
            try:
                with connect() as client:
                    answer = question(client)
            except Unreachable as error:
                self.missed(error)
            else:
                self.heard()
                return answer

    def heard(self) -> None:
        if self._gone_at is not None and not self._quiet:
            complain("the daemon is back")
        self._answered, self._gone_at = True, None

    def missed(self, error: Unreachable) -> None:
        """Waits a little; raises when the daemon never answered, or has been away for too long."""
        now = time.monotonic()
        if not self._answered or (self._until is not None and now >= self._until):
            raise error
        if self._gone_at is None:
            self._gone_at = now
            if not self._quiet:
                complain("the daemon went away; waiting for it to come back", "tasks go on meanwhile")
        if now - self._gone_at >= RETURN_S:
            raise error
        time.sleep(LOOK_S)


def output_of(task: int, attempt: int, stream: str, tail: int | None = None, quiet: bool = False) -> Iterator[bytes]:
    """One attempt's output until it has ended. After a restart of the daemon it goes on at the byte it had come to."""
    steady = Steady(answered=True, quiet=quiet)
    position: int | None = None  # in the whole output; None: nothing was opened yet
    while True:
        try:
            with connect() as client:
                before = _identity(client)
                opened = open_output(
                    client, task, stream=stream, attempt=attempt, tail=tail if position is None else None, follow=True
                )
                steady.heard()
                begin = opened.offset or 0
                position = begin if position is None else max(position, begin)
                skip = position - begin
                for piece in opened.pieces:
                    fresh, skip = piece[skip:], max(0, skip - len(piece))
                    position += len(fresh)
                    if fresh:
                        yield fresh
                # A daemon that ends closes its streams; only one that is still the same has told everything.
                if ended(client.task(task), attempt) and _identity(client) == before:
                    return
            time.sleep(LOOK_S)
        except Unreachable as error:
            steady.missed(error)


def whole_output(task: int, stream: str, tail: int | None) -> Iterator[bytes]:
    """From the newest attempt on, through those that follow, until the task is over."""
    steady = Steady()
    view, seen = steady.ask(lambda client: client.task(task)), 0
    while True:
        following = [each.number for each in view.attempts if each.number > seen]
        for number in following if seen else following[-1:]:
            yield from output_of(task, number, stream, tail if not seen else None)
            seen = number
        if view.state == "finished" and not any(each.number > seen for each in view.attempts):
            return
        view = steady.ask(lambda client: client.task(task, wait_s=LOOK_S))


def ended(view: TaskView, attempt: int) -> bool:
    return view.state == "finished" or any(
        each.number == attempt and each.ended_at is not None for each in view.attempts
    )


def _identity(client: Client) -> tuple[int, float]:
    server = client.server()
    return server.pid, server.started_at
