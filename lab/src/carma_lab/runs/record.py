"""The file of a run: its conditions, figures, tasks, and the course of the GPUs over time, as JSON.

Simulated runs and runs of a daemon have the same format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.errors import Usage
from carma_lab.runs.figures import Figures, TaskRun
from carma_lab.simulator.simulated_server import Integrals, SimulatedGpu
from gpumemnet.output_file import write_file

FORMAT = 1
MOST_POINTS = 1000
FIRST_STEP_S = 30.0
HINT = "carma simulate --out FILE writes such a file."
ROUNDING = 1e-6  # a wait of 0 may be slightly negative by rounding


class Point(Record, frozen=True, kw_only=True):
    """Means over all GPUs and over the step that ends at `at_s`; None: not known."""

    at_s: float
    sm_active: float | None
    sm_occupancy: float | None
    dram_active: float | None
    memory_mib: float | None
    power_w: float | None
    running: float
    waiting: float


class About(Record, frozen=True, kw_only=True):
    simulated: bool
    trace: str
    policy: str
    memory: str
    mechanism: str
    gpu: str
    gpus: int
    seed: int = 0
    noise: float = 0.0
    demand: str = ""  # knowledge of tasks before they ran; empty: not recorded
    settings: dict[str, str] = {}
    version: str = ""
    tasks: str = ""  # digest of the tasks of the trace; empty: not recorded


class GpuOf(Record, frozen=True, kw_only=True):
    """One GPU of the server of a run."""

    gpu: str  # UUID
    index: int
    name: str
    memory_mib: int
    kind: str = "card"
    idle_w: float | None = None  # None: never seen idle


class Server(Record, frozen=True, kw_only=True):
    """The server of a run, as far as a simulation of the run needs it."""

    gpus: tuple[GpuOf, ...]
    period_s: float  # between two samples, by the clock of the run
    unfinished: int = 0  # tasks that had not ended and are not in the run


class Head(msgspec.Struct, frozen=True):
    """The format number, which is read first: everything else depends on it."""

    format: int = FORMAT


class Run(Record, frozen=True, kw_only=True):
    format: int = FORMAT
    about: About
    figures: Figures
    tasks: tuple[TaskRun, ...]
    course: tuple[Point, ...]
    server: Server | None = None  # None: not recorded


def write(run: Run, path: Path | str) -> None:
    """The old file stays until the new one is complete; `-` is standard output."""
    write_file(str(path), msgspec.json.encode(run) + b"\n")


def read(path: Path, hint: str = HINT) -> Run:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Usage(f"{path}: {error.strerror or error}", hint) from error
    try:
        found = msgspec.json.decode(data, type=Head)
        if found.format > FORMAT:
            newer = "Read it with that version, or record the run with this one."
            raise Usage(f"{path} was written by a newer CARMA (format {found.format}, not {FORMAT})", newer)
        run = msgspec.json.decode(data, type=Run)
    except msgspec.MsgspecError as error:
        raise Usage(f"{path} is not a run: {error}", hint) from error
    wrong = _wrong(run)
    if wrong:
        raise Usage(f"{path} is not a run: {wrong}", hint)
    return run


def _wrong(run: Run) -> str:
    """An impossible value, as a sentence; empty if there is none."""
    if run.format < 1:
        return f"format {run.format} does not exist"
    if not run.tasks:
        return "it has no tasks"
    for name in Figures.__struct_fields__:
        value = getattr(run.figures, name)
        if value is not None and value < -ROUNDING:
            return f"figures.{name} is {value:g}, below 0"
    for task in run.tasks:
        if task.ended_s < task.arrival_s or any(one.ended_at < one.placed_at for one in task.attempts):
            return f"task {task.task} ends before it begins"
    return ""


class Course:
    """Collects points. When there are too many, pairs are merged and the step doubles. It must not change the integrals
    of a GPU, not even by rounding, because decisions depend on them."""

    def __init__(self, boards: Sequence[SimulatedGpu], counts: Callable[[], tuple[int, int]]) -> None:
        self._boards = boards
        self._counts = counts  # running and queued tasks
        self.step_s = FIRST_STEP_S
        self.points: list[Point] = []
        self.since = 0.0  # end of the last step
        self._sums = self._integrals(0.0)

    @property
    def next_at(self) -> float:
        return self.since + self.step_s

    def record(self, now: float) -> None:
        """Ends a step."""
        sums = self._integrals(now)
        span_s = (now - self.since) * len(self._boards)
        means = Integrals(*((new - old) / span_s for new, old in zip(sums, self._sums, strict=True)))
        running, waiting = self._counts()
        self.since, self._sums = now, sums
        self.points.append(
            Point(
                at_s=now,
                sm_active=means.sm_s,
                sm_occupancy=means.occupancy_s,
                dram_active=means.dram_s,
                memory_mib=means.memory_mib_s,
                power_w=means.energy_j,
                running=running,
                waiting=waiting,
            )
        )
        if len(self.points) >= MOST_POINTS:
            self.points = [_merged(*self.points[place : place + 2]) for place in range(0, MOST_POINTS, 2)]
            self.step_s *= 2

    def _integrals(self, now: float) -> tuple[float, ...]:
        return tuple(map(sum, zip(*(board.totals(now) for board in self._boards), strict=True)))


def _merged(first: Point, second: Point) -> Point:
    both = {
        name: (getattr(first, name) + getattr(second, name)) / 2 for name in Point.__struct_fields__ if name != "at_s"
    }
    return Point(at_s=second.at_s, **both)
