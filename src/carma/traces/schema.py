"""The trace format: a CSV file in UTF-8 with one row for each task, in the order of arrival.

Lines that begin with `#` come before the header and name the source of the figures; reports show them. The header has
the columns of `COLUMNS`, in any order: the fields of `TraceTask`. The reader, the writer and the documentation use this
table. An unknown column and an invalid value are errors: a partly understood trace would give wrong figures that look
right.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

from carma.core.model.values import Demand, Record

# seconds: a number from 0 to MOST_S; share: 0 to 1; count, MiB, samples: a whole number from 0 to MOST; whole: a whole
# number of any sign.
Kind = Literal["seconds", "share", "count", "MiB", "samples", "whole", "text"]
_UNITS = {"share": "share, 0 to 1", "whole": "", "text": ""}  # of the kinds that are no units themselves
LEAST_S = 1e-3  # minimum duration of a run
MOST_S = 1e9  # maximum of all times: thirty years, the limit of the daemon
MOST = 10**15  # maximum of counts


class TraceColumn(NamedTuple):
    """A column that is not `required` may be missing. With `empty`, a cell may be empty: the figure is unknown or does
    not apply. With `above_zero`, 0 is invalid."""

    kind: Kind
    meaning: str
    above_zero: bool = False
    name: str = ""
    required: bool = False
    empty: bool = False

    @property
    def unit(self) -> str:
        return _UNITS.get(self.kind, self.kind)

    @property
    def is_whole(self) -> bool:
        return self.kind not in ("seconds", "share", "text")


class TraceTask(Record, frozen=True, kw_only=True):
    """One row. `memory_mib` is the footprint on each GPU, `seconds` the run time alone. None: unknown."""

    arrival_s: Annotated[float, TraceColumn("seconds", "submission, counted from the start of the trace; never falls")]
    name: Annotated[str, TraceColumn("text", "name of the task; need not be unique")]
    gpus: Annotated[int, TraceColumn("count", "number of GPUs of the task", above_zero=True)]
    memory_mib: Annotated[int, TraceColumn("MiB", "footprint on each of its GPUs, at its peak", above_zero=True)]
    seconds: Annotated[float, TraceColumn("seconds", "duration of the whole run on GPUs of its own", above_zero=True)]
    sm_active: Annotated[float, TraceColumn("share", "SM activity when it runs alone")]
    sm_occupancy: Annotated[float, TraceColumn("share", "SM occupancy when it runs alone")]
    dram_active: Annotated[float, TraceColumn("share", "DRAM activity when it runs alone")]
    gr_active: Annotated[
        float | None, TraceColumn("share", "share of time with any kernel, alone; empty: not known")
    ] = None
    power: Annotated[
        float | None, TraceColumn("share", "power above idle, as a share of the card's range; empty: not known")
    ] = None
    start_s: Annotated[float, TraceColumn("seconds", "from its start to the first activity on the GPU (0)")] = 0.0
    ramp_s: Annotated[float, TraceColumn("seconds", "from the first byte of GPU memory to its peak (0)")] = 0.0
    first_mib: Annotated[int, TraceColumn("MiB", "memory at the beginning of the ramp (0)")] = 0
    busy_gpus: Annotated[
        int, TraceColumn("count", "number of its GPUs that it uses; the others stay idle; 0: all (0)")
    ] = 0
    model: Annotated[str, TraceColumn("text", "the trained model, as free text; may be empty")] = ""
    batch: Annotated[int, TraceColumn("samples", "its batch size; 0: not known (0)")] = 0
    user: Annotated[str, TraceColumn("text", "name of the submitting user; may be empty")] = ""
    priority: Annotated[int, TraceColumn("whole", "larger starts earlier (0)")] = 0
    checkpoint_s: Annotated[float, TraceColumn("seconds", "work between two checkpoints; 0: no checkpoints (0)")] = 0.0
    save_s: Annotated[
        float | None, TraceColumn("seconds", "duration of a save on a signal; empty: the task cannot be preempted")
    ] = None
    horus_mib: Annotated[int | None, TraceColumn("MiB", "memory by Horus; empty: no estimate", above_zero=True)] = None
    faketensor_mib: Annotated[
        int | None, TraceColumn("MiB", "memory by Fake Tensor; empty: no estimate", above_zero=True)
    ] = None
    gpumemnet_mib: Annotated[
        int | None, TraceColumn("MiB", "memory by GPUMemNet; empty: no estimate", above_zero=True)
    ] = None

    @property
    def demand(self) -> Demand:
        """Demand on each GPU that the task uses."""
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


def _columns() -> tuple[TraceColumn, ...]:
    """A field with a default is an optional column; one without a figure by default may be an empty cell."""
    hints, columns = get_type_hints(TraceTask, include_extras=True), []
    for field in msgspec.structs.fields(TraceTask):
        declared: TraceColumn = hints[field.name].__metadata__[0]
        is_empty = field.default in (None, "")
        columns.append(declared._replace(name=field.name, required=field.required, empty=is_empty))
    return tuple(columns)


COLUMNS = _columns()


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
