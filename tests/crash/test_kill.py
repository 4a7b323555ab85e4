"""`kill -9` at any moment: nothing that was acknowledged is lost, and nothing runs twice.

The daemon is killed 200 times at random moments (while it starts, serves, launches, stores) while a client goes on
submitting. Each task writes a line for each time it runs; in the end the lines are the attempts, one for one. Some are
asked to save and leave: they come back, and end as they would have.

    CARMA_CRASH_SEED=7 CARMA_CRASH_KILLS=1000 pytest -n0 -s tests/crash
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

from carma.client import Client
from carma.core.model import SaveSignal
from carma.errors import CarmaError, Unreachable, WrongState
from tests.harness import LIMIT_S, Daemon, HarnessError, daemon_at_rest, request, until

KILLS = int(os.environ.get("CARMA_CRASH_KILLS", "200"))
GPUS = 16
WAIT_TO_BE_ASKED = "{ trap 'exit 9' USR1; for i in 1 2 3 4 5 6 7 8; do sleep 0.05; done; }"
BACKLOG = 40  # submissions pause while more than this is unfinished: the test is about crashes, not about load

# Loads everything once and forks a daemon for each line it reads: a start takes a tenth of the time, and what starts
# is the daemon itself, with the same code and the same files.
NURSERY = """
import os, sys
import carma.daemon.main, carma.daemon.api, carma.daemon.http, carma.daemon.restore, carma.daemon.housekeeping
import carma.daemon.world, carma.estimate.registry, carma.launch.process, carma.store.sqlite
import carma.vgpu.world, carma.vgpu.sampler, carma.plugins
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        try:
            os._exit(carma.daemon.main.run({}))
        except BaseException as error:
            print(f"the daemon could not start: {error!r}", file=sys.stderr, flush=True)
            os._exit(99)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Nursery:
    """Starts a daemon; tells how it ended."""

    def __init__(self, daemon: Daemon) -> None:
        self._log = (daemon.home / "test-daemon.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            env=daemon.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def start(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def kill(self, pid: int) -> None:
        """Dead before its time is what a daemon must not be: a start that fails is a failure of the test."""
        os.kill(pid, signal.SIGKILL)
        code = self._read()
        if code != -signal.SIGKILL:
            raise HarnessError(f"the daemon ended by itself with {code}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(LIMIT_S)
        self._log.close()


class Submitter(threading.Thread):
    """Submits, and now and then cancels, whenever a daemon answers; remembers what was acknowledged."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged: dict[int, int] = {}  # task -> the code it ends with
        self.cancelled: set[int] = set()
        self.asked: set[int] = set()  # to save, and that was acknowledged
        self.unexpected: list[BaseException] = []
        self._daemon = daemon
        self._random = random.Random(seed)
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.is_set():
            try:
                with Client(self._daemon.paths.socket) as client:
                    while not self._enough.is_set():
                        self._act(client)
            except Unreachable:
                time.sleep(0.002)
            except CarmaError as error:
                if error.code != "internal":  # "the daemon is stopping" or a torn connection
                    self.unexpected.append(error)
            except BaseException as error:
                self.unexpected.append(error)
                return

    def _act(self, client: Client) -> None:
        if len(self.acknowledged) % 7 == 6:
            waiting = client.tasks(limit=BACKLOG + 1)
            if len(waiting) > BACKLOG:
                time.sleep(0.05)
                return
            if waiting:
                task = self._random.choice(waiting).id
                self.cancelled.add(task)  # before it is asked: the answer may be lost
                with contextlib.suppress(WrongState):  # it ended meanwhile
                    client.cancel(task)
        if len(self.acknowledged) % 3 == 2:
            self._ask_to_save(client)
        code = self._random.choice([0, 0, 3])
        pause = self._random.choice(["0", "0.01", "0.05", "0.2"])
        saves = SaveSignal(signal.SIGUSR1) if self._random.random() < 0.3 else None
        # One that saves waits to be asked, for a while and the first time; its line is written before it may leave.
        wait = f"[ $CARMA_PREEMPTED ] || {WAIT_TO_BE_ASKED}; " if saves else ""
        script = f'echo "$CARMA_ATTEMPT" >> runs/$CARMA_TASK_ID; {wait}sleep {pause}; exit {code}'
        answer = client.submit(request("sh", "-c", script, directory=str(self._daemon.home), checkpoint=saves))
        self.acknowledged[answer.ids[0]] = code

    def _ask_to_save(self, client: Client) -> None:
        able = [view for view in client.tasks(state="running") if view.checkpoint_signal and not view.asked_to_save_at]
        for task in (view.id for view in able):
            with contextlib.suppress(WrongState):  # it has ended meanwhile
                client.preempt(task)
                self.asked.add(task)

    def finish(self) -> None:
        self._enough.set()
        self.join(LIMIT_S)
        assert not self.is_alive()


@contextlib.contextmanager
def submitting(daemon: Daemon, seed: int) -> Iterator[Submitter]:
    submitter = Submitter(daemon, seed)
    submitter.start()
    try:
        yield submitter
    finally:
        submitter.finish()


def survive(daemon: Daemon, nursery: Nursery, chance: random.Random) -> None:
    """One life and its end: half of the time in the middle of starting, half of the time while it serves."""
    pid = nursery.start()
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, 0.12))
    else:
        with contextlib.suppress(HarnessError):
            until(lambda: serves(daemon, pid), "the daemon answers")
        time.sleep(chance.uniform(0.0, 0.08))
    nursery.kill(pid)


def serves(daemon: Daemon, pid: int) -> bool:
    try:
        with Client(daemon.paths.socket) as client:
            return client.server().pid == pid
    except CarmaError:
        return False


def test_200_random_kills_lose_nothing_and_repeat_nothing() -> None:
    seed = int(os.environ.get("CARMA_CRASH_SEED", str(random.randrange(1 << 32))))
    print(f"CARMA_CRASH_SEED={seed}")
    chance = random.Random(seed)
    with daemon_at_rest(gpus=GPUS, stopping__grace_s="0.2") as daemon:
        (daemon.home / "runs").mkdir()
        nursery = Nursery(daemon)
        try:
            with submitting(daemon, seed) as submitter:
                for _ in range(KILLS):
                    survive(daemon, nursery, chance)
        finally:
            nursery.close()
        assert submitter.unexpected == []
        done = f"{len(submitter.cancelled)} cancelled, {len(submitter.asked)} asked to save"
        print(f"{KILLS} kills, {len(submitter.acknowledged)} tasks, {done}")
        daemon.start()
        check(daemon, submitter, f"CARMA_CRASH_SEED={seed}")


def check(daemon: Daemon, submitter: Submitter, seed: str) -> None:
    until(lambda: not daemon.client.tasks(limit=1), f"every task ends ({seed})")
    assert len(submitter.acknowledged) > KILLS // 10, f"hardly anything was submitted ({seed})"
    for task, code in submitter.acknowledged.items():
        view = daemon.client.task(task)  # raises if it was lost
        if task in submitter.cancelled and (view.outcome or {})["kind"] == "cancelled":
            continue
        assert view.exit_code == code, f"task {task}: {view.outcome} ({seed})"
    for task in submitter.asked - submitter.cancelled:
        kinds = [(attempt.outcome or {})["kind"] for attempt in daemon.client.task(task).attempts]
        assert set(kinds[:-1]) <= {"preempted"}, f"task {task} was asked to save and came to {kinds} ({seed})"
        assert kinds[-1] in ("succeeded", "failed"), f"task {task} was asked to save and came to {kinds} ({seed})"
    for view in daemon.client.history(limit=100_000):  # with those whose acknowledgement was lost on its way
        lines = daemon.home / "runs" / str(view.id)
        ran = Counter(lines.read_text().split() if lines.exists() else [])
        attempts = {str(attempt.number) for attempt in view.attempts}
        assert set(ran) <= attempts, f"task {view.id} ran as {dict(ran)}; known attempts: {attempts} ({seed})"
        assert all(count == 1 for count in ran.values()), f"task {view.id} ran twice: {dict(ran)} ({seed})"
        if (view.outcome or {})["kind"] != "cancelled":
            assert set(ran) == attempts, f"task {view.id} has attempts {attempts} but ran as {dict(ran)} ({seed})"
