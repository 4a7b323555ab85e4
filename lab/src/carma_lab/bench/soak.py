"""`carma bench soak`: many short tasks through one daemon, then retention. It measures and never passes or fails.

1. A tenth of the tasks, then the latency of each call ("first").
2. The rest, then the same again ("last"), and what daemon and files take ("end").
3. The daemon is started again with `daemon.keep_logs_days` near 0, and removes everything ("retention").

Only the public API and the file system are used, so that versions can be compared.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from carma.client import Client
from carma.core.model.values import Record, TaskSpec
from carma.paths import find_paths
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, ending_in_order, wait_until
from carma.wire.api_types import SubmitRequest, TaskView
from carma_lab.bench.machine import time_ms
from carma_lab.bench.results_file import Figure, FigureLog, percentiles

GPUS = 16
USERS = (61001, 61002, 61003)  # where the daemon is root; no entry in the password file is needed
BACKLOG = 100  # most tasks that are queued or run at the same time
FINISH_LIMIT_S = 300.0
SETTLE_S = 30.0  # for the database file to shrink after the last removal
READERS = 4
CALLS = 100
NEARLY_NOTHING_DAYS = 1e-6


class Options(Record, frozen=True, kw_only=True):
    """`json` is a file to write, or "-" for standard output."""

    tasks: int = 10_000
    retention_s: float = 240.0
    json: str | None = None


def run(options: Options) -> int:
    log = FigureLog(options.json)
    began_s = time.monotonic()
    with ending_in_order(), PrivateDaemon(_settings()) as daemon:
        soak = Soak(daemon)
        for figure in soak.measure(options.tasks, options.retention_s):
            log.add(figure)
    took_s = round(time.monotonic() - began_s, 1)
    log.write("soak", options, took_s=took_s, tasks=options.tasks, users=len(soak.users))
    return 0


def _settings(**daemon: object) -> PrivateSettings:
    """Gate and warm-up would hold tasks back whose GPUs never show any activity."""
    tables: dict[str, dict[str, object]] = {"gate": {"enabled": False}, "warmup": {"enabled": False}, "daemon": daemon}
    return PrivateSettings(gpus=GPUS, settings=tables)


class Soak:
    def __init__(self, daemon: PrivateDaemon) -> None:
        self.users = USERS if os.geteuid() == 0 else (os.geteuid(),)
        self._daemon = daemon
        self._paths = find_paths(daemon.environment)
        self._ids: list[int] = []
        self._submit_ms: list[float] = []
        self._queue_ms: list[float] = []
        self._make_directories()

    def _make_directories(self) -> None:
        self._daemon.home.chmod(0o755)  # tasks of other users enter it
        for uid in self.users:
            folder = self._daemon.work / str(uid)
            folder.mkdir()
            os.chown(folder, uid, -1)

    def measure(self, tasks: int, retention_s: float) -> Iterator[Figure]:
        first = max(1, tasks // 10)
        yield from self._use("before")
        self._pass(first)
        yield from self._latencies("first", first)
        began_s = time.monotonic()
        self._pass(tasks - first)
        took_s = time.monotonic() - began_s
        unfinished = sum(self._daemon.client.task(task).state != "finished" for task in self._ids)
        yield Figure(name="tasks.rate", value=(tasks - first) / took_s, unit="1/s", how=f"{tasks - first} short tasks")
        yield Figure(name="tasks.unfinished", value=unfinished, unit="", how="of all, by their ids")
        yield from self._latencies("last", first)
        yield from self._use("end")
        yield from self._retain(retention_s)

    # Tasks.

    def _pass(self, count: int) -> None:
        """Submits `count` tasks and waits for their end. The users take turns."""
        self._submit_ms.clear()
        self._queue_ms.clear()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(self._client_of(uid)) for uid in self.users]
            for number in range(count):
                if number % 20 == 0:
                    self._wait_until(lambda: self._queued() < BACKLOG)
                place = number % len(clients)
                request = SubmitRequest(spec=self._spec(self.users[place]))
                self._submit_ms.append(time_ms(lambda: self._ids.extend(clients[place].submit(request).ids)))  # noqa: B023
        self._wait_until(lambda: self._queued() == 0)

    def _spec(self, uid: int) -> TaskSpec:
        return TaskSpec(
            command=("sh", "-c", "echo task $CARMA_TASK_ID"),
            directory=str(self._daemon.work / str(uid)),
            environment={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            gpu_memory_mib=256,
        )

    def _queued(self) -> int:
        unfinished: list[TaskView] = []
        self._queue_ms.append(time_ms(lambda: unfinished.extend(self._daemon.client.tasks(user="all"))))
        return len(unfinished)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, FINISH_LIMIT_S, f"tasks did not end within {FINISH_LIMIT_S:g} s")

    @contextlib.contextmanager
    def _client_of(self, uid: int) -> Iterator[Client]:
        """The kernel tells the daemon which user has made a connection."""
        with Client(self._daemon.socket) as client:
            own = os.geteuid()
            os.seteuid(uid)
            try:
                client.server()
            finally:
                os.seteuid(own)
            yield client

    # Figures.

    def _latencies(self, when: str, newest: int) -> Iterator[Figure]:
        client, known = self._daemon.client, f"{len(self._ids)} tasks so far"
        yield from percentiles(
            f"submit.{when}", self._submit_ms[-newest:], f"one submission, up to {BACKLOG} unfinished"
        )
        yield from percentiles(f"queue.{when}", self._queue_ms[-newest:], f"all unfinished tasks, up to {BACKLOG}")
        for limit, calls in ((100, CALLS), (1000, CALLS // 4)):
            spans_ms = [time_ms(lambda: client.history(user="all", limit=limit)) for _ in range(calls)]  # noqa: B023
            yield from percentiles(f"history_{limit}.{when}", spans_ms, f"the newest {limit} finished tasks; {known}")
        how = f"/v1/server while {READERS} clients read the newest 1000 finished tasks; {known}"
        yield from percentiles(f"server_beside_history.{when}", self._beside_history(), how)

    def _beside_history(self) -> list[float]:
        """Latencies of the cheapest call while processes of their own read the archive."""
        command = [sys.executable, "-m", "carma_lab.bench.soak", str(self._daemon.socket)]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(READERS)]
        try:
            for reader in readers:
                assert reader.stdout is not None
                reader.stdout.readline()  # it has its first answer
            return [time_ms(self._daemon.client.server) for _ in range(CALLS)]
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()

    def _use(self, when: str) -> Iterator[Figure]:
        pid, database = self._daemon.pid, self._paths.database
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        inodes, used_bytes = tree_size(self._paths.log_dir)
        yield Figure(name=f"rss.{when}", value=int(status["VmRSS"].split()[0]) / 1024, unit="MiB", how="of the daemon")
        yield Figure(name=f"descriptors.{when}", value=len(os.listdir(f"/proc/{pid}/fd")), unit="", how="of the daemon")
        yield Figure(name=f"threads.{when}", value=int(status["Threads"]), unit="", how="of the daemon")
        yield Figure(name=f"log_inodes.{when}", value=inodes, unit="", how="files and directories below the logs")
        yield Figure(name=f"log_disk.{when}", value=used_bytes / 2**20, unit="MiB", how="their blocks")
        for name, suffix in (("database", ""), ("wal", "-wal")):
            size = file_size(database.with_name(database.name + suffix))
            yield Figure(name=f"{name}.{when}", value=size / 2**20, unit="MiB", how=f"size of carma.db{suffix}")

    # Retention.

    def _retain(self, limit_s: float) -> Iterator[Figure]:
        before, size = self._attempts(), file_size(self._paths.database)
        self._daemon.restart(_settings(keep_logs_days=NEARLY_NOTHING_DAYS))
        began_s = time.monotonic()
        poll_while(self._attempts, limit_s)
        took_s, left = time.monotonic() - began_s, self._attempts()
        poll_while(lambda: file_size(self._paths.database) >= size / 2, min(SETTLE_S, limit_s))
        how = f"of {before} directories of attempts, within {took_s:.0f} s of a daemon's start"
        yield Figure(name="retention.removed", value=before - left, unit="", how=how)
        yield Figure(name="retention.left", value=left, unit="", how="directories of attempts")
        yield Figure(name="retention.rate", value=(before - left) / took_s, unit="1/s", how="directories of attempts")
        yield from self._use("retention")

    def _attempts(self) -> int:
        return sum(name.partition(".")[0].isdigit() for name in os.listdir(self._paths.log_dir))


def poll_while(condition: Callable[[], object], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and condition():
        time.sleep(0.2)


def tree_size(folder: Path) -> tuple[int, int]:
    """Number of files and directories below a directory, and the bytes of their blocks."""
    inodes = used_bytes = 0
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    inodes += 1
                    used_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return inodes, used_bytes


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_history(socket: str) -> None:
    """Reads the archive until the process is killed; prints a line after the first answer."""
    with Client(socket) as client:
        client.history(user="all", limit=1000)
        print("reading", flush=True)
        while True:
            client.history(user="all", limit=1000)


if __name__ == "__main__":
    read_history(sys.argv[1])
