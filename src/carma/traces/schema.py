"""The trace format: a CSV file with one row for each task, in the order of arrival.

Lines that begin with `#` come before the header and say where the figures are from; they are kept and shown.
The header names the columns, in any order:

| column         | unit         | meaning                                                                  |
|----------------|--------------|--------------------------------------------------------------------------|
| `arrival_s`    | seconds      | submission, counted from the start of the trace; never falls             |
| `name`         | -            | what the task is called; need not be unique                              |
| `gpus`         | count        | GPUs that it asks for                                                    |
| `memory_mib`   | MiB          | footprint on each of its GPUs, at its peak                               |
| `seconds`      | seconds      | its whole run when it has its GPUs for itself                            |
| `sm_active`    | share, 0..1  | SM activity that it shows alone                                          |
| `sm_occupancy` | share, 0..1  | SM occupancy that it shows alone                                         |
| `dram_active`  | share, 0..1  | DRAM activity that it shows alone                                        |
| `start_s`      | seconds      | optional (0): from its start to the first activity on the GPU            |
| `ramp_s`       | seconds      | optional (0): from the first byte of GPU memory to its peak              |

A column that is not in this table is an error, as is a row with a value out of range: a trace that is half
understood gives figures that look right and are not.
"""

from __future__ import annotations

from carma.core.model import Demand, Record


class TraceTask(Record, frozen=True, kw_only=True):
    """One row. `memory_mib` is a footprint for each GPU; `seconds` is the run alone."""

    arrival_s: float
    name: str
    gpus: int
    memory_mib: int
    seconds: float
    sm_active: float
    sm_occupancy: float
    dram_active: float
    start_s: float = 0.0
    ramp_s: float = 0.0

    @property
    def demand(self) -> Demand:
        return Demand(self.sm_active, self.sm_occupancy, self.dram_active)


class Trace(Record, frozen=True, kw_only=True):
    """A whole file: its tasks in order of arrival, and what its comment lines say about their source."""

    name: str
    tasks: tuple[TraceTask, ...]
    source: str = ""

    @property
    def gpu_seconds(self) -> float:
        """The work in it: GPUs times seconds alone, summed."""
        return sum(task.gpus * task.seconds for task in self.tasks)
