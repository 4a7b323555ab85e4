"""Replays a trace through a private daemon: real processes on virtual GPUs, submitted when the trace says so.

Memory is declared with each task (the published "oracle" source), so that a replay compares policies and not
estimators. Everything is measured by asking the daemon, as a user could.
"""

from __future__ import annotations

import sys
import threading
import time

import msgspec

from carma.core.model.values import Record, TaskSpec
from carma.demo.figures import Figures, Ran, TaskRun, mean, summarise, time_average
from carma.errors import CarmaError
from carma.testing.private_daemon import PrivateDaemon
from carma.traces import Trace, TraceTask
from carma.wire.api_types import GpuView, SubmitRequest, TaskView

POLL_S = 0.2  # real seconds between two looks at the daemon


class Stopped(Exception):
    """The user does not want it any more."""


class Progress(Record, frozen=True, kw_only=True):
    """How a replay stands, for a live view."""

    name: str
    elapsed_s: float  # virtual seconds since the start of the trace
    total: int
    submitted: int = 0
    running: int = 0
    done: int = 0
    gpus: tuple[GpuView, ...] = ()
    names: dict[int, str] = {}
    finished: bool = False

    @property
    def waiting(self) -> int:
        return self.submitted - self.running - self.done


class Replayed(Record, frozen=True, kw_only=True):
    figures: Figures
    runs: tuple[TaskRun, ...]
    real_s: float


def command_of(task: TraceTask) -> tuple[str, ...]:
    """The process that stands for the task: it holds memory and makes progress on a virtual GPU."""
    told = (("--engine", task.gr_active), ("--power", task.power))
    return (
        *(sys.executable, "-m", "carma.vgpu.virtual_task"),
        *("--memory-mib", str(task.memory_mib)),
        *("--sm", f"{task.sm_active:g}"),
        *("--occupancy", f"{task.sm_occupancy:g}"),
        *("--dram", f"{task.dram_active:g}"),
        *("--seconds", f"{task.work_s:.12g}"),  # of its work; the start comes before it
        *("--start-s", f"{task.start_s:g}"),
        *("--ramp-s", f"{task.ramp_s:g}"),
        *("--busy-gpus", str(task.busy_gpus)),
        *(word for flag, share in told if share is not None for word in (flag, f"{share:g}")),
    )


class Replay:
    """One trace through one daemon. `progress` may be read from another thread at any time."""

    def __init__(self, name: str, trace: Trace, daemon: PrivateDaemon, stop: threading.Event) -> None:
        self.progress = Progress(name=name, elapsed_s=0.0, total=len(trace.tasks))
        self._trace = trace
        self._daemon = daemon
        self._client = daemon.client
        self._stop = stop
        self._rows: dict[int, TraceTask] = {}
        self._activity: dict[str, list[tuple[float, float]]] = {}  # of each GPU
        self._energy_j: list[tuple[float, float]] = []

    def run(self) -> Replayed:
        """Submits, waits, sums up. Raises Stopped when `stop` is set."""
        began = time.monotonic()
        server = self._client.server()
        self._start_at = server.now
        self._speed = server.speed
        self._began = began
        waiting = list(self._trace.tasks)
        while True:
            while waiting and waiting[0].arrival_s <= self._elapsed_s():
                self._submit(waiting.pop(0))
            finished = self._look()
            if not waiting and finished:
                break
            if self._stop.wait(self._pause_s(waiting)):
                raise Stopped
        return self._sum_up(time.monotonic() - began)

    def _elapsed_s(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    def _pause_s(self, waiting: list[TraceTask]) -> float:
        if not waiting:
            return POLL_S
        return min(POLL_S, max(0.0, (waiting[0].arrival_s - self._elapsed_s()) / self._speed))

    def _submit(self, task: TraceTask) -> None:
        spec = TaskSpec(
            command=command_of(task),
            directory=str(self._daemon.work),
            environment=self._daemon.environment,
            name=task.name,
            gpus=task.gpus,
            gpu_memory_mib=task.memory_mib,
        )
        self._rows[self._client.submit(SubmitRequest(spec=spec)).ids[0]] = task

    def _look(self) -> bool:
        """One look at GPUs and tasks; True when all that were submitted have ended."""
        self._daemon.check_alive()
        gpus = tuple(self._client.gpus())
        now = self._start_at + self._elapsed_s()
        for gpu in gpus:
            # No figure just after a task came or left: the last one holds until there is a new one.
            if gpu.sm_active is not None:
                self._activity.setdefault(gpu.gpu, []).append((now, gpu.sm_active))
        energy = [gpu.energy_j for gpu in gpus if gpu.energy_j is not None]
        if len(energy) == len(gpus):
            self._energy_j.append((now, sum(energy)))
        tasks = self._client.tasks()
        shown = tuple(self._with_last_activity(gpu) for gpu in gpus)
        running = sum(task.state in ("starting", "running") for task in tasks)
        self.progress = msgspec.structs.replace(
            self.progress,
            elapsed_s=self._elapsed_s(),
            submitted=len(self._rows),
            running=running,
            done=len(self._rows) - len(tasks),
            gpus=shown,
            names={key: row.name for key, row in self._rows.items()},
        )
        return not tasks

    def _with_last_activity(self, gpu: GpuView) -> GpuView:
        last = self._activity.get(gpu.gpu)
        return msgspec.structs.replace(gpu, sm_active=last[-1][1]) if last else gpu

    def _sum_up(self, real_s: float) -> Replayed:
        views = {view.id: view for view in self._client.history(limit=10 * len(self._rows))}
        missing = sorted(set(self._rows) - set(views))
        if missing:
            raise CarmaError(f"{len(missing)} tasks of {len(self._rows)} are not in the history: {missing[:5]}")
        runs = tuple(task_run(views[key], row) for key, row in self._rows.items())
        ended_at = max(run.ended_at for run in runs)
        self.progress = msgspec.structs.replace(self.progress, finished=True, elapsed_s=ended_at - self._start_at)
        figures = summarise(
            runs,
            sm_active_mean=mean_activity(self._activity, self._start_at, ended_at),
            energy_j=counter_between(self._energy_j, ended_at),
        )
        return Replayed(figures=figures, runs=runs, real_s=real_s)


def task_run(view: TaskView, row: TraceTask) -> TaskRun:
    """A task of the history as the figures want it."""
    attempts = tuple(
        Ran(
            started_at=attempt.started_at,
            ended_at=attempt.ended_at,
            out_of_memory=(attempt.outcome or {}).get("kind") == "out_of_memory",
        )
        for attempt in view.attempts
        if attempt.started_at is not None and attempt.ended_at is not None
    )
    return TaskRun(
        name=view.name,
        submitted_at=view.submitted_at,
        ended_at=view.ended_at if view.ended_at is not None else view.submitted_at,
        alone_s=row.seconds,
        succeeded=(view.outcome or {}).get("kind") == "succeeded",
        attempts=attempts,
    )


def mean_activity(points: dict[str, list[tuple[float, float]]], since: float, until: float) -> float | None:
    """Over all GPUs and the whole span; a GPU counts as idle until it was first seen."""
    averages = [time_average([(since, 0.0), *of_gpu], until) for of_gpu in points.values()]
    known = [average for average in averages if average is not None]
    return mean(known) if known else None


def counter_between(points: list[tuple[float, float]], until: float) -> float | None:
    """How much a counter rose from its first reading to `until`, between readings in proportion."""
    if not points:
        return None
    first = last = points[0]
    for point in points[1:]:
        if point[0] >= until:
            share = (until - last[0]) / (point[0] - last[0]) if point[0] > last[0] else 0.0
            return last[1] + share * (point[1] - last[1]) - first[1]
        last = point
    return last[1] - first[1]
