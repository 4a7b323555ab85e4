"""One GPU as a decision sees it. A value: whoever tries something out works on a copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from carma.core.model.values import AttemptKey, Demand, Gpu, GpuId, GpuSample, ProcessUse, Record
from carma.core.telemetry.window import Metric, Summary


class Progress(Record, frozen=True):
    """How far an attempt is thought to be, in seconds that the work would take alone."""

    began_at: float
    done_s: float  # as of `at`
    at: float
    rate: float  # since then
    alone_s: float | None  # all of it; None: nobody knows
    elsewhere: float = 1.0  # the rate that its other GPUs allow

    def done_by(self, now: float) -> float:
        return self.done_s + self.rate * max(0.0, now - self.at)


class Holder(Record, frozen=True, kw_only=True):
    """An attempt on the GPU. `warming` is a phrase as long as it has not settled ("has held memory for 4 s")."""

    key: AttemptKey
    booking_mib: int
    observed_mib: int | None = None  # now
    peak_mib: int | None = None  # ever
    alone: bool = False
    warming: str | None = None
    settles_at: float | None = None  # expected, as long as it is warming
    ends_at: float  # expected
    demand: Demand | None = None  # what it would keep busy alone; None: nobody knows
    progress: Progress | None = None  # None: it has not started
    beside: tuple[Beside, ...] = ()  # its other GPUs, for a policy that has a say about company (`against`)

    @property
    def counted_mib(self) -> int:
        return max(self.booking_mib, self.peak_mib or 0)

    @property
    def held_mib(self) -> int:
        """What its end should free; where nobody can tell what it holds, what it is counted with."""
        return self.counted_mib if self.observed_mib is None else self.observed_mib

    @property
    def growth_mib(self) -> int:
        """What it may still take beyond what it holds now."""
        return max(0, self.counted_mib - (self.observed_mib or 0))


MOST_BESIDE = 8  # GPUs of one task that are looked at together: a task with more is judged GPU by GPU


class Beside(Record, frozen=True):
    """Another GPU of a holder."""

    gpu: GpuId
    demand: Demand | None  # what it would keep busy there alone: some leave all but one of their GPUs idle
    holders: tuple[Holder, ...]  # who else is there


class GpuView(Record, frozen=True, kw_only=True):
    gpu: Gpu
    holders: tuple[Holder, ...] = ()
    newest: GpuSample | None = None
    foreign: tuple[ProcessUse, ...] = ()
    foreign_mib: int = 0
    used_mib: int | None = None
    booked_mib: int = 0
    room_mib: int | None = None  # None: the memory in use is not known
    outdated: bool = False  # a task left since the last sample, and what it held cannot be told from the rest
    summaries: Mapping[Metric, Summary] = {}
    blind: str | None = None  # why the window cannot be judged
    fault: str | None = None
    drained: str | None = None  # the reason, which may be empty

    @property
    def idle(self) -> bool:
        """Nobody is on it: neither a task nor a process that somebody else started."""
        return not self.holders and not self.foreign and not self.foreign_mib

    def gauge(self, metric: Metric, summary: Literal["risk", "p95", "mean"]) -> float | None:
        found = self.summaries.get(metric)
        return None if found is None else found.by(summary)

    def joined_by(self, holder: Holder) -> GpuView:
        """The same GPU after a placement in this pass: what its window says is of the time before."""
        holders = (*self.holders, holder)
        return msgspec.structs.replace(
            self,
            holders=holders,
            booked_mib=sum([one.counted_mib for one in holders]),
            room_mib=room_mib(self.gpu.memory_mib, self.used_mib, self.foreign_mib, holders),
            summaries={},
            blind="no sample since a task came just now",
        )

    def with_beside(self, joined: GpuView) -> GpuView:
        """The same GPU after somebody has come to another one, which some of its holders have, too."""
        there = {holder.key for holder in joined.holders}
        holders = tuple([_beside(one, joined) if one.key in there else one for one in self.holders])
        return msgspec.structs.replace(self, holders=holders)

    def after(self, at: float) -> tuple[tuple[Holder, ...], int]:
        """Who is still there, and the room (none where it is not known), when every holder that is expected to end by
        then has ended."""
        staying = tuple([holder for holder in self.holders if holder.ends_at > at])
        return staying, self._room_mib(staying, sum([one.held_mib for one in self.holders if one.ends_at <= at]))

    def without(self, leaving: Collection[AttemptKey]) -> tuple[tuple[Holder, ...], int]:
        """The same when those have left."""
        staying = tuple([holder for holder in self.holders if holder.key not in leaving])
        return staying, self._room_mib(staying, sum([one.held_mib for one in self.holders if one.key in leaving]))

    def _room_mib(self, staying: tuple[Holder, ...], freed_mib: int) -> int:
        if self.used_mib is None:
            return 0
        used_mib = max(0, self.used_mib - freed_mib)
        return room_mib(self.gpu.memory_mib, used_mib, self.foreign_mib, staying) or 0


def _beside(holder: Holder, joined: GpuView) -> Holder:
    others = tuple([one for one in joined.holders if one.key != holder.key])
    beside = [
        Beside(known.gpu, known.demand, others) if known.gpu == joined.gpu.id else known for known in holder.beside
    ]
    return msgspec.structs.replace(holder, beside=tuple(beside))


def also_on(holders: Collection[Holder]) -> set[GpuId]:
    """The other GPUs of those holders."""
    return {known.gpu for holder in holders for known in holder.beside}


def room_mib(capacity_mib: int, used_mib: int | None, foreign_mib: int, holders: tuple[Holder, ...]) -> int | None:
    """The ledger's answer: what a newcomer may book."""
    if used_mib is None:
        return None
    by_bookings = capacity_mib - sum([holder.counted_mib for holder in holders]) - foreign_mib
    by_observation = capacity_mib - used_mib - sum([holder.growth_mib for holder in holders])
    return max(0, min(by_bookings, by_observation))
