"""The trace format: a CSV file in UTF-8 with one row for each task, in the order of arrival.

Lines that begin with `#` come before the header and name the source of the figures; reports show them. The header has
the columns of `COLUMNS`, in any order; the reader, the writer and the documentation use this table. An unknown column
and an invalid value are errors: a partly understood trace would give wrong figures that look right.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from carma.core.model.values import Demand, Record

# seconds: a number of 0 or more, to MOST_S; share: 0 to 1; count: a whole number of 0 or more; whole: of any sign.
Kind = Literal["seconds", "share", "count", "whole", "text"]
LEAST_S = 1e-3  # of a run
MOST_S = 1e9  # thirty years, the limit of the daemon
MOST = 10**15  # of counts


class TraceColumn(NamedTuple):
    """A column that is not `required` may be missing. With `empty`, a cell may be empty: the figure is unknown or does
    not apply. With `above_zero`, 0 is invalid."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    required: bool = False
    empty: bool = False
    above_zero: bool = False


COLUMNS = (
    TraceColumn(
        "arrival_s", "seconds", "seconds", "submission, counted from the start of the trace; never falls", True
    ),
    TraceColumn("name", "text", "", "name of the task; need not be unique", True),
    TraceColumn("gpus", "count", "count", "number of GPUs of the task", True, above_zero=True),
    TraceColumn("memory_mib", "count", "MiB", "footprint on each of its GPUs, at its peak", True, above_zero=True),
    TraceColumn("seconds", "seconds", "seconds", "duration of the whole run on GPUs of its own", True, above_zero=True),
    TraceColumn("sm_active", "share", "share, 0 to 1", "SM activity when it runs alone", True),
    TraceColumn("sm_occupancy", "share", "share, 0 to 1", "SM occupancy when it runs alone", True),
    TraceColumn("dram_active", "share", "share, 0 to 1", "DRAM activity when it runs alone", True),
    TraceColumn(
        "gr_active", "share", "share, 0 to 1", "share of time with any kernel, alone; empty: not known", empty=True
    ),
    TraceColumn(
        "power",
        "share",
        "share, 0 to 1",
        "power above idle, as a share of the card's range; empty: not known",
        empty=True,
    ),
    TraceColumn("start_s", "seconds", "seconds", "from its start to the first activity on the GPU (0)"),
    TraceColumn("ramp_s", "seconds", "seconds", "from the first byte of GPU memory to its peak (0)"),
    TraceColumn("first_mib", "count", "MiB", "memory at the beginning of the ramp (0)"),
    TraceColumn("busy_gpus", "count", "count", "number of its GPUs that it uses; the others stay idle; 0: all (0)"),
    TraceColumn("model", "text", "", "the trained model, as free text; may be empty", empty=True),
    TraceColumn("batch", "count", "samples", "its batch size; 0: not known (0)"),
    TraceColumn("user", "text", "", "name of the submitting user; may be empty", empty=True),
    TraceColumn("priority", "whole", "", "larger starts earlier (0)"),
    TraceColumn("checkpoint_s", "seconds", "seconds", "work between two checkpoints; 0: no checkpoints (0)"),
    TraceColumn(
        "save_s",
        "seconds",
        "seconds",
        "duration of a save on a signal; empty: the task cannot be preempted",
        empty=True,
    ),
    TraceColumn("horus_mib", "count", "MiB", "memory by Horus; empty: no estimate", empty=True, above_zero=True),
    TraceColumn(
        "faketensor_mib", "count", "MiB", "memory by Fake Tensor; empty: no estimate", empty=True, above_zero=True
    ),
    TraceColumn(
        "gpumemnet_mib", "count", "MiB", "memory by GPUMemNet; empty: no estimate", empty=True, above_zero=True
    ),
)


class TraceTask(Record, frozen=True, kw_only=True):
    """One row. `memory_mib` is the footprint on each GPU, `seconds` the run time alone. None: unknown."""

    arrival_s: float
    name: str
    gpus: int
    memory_mib: int
    seconds: float
    sm_active: float
    sm_occupancy: float
    dram_active: float
    gr_active: float | None = None
    power: float | None = None
    start_s: float = 0.0
    ramp_s: float = 0.0
    first_mib: int = 0
    busy_gpus: int = 0
    model: str = ""
    batch: int = 0
    user: str = ""
    priority: int = 0
    checkpoint_s: float = 0.0
    save_s: float | None = None
    horus_mib: int | None = None
    faketensor_mib: int | None = None
    gpumemnet_mib: int | None = None

    @property
    def demand(self) -> Demand:
        """On each GPU that it uses."""
        return Demand(self.sm_active, self.sm_occupancy, self.dram_active, self.gr_active, self.power)

    @property
    def working_gpus(self) -> int:
        return self.busy_gpus or self.gpus

    @property
    def can_leave(self) -> bool:
        """Whether it keeps progress when it is asked to leave, from a save on a signal or an earlier checkpoint."""
        return self.save_s is not None or self.checkpoint_s > 0.0

    @property
    def work_s(self) -> float:
        """The run time after the start-up, which `seconds` includes."""
        return max(1e-3, self.seconds - self.start_s)


def start_within(start_s: float, seconds: float) -> float:
    """The start-up of a task whose run time is shortened: at most half of it."""
    return min(start_s, 0.5 * seconds)


def unreadable(task: TraceTask) -> str:
    """Why the reader would reject a task that was derived or generated; empty if it would not."""
    if task.arrival_s > MOST_S:
        return f"arrives after {task.arrival_s:,.0f} s; a trace lasts at most {MOST_S:,.0f} s"
    if not LEAST_S <= task.seconds <= MOST_S:
        return f"runs for {task.seconds:,g} s; a task of a trace runs for {LEAST_S:g} to {MOST_S:,.0f} s"
    return ""


class Trace(Record, frozen=True, kw_only=True):
    """A file: its tasks in order of arrival, and the source in its comment lines."""

    name: str
    tasks: tuple[TraceTask, ...]
    source: str = ""

    @property
    def gpu_seconds(self) -> float:
        """The sum of GPUs times run time alone."""
        return sum(task.gpus * task.seconds for task in self.tasks)
