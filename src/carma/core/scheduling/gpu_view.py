"""One GPU as a decision sees it: a value, so that a pass works on copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from carma.core.model.values import AttemptKey, Correction, Demand, Gpu, GpuId, GpuSample, ProcessUse, Record
from carma.core.telemetry.window import Metric, Summary


class Progress(Record, frozen=True):
    """Estimated progress of an attempt, in seconds that the work would take alone."""

    began_at: float
    done_s: float  # as of `at`
    at: float
    rate: float  # since then
    alone_s: float | None  # of the whole run; None: unknown
    elsewhere: float = 1.0  # the rate that its other GPUs allow

    def done_by(self, now: float) -> float:
        return self.done_s + self.rate * max(0.0, now - self.at)


# Why the expected end of a task is no fact: it rests on `queue.assumed_runtime_s`, that time is over, or the estimated
# run time is over.
EndDoubt = Literal["assumed", "assumed_over", "estimate_over"]


class Holder(Record, frozen=True, kw_only=True):
    """An attempt on the GPU. `warming` is a phrase until it has settled ("has held memory for 4 s"), then None. Until
    then its demand is booked, not observed."""

    key: AttemptKey
    booking_mib: int
    observed_mib: int | None = None  # now
    peak_mib: int | None = None  # ever
    alone: bool = False
    warming: str | None = None
    settles_at: float | None = None  # expected; None once it has settled
    closes: bool = False  # whether it keeps the GPU closed until it has settled
    ends_at: float  # expected
    end_doubt: EndDoubt | None = None  # None: by its time limit, its estimated run time, or a request to leave
    demand: Demand | None = None  # of the task alone; None: unknown
    correction: Correction | None = None  # learned of its command
    same_command: Demand | None = None  # observed of another task with the same command, where `demand` is unknown
    progress: Progress | None = None  # None: it has not started
    other_gpus: tuple[OtherGpu, ...] = ()  # only for policies that define `objection`

    @property
    def counted_mib(self) -> int:
        return max(self.booking_mib, self.peak_mib or 0)

    @property
    def held_mib(self) -> int:
        """Memory that its end frees; the counted memory where the observed memory is unknown."""
        return self.counted_mib if self.observed_mib is None else self.observed_mib

    @property
    def growth_mib(self) -> int:
        """Memory that it may still take."""
        return max(0, self.counted_mib - (self.observed_mib or 0))


MAX_JOINT_GPUS = 8  # GPUs of one task that are judged together; a task with more is judged GPU by GPU


class OtherGpu(Record, frozen=True):
    """Another GPU of a holder."""

    gpu: GpuId
    demand: Demand | None  # on that GPU: some tasks leave all but one of their GPUs idle
    holders: tuple[Holder, ...]  # the other tasks there


class GpuView(Record, frozen=True, kw_only=True):
    gpu: Gpu
    holders: tuple[Holder, ...] = ()
    newest: GpuSample | None = None
    foreign: tuple[ProcessUse, ...] = ()
    foreign_mib: int = 0
    used_mib: int | None = None
    booked_mib: int = 0
    room_mib: int | None = None  # None: the memory in use is not known
    outdated: bool = False  # a task left since the last sample, and its memory cannot be separated from the rest
    summaries: Mapping[Metric, Summary] = {}
    blind: str | None = None  # why the window cannot be judged
    fault: str | None = None
    drained: str | None = None  # the reason, which may be empty
    slowed: str | None = None  # which of its tasks is slowed down beyond the limit; a sentence

    @property
    def idle(self) -> bool:
        """Neither a task nor a foreign process uses it."""
        return not self.holders and not self.foreign and not self.foreign_mib

    def gauge(self, metric: Metric, summary: Literal["risk", "p95", "mean"]) -> float | None:
        found = self.summaries.get(metric)
        return None if found is None else found.by(summary)

    def joined_by(self, holder: Holder) -> GpuView:
        """The same GPU after a placement in this pass; its window is of the time before."""
        holders = (*self.holders, holder)
        return msgspec.structs.replace(
            self,
            holders=holders,
            booked_mib=sum([one.counted_mib for one in holders]),
            room_mib=room_mib(self.gpu.memory_mib, self.used_mib, self.foreign_mib, holders),
            summaries={},
            blind="no sample since a task came just now",
        )

    def with_neighbour(self, joined: GpuView) -> GpuView:
        """The same GPU after a placement on another GPU of some of its holders."""
        on_both = {holder.key for holder in joined.holders}
        holders = tuple([_with_neighbour(one, joined) if one.key in on_both else one for one in self.holders])
        return msgspec.structs.replace(self, holders=holders)

    def after(self, at: float) -> tuple[tuple[Holder, ...], int]:
        """The remaining holders and the room (0 if unknown) when every holder that is expected to end by then has."""
        staying = tuple([holder for holder in self.holders if holder.ends_at > at])
        return staying, self._room_mib(staying, sum([one.held_mib for one in self.holders if one.ends_at <= at]))

    def without(self, leaving: Collection[AttemptKey]) -> tuple[tuple[Holder, ...], int]:
        """The same when these have left."""
        staying = tuple([holder for holder in self.holders if holder.key not in leaving])
        return staying, self._room_mib(staying, sum([one.held_mib for one in self.holders if one.key in leaving]))

    def _room_mib(self, staying: tuple[Holder, ...], freed_mib: int) -> int:
        if self.used_mib is None:
            return 0
        used_mib = max(0, self.used_mib - freed_mib)
        return room_mib(self.gpu.memory_mib, used_mib, self.foreign_mib, staying) or 0


def _with_neighbour(holder: Holder, joined: GpuView) -> Holder:
    others = tuple([one for one in joined.holders if one.key != holder.key])
    other_gpus = [
        OtherGpu(one.gpu, one.demand, others) if one.gpu == joined.gpu.id else one for one in holder.other_gpus
    ]
    return msgspec.structs.replace(holder, other_gpus=tuple(other_gpus))


def other_gpus_of(holders: Collection[Holder]) -> set[GpuId]:
    """The other GPUs of those holders."""
    return {known.gpu for holder in holders for known in holder.other_gpus}


def room_mib(capacity_mib: int, used_mib: int | None, foreign_mib: int, holders: tuple[Holder, ...]) -> int | None:
    """The memory that a new task may book; None if the memory in use is unknown."""
    if used_mib is None:
        return None
    by_bookings = capacity_mib - sum([holder.counted_mib for holder in holders]) - foreign_mib
    by_observation = capacity_mib - used_mib - sum([holder.growth_mib for holder in holders])
    return max(0, min(by_bookings, by_observation))
