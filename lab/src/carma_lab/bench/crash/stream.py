"""The client of the crash study: submits without a pause, and remembers what was acknowledged. Some tasks are
cancelled, some are preempted. Each task appends one line to its own file when it starts: its attempt and a token that
no other start has.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
import time
from pathlib import Path

from carma.client import Client
from carma.core.model.values import SaveSignal, TaskSpec
from carma.errors import CarmaError, Unreachable, WrongState
from carma.wire.api_types import SubmitRequest
from carma_lab.bench.crash.server import LIMIT_S, MARK, CrashServer

BACKLOG = 40  # submissions pause while more tasks than this are unfinished
SURVIVOR_S = 3600  # of a child that outlives its task unless CARMA ends it
WAIT_TO_BE_ASKED = "{ trap 'exit 9' USR1; for i in 1 2 3 4 5 6 7 8; do sleep 0.05; done; }"
NOTE_START = 'read token < /proc/sys/kernel/random/uuid; echo "$CARMA_ATTEMPT $token" >> runs/$CARMA_TASK_ID; '
PAUSES_S = ("0", "0.01", "0.05", "0.2", "0.5", "1")


class SubmissionStream(threading.Thread):
    """Submits whenever a daemon answers. Read its sets after `finish`, or while holding `lock`."""

    def __init__(self, server: CrashServer, seed: int) -> None:
        super().__init__(daemon=True)
        self.lock = threading.Lock()
        self.acknowledged: dict[int, int] = {}  # task -> the code with which it ends
        self.cancelled: set[int] = set()
        self.asked_to_save: set[int] = set()  # and that was acknowledged
        self.answers = 0  # rounds of requests that a daemon has answered
        self.errors: list[str] = []
        self._server = server
        self._random = random.Random(seed)
        self._enough = threading.Event()
        self._submitted = 0
        (server.work / "runs").mkdir()

    def run(self) -> None:
        while not self._enough.is_set():
            try:
                with Client(self._server.paths.socket) as client:
                    while not self._enough.is_set():
                        self._act(client)
                        self.answers += 1
            except Unreachable:
                time.sleep(0.002)
            except CarmaError as error:
                if error.code != "internal":  # the daemon is stopping, or the connection broke
                    self.errors.append(repr(error))
            except Exception as error:
                self.errors.append(repr(error))
                return

    def _act(self, client: Client) -> None:
        if self._submitted % 7 == 6:
            waiting = client.tasks(limit=BACKLOG + 1)
            if len(waiting) > BACKLOG:
                time.sleep(0.05)
                return
            if waiting:
                self._cancel(client, self._random.choice(waiting).id)
        if self._submitted % 3 == 2:
            self._ask_to_save(client)
        code, spec = self._task()
        self._submitted += 1
        with self.lock:
            self.acknowledged[client.submit(SubmitRequest(spec=spec)).ids[0]] = code

    def _task(self) -> tuple[int, TaskSpec]:
        choice = self._random
        code = choice.choice([0, 0, 3])
        pause_s = choice.choice(PAUSES_S)
        saves = SaveSignal(signal.SIGUSR1) if choice.random() < 0.3 else None
        # A task that can save waits to be asked the first time that it runs; its line is written before that.
        wait = f"[ $CARMA_PREEMPTED ] || {WAIT_TO_BE_ASKED}; " if saves else ""
        script = f"{NOTE_START}{self._child()}{wait}sleep {pause_s}; exit {code}"
        spec = TaskSpec(
            command=("sh", "-c", script),
            directory=str(self._server.work),
            environment={"PATH": self._server.environment.get("PATH", "/usr/bin:/bin"), MARK: str(self._server.home)},
            checkpoint=saves,
        )
        return code, spec

    def _child(self) -> str:
        """Every tenth task starts a child that would go on; every second one of these without environment, in a
        session of its own."""
        drawn = self._random.random()
        if drawn < 0.05:
            return f"sleep {SURVIVOR_S} & "
        if drawn < 0.1 and shutil.which("setsid"):
            return f"env -i $(command -v setsid) $(command -v sleep) {SURVIVOR_S} & "
        return ""

    def _cancel(self, client: Client, task: int) -> None:
        self.cancelled.add(task)  # before the request: its answer may be lost
        with contextlib.suppress(WrongState):  # it has ended meanwhile
            client.cancel(task)

    def _ask_to_save(self, client: Client) -> None:
        able = [view for view in client.tasks(state="running") if view.checkpoint_signal and not view.asked_to_save_at]
        for task in (view.id for view in able):
            with contextlib.suppress(WrongState):  # it has ended meanwhile
                client.preempt(task)
                self.asked_to_save.add(task)

    def finish(self) -> None:
        self._enough.set()
        self.join(LIMIT_S)
        if self.is_alive():
            self.errors.append(f"the client hangs: no answer within {LIMIT_S:g} s")


def starts_of(work: Path, task: int) -> list[tuple[int, str]]:
    """Attempt and token of every start of a task's command."""
    try:
        lines = (work / "runs" / str(task)).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(attempt), token) for attempt, _, token in (line.partition(" ") for line in lines)]
