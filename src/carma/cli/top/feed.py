"""Threads that ask the daemon and hand over what they got. They know nothing of the terminal.

1. `Poller`: asks one question at an interval, also while the daemon is away.
2. `Question`: the server, its GPUs and its tasks.
3. `LogFollower`: the output of a task as it appears, through all attempts and across restarts of the daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from carma.cli.connection import connect
from carma.cli.follow import Stop, whole_output
from carma.client import MOST_LISTED, Client
from carma.errors import CarmaError
from carma.wire.api_types import GpuView, ServerView, TaskView

T = TypeVar("T")
REQUEST_S = 10.0
FULL_S = 10.0  # between two lists of all tasks without an event: the reasons of waiting tasks contain times
RETRY_S = 1.0
TAIL_LINES = 500


class Snapshot(NamedTuple):
    server: ServerView
    gpus: list[GpuView]
    tasks: list[TaskView]  # in the order of the queue


class Poller(threading.Thread):
    """`deliver` gets each answer or error, in this thread."""

    def __init__(
        self, question: Callable[[Client], T], deliver: Callable[[T | CarmaError], object], interval_s: float
    ) -> None:
        super().__init__(daemon=True)
        self._question: Callable[[Client], object] = question
        self._deliver: Callable[..., object] = deliver
        self._interval_s = interval_s
        self._wake, self._stopped = threading.Event(), False

    def run(self) -> None:
        with connect(REQUEST_S) as client:
            while not self._stopped:
                try:
                    self._deliver(self._question(client))
                except CarmaError as error:
                    self._deliver(error)
                self._wake.wait(self._interval_s)
                self._wake.clear()

    def wake(self) -> None:
        """Ask now."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()


class Question:
    """Asks for all tasks only after an event or after FULL_S, otherwise for the running ones: what waits does not
    change without an event. `owner`: as in `Client.tasks`."""

    def __init__(self, owner: str | None) -> None:
        self.owner = owner
        self._tasks: list[TaskView] = []
        self._asked_at = -FULL_S
        self._changes = _Changes()
        self._changes.start()

    def stop(self) -> None:
        self._changes.stop()

    def ask_for(self, owner: str | None) -> None:
        self.owner, self._asked_at = owner, -FULL_S

    def __call__(self, client: Client) -> Snapshot:
        owner, now = self.owner, time.monotonic()
        server, gpus = client.server(), client.gpus()
        if self._changes.take() or now - self._asked_at >= FULL_S:
            self._tasks = client.tasks(user=owner, limit=MOST_LISTED)
            self._asked_at = now
        else:
            running = {task.id: task for task in client.tasks(user=owner, state="running", limit=MOST_LISTED)}
            self._tasks = [running.get(task.id, task) for task in self._tasks]
        return Snapshot(server, gpus, self._tasks)


class _Changes(threading.Thread):
    """Whether there were events. While the stream of events is interrupted, there may have been."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seen, self._connected = threading.Event(), False
        self._client: Client | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._client is not None:
            self._client.interrupt()

    def take(self) -> bool:
        seen = self._seen.is_set() or not self._connected
        self._seen.clear()
        return seen

    def run(self) -> None:
        while not self._stopped:
            try:
                with connect(REQUEST_S) as client:
                    self._client = client
                    events = client.events()
                    self._seen.set()
                    self._connected = True
                    for _ in events:
                        self._seen.set()
            except CarmaError:
                pass
            self._connected = False
            time.sleep(RETRY_S)


class LogFollower(threading.Thread):
    """`deliver` gets the last lines of one stream and what follows, and at last the error if there is one."""

    def __init__(self, task: int, stream: str, deliver: Callable[[str, bytes | CarmaError], object]) -> None:
        super().__init__(daemon=True)
        self._stop_output = Stop()
        self._output = whole_output(task, stream, TAIL_LINES, quiet=True, stop=self._stop_output)
        self._stream = stream
        self._deliver = deliver

    def run(self) -> None:
        try:
            for piece in self._output:
                if self._stop_output.is_set():
                    return
                self._deliver(self._stream, piece)
        except (CarmaError, OSError) as error:
            if not self._stop_output.is_set():
                self._deliver(self._stream, error if isinstance(error, CarmaError) else CarmaError(str(error)))

    def stop(self) -> None:
        self._stop_output.set()
