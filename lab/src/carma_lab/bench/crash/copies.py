"""Copies of the database, taken at random moments while the daemon writes, and opened again.

1. `naive`: `carma.db`, then at once `carma.db-wal`, as a plain file backup does.
2. `naive_slow`: the same with a pause between the two files, as on a slow disk or with a large database.
3. `backup`: SQLite's online backup, which is the documented way.

A copy is whole when it opens, passes SQLite's integrity check, can be replayed, and holds every task that was
acknowledged before the copy began.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from carma.core.model.settings import Rules
from carma.core.model.values import Record, TaskId
from carma.daemon.recovery_on_start import replay
from carma.errors import CarmaError
from carma.plugins import load_policy
from carma.store.sqlite import SqliteStore
from carma_lab.bench.crash.server import LIMIT_S, CrashServer
from carma_lab.bench.crash.stream import SubmissionStream

METHODS = ("naive", "naive_slow", "backup")
SLOW_LIMIT_S = 2.0
EVERY_LIMIT_S = 0.6
PAUSE_S = 0.05


PROBLEMS = {
    "refused": "of these: CARMA does not open it",
    "index_damaged": "of these: CARMA opens it, and SQLite's integrity check fails",
    "tasks_missing": "of these: whole for SQLite and CARMA, without acknowledged tasks",
}


class Finding(Record, frozen=True, kw_only=True):
    """`problem`: one of PROBLEMS, or empty for a copy that is whole. `unfinished`: the tasks that have not finished."""

    method: str
    problem: str = ""
    detail: str = ""
    unfinished: tuple[int, ...] = ()


class WholeCopy(Record, frozen=True):
    """A copy that can take the database's place. It knows every task of `acknowledged`."""

    folder: Path
    acknowledged: frozenset[int]
    unfinished: frozenset[int]


class Copier(threading.Thread):
    """Takes copies until `finish`. Keeps the newest whole one for `take`."""

    def __init__(self, server: CrashServer, stream: SubmissionStream, seed: int) -> None:
        super().__init__(daemon=True)
        self.findings: list[Finding] = []
        self.not_taken: Counter[str] = Counter()  # why no copy could be made
        self._server = server
        self._stream = stream
        self._random = random.Random(seed)
        self._folder = server.home / "copies"
        self._folder.mkdir()
        self._turn = threading.Lock()
        self._newest: WholeCopy | None = None
        self._enough = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._enough.wait(self._random.uniform(0.0, EVERY_LIMIT_S)):
            number += 1
            with self._turn:  # not while the database is being replaced
                self._copy(self._folder / str(number), METHODS[number % len(METHODS)])

    def _copy(self, folder: Path, method: str) -> None:
        with self._stream.lock:
            before = frozenset(self._stream.acknowledged)
        pause_s = self._random.uniform(0.0, SLOW_LIMIT_S) if method == "naive_slow" else 0.0
        folder.mkdir()
        try:
            take_copy(self._server.paths.database, folder, method, pause_s)
        except (OSError, sqlite3.Error) as error:
            self.not_taken[f"{method}: {error}"] += 1
            shutil.rmtree(folder)
            return
        finding = examine(folder, method, before)
        self.findings.append(finding)
        if finding.problem:
            shutil.rmtree(folder)
        else:
            self._keep(WholeCopy(folder, before, frozenset(finding.unfinished)))

    def _keep(self, copy: WholeCopy) -> None:
        if self._newest is not None:
            shutil.rmtree(self._newest.folder, ignore_errors=True)
        self._newest = copy

    def take(self) -> WholeCopy | None:
        """The newest whole copy, which is then the caller's. No copy is taken until `release`."""
        self._turn.acquire()
        copy, self._newest = self._newest, None
        return copy

    def release(self) -> None:
        self._turn.release()

    def finish(self) -> None:
        self._enough.set()
        self.join(LIMIT_S)


def take_copy(database: Path, folder: Path, method: str, pause_s: float = 0.0) -> None:
    """Raises OSError or sqlite3.Error where there is nothing to copy."""
    target = folder / database.name
    if method == "backup":
        source = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=LIMIT_S)
        with closing(source), closing(sqlite3.connect(target)) as into:
            source.backup(into)
        return
    shutil.copyfile(database, target)
    time.sleep(pause_s)
    log = database.with_name(database.name + "-wal")
    if log.exists():
        shutil.copyfile(log, folder / log.name)


def examine(folder: Path, method: str, acknowledged: Iterable[int]) -> Finding:
    """Opens a second copy: the first one stays as it was taken."""
    opened = folder.with_name(folder.name + "-opened")
    shutil.copytree(folder, opened)
    try:
        unfinished, missing = _read(opened / "carma.db", acknowledged)
        damage = _integrity(opened / "carma.db")
    except CarmaError as error:
        return Finding(method=method, problem="refused", detail=str(error))
    finally:
        shutil.rmtree(opened)
    if damage != "ok":
        return Finding(method=method, problem="index_damaged", detail=damage)
    if missing:
        return Finding(method=method, problem="tasks_missing", detail=f"{len(missing)} tasks")
    return Finding(method=method, unfinished=tuple(unfinished))


def _read(database: Path, acknowledged: Iterable[int]) -> tuple[list[int], list[int]]:
    """The unfinished tasks of a database, and those of `acknowledged` that it does not know."""
    with closing(SqliteStore(database)) as store:
        tasks = replay(store.load(), Rules(), load_policy("magm")).state.tasks
        return sorted(tasks), [task for task in acknowledged if task not in tasks and store.task(TaskId(task)) is None]


def _integrity(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
