"""One run of `carma bench trace`: real processes, through a private daemon or without a manager.

Only complete runs give a record: `CutOff` ends a run whose time is over, with all of its processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from carma.core.model.values import TaskSpec
from carma.errors import CarmaError
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings
from carma.wire.api_types import AttemptView, SubmitRequest, TaskView
from carma_lab.bench.trace.gpus import Gpus, Meter, Outside
from carma_lab.bench.trace.records import Shown, SoloRun, TaskRow
from carma_lab.bench.trace.tasks import SCRIPTS, Task, command_of, first_steps, steps_for, trained_s
from carma_lab.runs.from_server import recorded
from carma_lab.runs.record import Run

POLL_S = 0.05
END_LIMIT_S = 10.0
OOM_WORDS = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")
NOT_KEPT = ("work", "vgpu", "mps", "config.toml", "daemon.out")  # of a home


class CutOff(CarmaError):
    """The time was over before the run was complete."""


class Measured(NamedTuple):
    makespan_s: float
    shown: Shown
    tasks: tuple[TaskRow, ...]
    recorded: Run | None = None  # as `carma simulate --fidelity` reads it


class Process:
    """A task without a manager. Its processes end with the block."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        own = {name: value for name, value in os.environ.items() if not name.startswith("CARMA_")}
        self.started = time.monotonic()
        self.ended: float | None = None
        self._process = subprocess.Popen(
            command,
            cwd=SCRIPTS,
            env={**own, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.ended is None and self._process.poll() is not None:
            self.ended = time.monotonic()
        return self.ended is not None

    @property
    def succeeded(self) -> bool:
        return self._process.returncode == 0

    @property
    def ran_s(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    def log(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def close(self) -> None:
        """Also what it has started, such as the workers of a data loader."""
        for number in (
            signal.SIGTERM,
            signal.SIGKILL,
        ):  # both: a worker may outlive the first and the leader of its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
        self._output.close()


def calibrate(name: str, seconds: float, gpus: Gpus, until: float) -> int:
    """Steps of the task for a run of `seconds` alone."""
    process, log, _ = _alone(name, first_steps(name, virtual=gpus.virtual), gpus, until)
    return steps_for(seconds, process.ran_s, log)


def alone(name: str, steps: int, gpus: Gpus, until: float) -> SoloRun:
    process, log, shown = _alone(name, steps, gpus, until)
    return SoloRun(name=name, ran_s=process.ran_s, trained_s=trained_s(log), shown=shown, place=gpus.place())


def _alone(name: str, steps: int, gpus: Gpus, until: float) -> tuple[Process, str, Shown]:
    with gpus.outside("timeslice") as outside:
        process = Process(command_of(name, steps, virtual=gpus.virtual), outside.environment(0))
        with contextlib.closing(process), contextlib.closing(outside.meter()) as meter:
            _wait(process.poll, meter, until)
            shown, log = meter.shown(), process.log()
            if not process.succeeded:
                raise CarmaError(f"{name} failed alone: {log.strip()[-1000:]}")
    return process, log, shown


def _wait(holds: Callable[[], bool], meter: Meter, until: float) -> None:
    while not holds():
        if time.monotonic() > until:
            raise CutOff("the time is over")
        meter.tick()
        time.sleep(POLL_S)


def unmanaged(tasks: Sequence[Task], gpus: Gpus, until: float) -> Measured:
    """Every task starts when it arrives, all of them under MPS."""
    with gpus.outside("mps") as outside, contextlib.ExitStack() as stack:  # the tasks end before the MPS daemon
        meter = stack.enter_context(contextlib.closing(outside.meter()))
        started, began = list[Process](), time.monotonic()

        def done() -> bool:
            while len(started) < len(tasks) and tasks[len(started)].arrival_s <= time.monotonic() - began:
                started.append(_start(tasks[len(started)], len(started), gpus, outside, stack))
            running = [process for process in started if not process.poll()]
            return len(started) == len(tasks) and not running

        _wait(done, meter, until)
        shown = meter.shown()
        rows = tuple(_row_of(task, process, began) for task, process in zip(tasks, started, strict=True))
    return Measured(max(row.ended_s for row in rows), shown, rows)


def _start(task: Task, place: int, gpus: Gpus, outside: Outside, stack: contextlib.ExitStack) -> Process:
    assert task.steps is not None
    process = Process(command_of(task.name, task.steps, virtual=gpus.virtual), outside.environment(place))
    stack.callback(process.close)
    return process


def _row_of(task: Task, process: Process, began: float) -> TaskRow:
    assert process.ended is not None
    log = process.log()
    oom = not process.succeeded and any(words in log for words in OOM_WORDS)
    return TaskRow(
        name=task.name,
        arrival_s=task.arrival_s,
        started_s=process.started - began,
        ended_s=process.ended - began,
        ran_s=process.ran_s,
        trained_s=trained_s(log),
        outcome="succeeded" if process.succeeded else "out_of_memory" if oom else "failed",
        attempts=1,
        ooms=int(oom),
    )


class TraceDaemon(PrivateDaemon):
    """A private daemon that begins with the home of an earlier one, and keeps its own for later ones."""

    def __init__(self, settings: PrivateSettings, home: Path | None) -> None:
        super().__init__(settings)
        self._archive = home

    def start(self) -> None:
        if self._archive is not None:
            with tarfile.open(self._archive) as archive:
                archive.extractall(self.home, filter="data")
        super().start()

    def save_home(self, path: Path) -> None:
        """Ends the daemon first, so that its files are complete."""
        self.stop()
        part = path.with_name(f"{path.name}.part")
        with tarfile.open(part, "w:gz") as archive:
            for found in sorted(self.home.iterdir()):
                if found.name not in NOT_KEPT and (found.is_file() or found.is_dir()):
                    archive.add(found, found.name)
        part.replace(path)


@contextlib.contextmanager
def daemon_of(policy: str, pairs: dict[str, str], gpus: Gpus, home: Path | None) -> Iterator[TraceDaemon]:
    wanted = PrivateSettings(policy=policy, gpus=gpus.daemon_gpus, pairs=pairs)
    with TraceDaemon(wanted, home) as daemon:
        yield daemon


def managed(daemon: PrivateDaemon, tasks: Sequence[Task], gpus: Gpus, until: float) -> Measured:
    """All tasks through the daemon, submitted when they arrive."""
    client = daemon.client
    time.sleep(gpus.rest_s)

    def done() -> bool:
        while len(ids) < len(tasks) and tasks[len(ids)].arrival_s <= time.monotonic() - began:
            ids.extend(_submit(daemon, tasks[len(ids)], gpus))
        daemon.check_alive()
        return len(ids) == len(tasks) and not client.tasks(user="all")

    with contextlib.closing(gpus.meter(daemon)) as meter:
        began, start_at, ids = time.monotonic(), client.server().now, list[int]()
        _wait(done, meter, until)
        shown = meter.shown()
    views = [client.task(task) for task in ids]
    rows = tuple(_row(task, view, start_at) for task, view in zip(tasks, views, strict=True))
    return Measured(max(row.ended_s for row in rows), shown, rows, recorded(client, start_at))


def _submit(daemon: PrivateDaemon, task: Task, gpus: Gpus) -> tuple[int, ...]:
    """Nothing is declared. The directory is the same for every home, because the history of a command belongs to it."""
    assert task.steps is not None
    command = command_of(task.name, task.steps, virtual=gpus.virtual)
    output = str(daemon.work / f"{task.name}.log")
    spec = TaskSpec(
        command=command, directory=str(SCRIPTS), environment=daemon.environment, name=task.name, output=output
    )
    return daemon.client.submit(SubmitRequest(spec=spec)).ids


def _row(task: Task, view: TaskView, start_at: float) -> TaskRow:
    assert view.ended_at is not None
    endings = [(one.outcome or {}).get("kind") for one in view.attempts]
    return TaskRow(
        name=task.name,
        arrival_s=task.arrival_s,
        started_s=None if view.started_at is None else view.started_at - start_at,
        ended_s=view.ended_at - start_at,
        ran_s=_ran_s(view.attempts),
        trained_s=_trained_s(view.attempts),
        outcome=str((view.outcome or {}).get("kind", "")),
        attempts=len(view.attempts),
        ooms=endings.count("out_of_memory"),
        memory_mib=view.observed_mib,
    )


def _ran_s(attempts: Sequence[AttemptView]) -> float | None:
    """Of the last attempt and of earlier ones that were preempted, as in carma_lab.runs.figures."""
    counted = [one for one in attempts[:-1] if (one.outcome or {}).get("kind") == "preempted"]
    spans = [
        one.ended_at - (one.placed_at if one.started_at is None else one.started_at)
        for one in (*counted, *attempts[-1:])
        if one.ended_at is not None
    ]
    return sum(spans) if spans else None


def _trained_s(attempts: Sequence[AttemptView]) -> float | None:
    with contextlib.suppress(OSError, IndexError):
        return trained_s(Path(attempts[-1].stdout).read_text(errors="replace"))
    return None
