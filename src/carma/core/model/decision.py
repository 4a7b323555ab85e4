"""A decision: every GPU with its refusal or its score. `carma explain` prints it.

A server with thousands of GPUs makes very many of these objects. They contain no cycles, so the garbage collector skips
them (`gc=False`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from carma.core.model.values import Correction, Demand, GpuId, Placement, Record, TaskId

UNKNOWN = "unknown"  # the source of a booking that rests on nothing but memory.unknown_mib
RECOVERY = "recovery"  # the source of one that follows from an attempt that ran out of memory


class Ask(Record, frozen=True, gc=False):
    """What a task needs on each of its GPUs, and the source of the memory figure."""

    task: TaskId
    gpus: int
    memory_mib: int
    source: str
    alone: bool = False
    demand: Demand | None = None  # of the task alone; None: unknown
    alone_s: float | None = None  # run time alone; None: unknown
    at: float = 0.0  # time passed to the policy, rounded down to AS_OF_S
    idle_only: bool = False  # only an idle GPU will do: the task is still being estimated
    correction: Correction | None = None  # learned of its command; None: it has not shared a GPU yet
    same_command: Demand | None = None  # observed of another task with the same command, where `demand` is unknown


class Part(Record, frozen=True, gc=False):
    """One named figure of a score."""

    name: str
    value: float
    unit: str = ""


class Refusal(Record, frozen=True, gc=False):
    """Why a GPU does not take a task: a stable code and a sentence with the numbers."""

    # Memory, Utilisation, WarmUp, TasksPerGpu, Exclusive, Drained, Fault, Metrics, Reserved, Policy, Slowdown,
    # NotListed, Mechanism
    code: str
    sentence: str


class Reason(NamedTuple):
    """A refusal whose sentence is rendered only when it is read: the code, and the numbers for `render`."""

    code: str
    render: Callable[..., str]
    numbers: tuple[object, ...] = ()

    @property
    def sentence(self) -> str:
        return self.render(*self.numbers)


Objection = Reason | Refusal  # both have a code and a sentence; policies answer with Refusal


class Verdict(Record, frozen=True, gc=False):
    """One GPU's entry: refused, or ranked by `parts` (the first part decides, larger is better)."""

    gpu: GpuId
    refusal: Refusal | None = None
    parts: tuple[Part, ...] = ()
    chosen: bool = False


class Decision(Record, frozen=True):
    task: TaskId
    at: float
    policy: str
    verdicts: tuple[Verdict, ...]
    placement: Placement | None
    reason: str  # the whole in one sentence: why there, or why it waits
    code: str = ""  # the waiting reason's short name, as in a queue's REASON column
