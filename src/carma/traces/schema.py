"""The trace format: a CSV file in UTF-8 with one row for each task, in the order of arrival.

Lines that begin with `#` come before the header and say where the figures are from; they are kept and shown. The
header names the columns, in any order; `COLUMNS` is the table of them, which the reader, the writer and the page about
traces follow. A column that is not in it is an error, as is a value that its column does not hold: a trace that is half
understood gives figures that look right and are not.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from carma.core.model.values import Demand, Record

# seconds: a number of 0 or more, to MOST_S; share: 0 to 1; count: a whole number of 0 or more; whole: of any sign.
Kind = Literal["seconds", "share", "count", "whole", "text"]
LEAST_S = 1e-3  # of a run: a shorter one is over before it begins
MOST_S = 1e9  # thirty years; as a daemon takes them
MOST = 10**15  # of counts


class Column(NamedTuple):
    """`above_zero` for what is nothing at 0. A column that is not `required` may be missing; one with `empty` may be
    there with nothing in it, which says that the figure is not known or that there is none."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    required: bool = False
    empty: bool = False
    above_zero: bool = False


COLUMNS = (
    Column("arrival_s", "seconds", "seconds", "submission, counted from the start of the trace; never falls", True),
    Column("name", "text", "", "what the task is called; need not be unique", True),
    Column("gpus", "count", "count", "GPUs that it asks for", True, above_zero=True),
    Column("memory_mib", "count", "MiB", "footprint on each of its GPUs, at its peak", True, above_zero=True),
    Column("seconds", "seconds", "seconds", "its whole run when it has its GPUs for itself", True, above_zero=True),
    Column("sm_active", "share", "share, 0 to 1", "SM activity that it shows alone", True),
    Column("sm_occupancy", "share", "share, 0 to 1", "SM occupancy that it shows alone", True),
    Column("dram_active", "share", "share, 0 to 1", "DRAM activity that it shows alone", True),
    Column("gr_active", "share", "share, 0 to 1", "time with any kernel, alone; empty: not known", empty=True),
    Column("power", "share", "share, 0 to 1", "of what the card can draw above idle; empty: not known", empty=True),
    Column("start_s", "seconds", "seconds", "from its start to the first activity on the GPU (0)"),
    Column("ramp_s", "seconds", "seconds", "from the first byte of GPU memory to its peak (0)"),
    Column("first_mib", "count", "MiB", "what it holds from its first byte on, before the ramp (0)"),
    Column("busy_gpus", "count", "count", "of its GPUs, those that it works on; the others stand idle; 0: all (0)"),
    Column("model", "text", "", "what is trained, in free words; may be empty", empty=True),
    Column("batch", "count", "samples", "its batch size; 0: not known (0)"),
    Column("user", "text", "", "who submits it; may be empty", empty=True),
    Column("priority", "whole", "", "larger goes first (0)"),
    Column("checkpoint_s", "seconds", "seconds", "of its work, between two checkpoints that it writes; 0: none (0)"),
    Column("save_s", "seconds", "seconds", "what a save on a signal takes; empty: it does not listen", empty=True),
    Column("horus_mib", "count", "MiB", "memory by Horus; empty: no estimate", empty=True, above_zero=True),
    Column("faketensor_mib", "count", "MiB", "memory by Fake Tensor; empty: no estimate", empty=True, above_zero=True),
    Column("gpumemnet_mib", "count", "MiB", "memory by GPUMemNet; empty: no estimate", empty=True, above_zero=True),
)


class TraceTask(Record, frozen=True, kw_only=True):
    """One row. `memory_mib` is a footprint for each GPU, `seconds` the run alone. None: not known, or no estimate."""

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
        """On each GPU that it works on."""
        return Demand(self.sm_active, self.sm_occupancy, self.dram_active, self.gr_active, self.power)

    @property
    def working_gpus(self) -> int:
        return self.busy_gpus or self.gpus

    @property
    def can_leave(self) -> bool:
        """Whether it comes back to something when it is asked to leave: what it saves then, or what it saved before."""
        return self.save_s is not None or self.checkpoint_s > 0.0

    @property
    def work_s(self) -> float:
        """The part of its run from its first use of a GPU on: `seconds` has its start-up in it."""
        return max(1e-3, self.seconds - self.start_s)


def start_within(start_s: float, seconds: float) -> float:
    """For a task whose run is made shorter: at most half of it goes by before it uses a GPU."""
    return min(start_s, 0.5 * seconds)


def unreadable(task: TraceTask) -> str:
    """Why no reader would take what was worked out from another trace or by chance; nothing where one would."""
    if task.arrival_s > MOST_S:
        return f"arrives after {task.arrival_s:,.0f} s, and a trace lasts {MOST_S:,.0f} s at most"
    if not LEAST_S <= task.seconds <= MOST_S:
        return f"runs for {task.seconds:,g} s, and a task of a trace runs for {LEAST_S:g} to {MOST_S:,.0f} s"
    return ""


class Trace(Record, frozen=True, kw_only=True):
    """A whole file: its tasks in order of arrival, and what its comment lines say about their source."""

    name: str
    tasks: tuple[TraceTask, ...]
    source: str = ""

    @property
    def gpu_seconds(self) -> float:
        """The work in it: GPUs times seconds alone, summed."""
        return sum(task.gpus * task.seconds for task in self.tasks)
