"""A run on paper: what was asked for, what came of it, every task, and the GPUs over time. One JSON file.

A run of the daemon is written in the same form, so that whoever reads one reads both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.errors import Usage
from carma_lab.runs.figures import Figures, TaskRun
from carma_lab.simulator.simulated_server import SimulatedGpu
from gpumemnet.output_file import write_file

FORMAT = 1
MOST_POINTS = 1000
FIRST_STEP_S = 30.0
HINT = "carma simulate --out FILE writes such a file."
ROUNDING = 1e-6  # of sums: a wait of nothing may come out below 0


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
    demand: str = ""  # what was known of tasks before they ran; empty: the file does not tell
    settings: dict[str, str] = {}
    version: str = ""
    tasks: str = ""  # a digest of the trace's tasks, whatever it is called; empty: the file does not tell


class GpuOf(Record, frozen=True, kw_only=True):
    """One GPU of the server that a run was on."""

    gpu: str  # UUID
    index: int
    name: str
    memory_mib: int
    kind: str = "card"
    idle_w: float | None = None  # with nobody on it, as far as it was seen


class Server(Record, frozen=True, kw_only=True):
    """What a run was on, as far as it matters for running it again."""

    gpus: tuple[GpuOf, ...]
    period_s: float  # between two samples, by the run's own clock
    unfinished: int = 0  # tasks that were there too and had not ended: they are not in the run


class Head(msgspec.Struct, frozen=True):
    """All that is looked at first: what else is in the file may be another thing in another format."""

    format: int = FORMAT


class Run(Record, frozen=True, kw_only=True):
    format: int = FORMAT
    about: About
    figures: Figures
    tasks: tuple[TaskRun, ...]
    course: tuple[Point, ...]
    server: Server | None = None  # None: nobody noted it


def write(run: Run, path: Path | str) -> None:
    """The old file stays until the new one is whole; `-` is standard output."""
    write_file(str(path), msgspec.json.encode(run) + b"\n")


def read(path: Path, hint: str = HINT) -> Run:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Usage(f"{path}: {error.strerror or error}", hint) from error
    try:
        found = msgspec.json.decode(data, type=Head)
        if found.format > FORMAT:
            newer = "Read it with that version, or write it again with this one."
            raise Usage(f"{path} was made by a newer CARMA (its format is {found.format}, not {FORMAT})", newer)
        run = msgspec.json.decode(data, type=Run)
    except msgspec.MsgspecError as error:
        raise Usage(f"{path} is not a run: {error}", hint) from error
    wrong = _wrong(run)
    if wrong:
        raise Usage(f"{path} is not a run: {wrong}", hint)
    return run


def _wrong(run: Run) -> str:
    """What cannot be, in words; nothing where all can."""
    if run.format < 1:
        return f"there is no format {run.format}"
    if not run.tasks:
        return "there is no task in it"
    for name in Figures.__struct_fields__:
        value = getattr(run.figures, name)
        if value is not None and value < -ROUNDING:
            return f"figures.{name} is {value:g}, below 0"
    for task in run.tasks:
        if task.ended_s < task.arrival_s or any(one.ended_at < one.placed_at for one in task.attempts):
            return f"task {task.task} ends before it begins"
    return ""


class Course:
    """Collects points. When there are too many, two become one and the step is twice as long. It only looks: what is
    summed up on a GPU stays as it was, to the last digit, since decisions rest on it."""

    def __init__(self, boards: Sequence[SimulatedGpu], counts: Callable[[], tuple[int, int]]) -> None:
        self._boards = boards
        self._counts = counts  # how many run and wait
        self.step_s = FIRST_STEP_S
        self.points: list[Point] = []
        self.since = 0.0  # the last step's end
        self._sums = self._integrals(0.0)

    @property
    def next_at(self) -> float:
        return self.since + self.step_s

    def look(self, now: float) -> None:
        """The end of a step."""
        sums = self._integrals(now)
        span_s = (now - self.since) * len(self._boards)
        sm, occupancy, dram, memory, energy = ((new - old) / span_s for new, old in zip(sums, self._sums, strict=True))
        running, waiting = self._counts()
        self.since, self._sums = now, sums
        self.points.append(
            Point(
                at_s=now,
                sm_active=sm,
                sm_occupancy=occupancy,
                dram_active=dram,
                memory_mib=memory,
                power_w=energy,
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
