"""Replay of a trace through a private daemon: real processes on virtual GPUs, submitted at their arrival times.

Each task declares its memory (the published "oracle" source), so that a replay compares policies and not estimators.
All figures come from the daemon's API.
"""

from __future__ import annotations

import sys
import threading
import time
from statistics import fmean

import msgspec

from carma.core.model.values import Record, TaskSpec
from carma.demo.figures import ReplayedTask, ReplayFigures, summarise, time_average
from carma.errors import CarmaError
from carma.testing.private_daemon import PrivateDaemon
from carma.traces import Trace, TraceTask
from carma.wire.api_types import GpuView, SubmitRequest

POLL_S = 0.2  # real seconds


class Stopped(Exception):
    """The replay was stopped from outside."""


class Progress(Record, frozen=True, kw_only=True):
    """The state of a replay, for a live view."""

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


def command_of(task: TraceTask) -> tuple[str, ...]:
    """The process that represents the task: it holds memory and makes progress on a virtual GPU."""
    optional = (("--engine", task.gr_active), ("--power", task.power))
    return (
        *(sys.executable, "-m", "carma.vgpu.virtual_task"),
        *("--memory-mib", str(task.memory_mib)),
        *("--sm", f"{task.sm_active:g}"),
        *("--occupancy", f"{task.sm_occupancy:g}"),
        *("--dram", f"{task.dram_active:g}"),
        *("--seconds", f"{task.work_s:.12g}"),  # without the start-up
        *("--start-s", f"{task.start_s:g}"),
        *("--ramp-s", f"{task.ramp_s:g}"),
        *("--busy-gpus", str(task.busy_gpus)),
        *(word for flag, share in optional if share is not None for word in (flag, f"{share:g}")),
    )


class Replay:
    """One trace through one daemon. Any thread may read `progress`."""

    def __init__(self, name: str, trace: Trace, daemon: PrivateDaemon, stop: threading.Event) -> None:
        self.progress = Progress(name=name, elapsed_s=0.0, total=len(trace.tasks))
        self._trace = trace
        self._daemon = daemon
        self._client = daemon.client
        self._stop = stop
        self._tasks: dict[int, TraceTask] = {}
        self._activity: dict[str, list[tuple[float, float]]] = {}  # by GPU
        self._energy_j: list[tuple[float, float]] = []

    def run(self) -> ReplayFigures:
        """Submits all tasks and waits for their end. Raises Stopped when `stop` is set."""
        self._began = time.monotonic()
        server = self._client.server()
        self._start_at, self._speed = server.now, server.speed
        pending = list(self._trace.tasks)
        while True:
            while pending and pending[0].arrival_s <= self._elapsed_s():
                self._submit(pending.pop(0))
            if self._poll() and not pending:
                return self._figures()
            next_s = (pending[0].arrival_s - self._elapsed_s()) / self._speed if pending else POLL_S
            if self._stop.wait(min(POLL_S, max(0.0, next_s))):
                raise Stopped

    def _elapsed_s(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    def _submit(self, task: TraceTask) -> None:
        spec = TaskSpec(
            command=command_of(task),
            directory=str(self._daemon.work),
            environment=self._daemon.environment,
            name=task.name,
            gpus=task.gpus,
            gpu_memory_mib=task.memory_mib,
        )
        self._tasks[self._client.submit(SubmitRequest(spec=spec)).ids[0]] = task

    def _poll(self) -> bool:
        """Reads GPUs and tasks once. Returns whether all submitted tasks have ended."""
        self._daemon.check_alive()
        gpus = tuple(self._client.gpus())
        now = self._start_at + self._elapsed_s()
        for gpu in gpus:
            # Without a figure (a task has just come or gone) the last one stays valid.
            if gpu.sm_active is not None:
                self._activity.setdefault(gpu.gpu, []).append((now, gpu.sm_active))
        energy = [gpu.energy_j for gpu in gpus if gpu.energy_j is not None]
        if len(energy) == len(gpus):
            self._energy_j.append((now, sum(energy)))
        tasks = self._client.tasks()
        self.progress = msgspec.structs.replace(
            self.progress,
            elapsed_s=self._elapsed_s(),
            submitted=len(self._tasks),
            running=sum(task.state in ("starting", "running") for task in tasks),
            done=len(self._tasks) - len(tasks),
            gpus=tuple(self._with_last_activity(gpu) for gpu in gpus),
            names={key: task.name for key, task in self._tasks.items()},
        )
        return not tasks

    def _with_last_activity(self, gpu: GpuView) -> GpuView:
        last = self._activity.get(gpu.gpu)
        return msgspec.structs.replace(gpu, sm_active=last[-1][1]) if last else gpu

    def _figures(self) -> ReplayFigures:
        views = {view.id: view for view in self._client.history(limit=10 * len(self._tasks))}
        missing = sorted(set(self._tasks) - set(views))
        if missing:
            raise CarmaError(f"the history lacks {len(missing)} of {len(self._tasks)} tasks: {missing[:5]}")
        runs = [ReplayedTask(view=views[key], alone_s=task.seconds) for key, task in self._tasks.items()]
        ended_at = max(run.ended_at for run in runs)
        self.progress = msgspec.structs.replace(self.progress, finished=True, elapsed_s=ended_at - self._start_at)
        return summarise(
            runs,
            sm_active_mean=mean_activity(self._activity, self._start_at, ended_at),
            energy_j=counter_between(self._energy_j, ended_at),
        )


def mean_activity(points: dict[str, list[tuple[float, float]]], since: float, until: float) -> float | None:
    """Over all GPUs and the whole period; a GPU counts as idle before its first reading."""
    averages = [time_average([(since, 0.0), *of_gpu], until) for of_gpu in points.values()]
    known = [average for average in averages if average is not None]
    return fmean(known) if known else None


def counter_between(points: list[tuple[float, float]], until: float) -> float | None:
    """Increase of a counter from its first reading to `until`, interpolated between readings."""
    if not points:
        return None
    first = last = points[0]
    for point in points[1:]:
        if point[0] >= until:
            share = (until - last[0]) / (point[0] - last[0]) if point[0] > last[0] else 0.0
            return last[1] + share * (point[1] - last[1]) - first[1]
        last = point
    return last[1] - first[1]
