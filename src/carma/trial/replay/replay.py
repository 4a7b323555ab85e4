"""Feeds the events of a trial run through the model of the allocator: what the card would have held, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from carma.core.model.values import Record
from carma.trial.replay.allocator import CachingAllocator, OutOfMemory
from carma.trial.replay.allocator_options import AllocatorOptions
from carma.trial.report import ALLOC, CALL, EMPTY_CACHE, FREE, MARK, OTHER_STREAM, Call, Event

STEP_END = "step_end"
GRANULE_BYTES = 32 << 20
_TOP = 1 << 50
GROWS_FROM = 1.01  # step 3 over step 2


class Scratch(Record, frozen=True, kw_only=True):
    """Memory that a library takes for one call, beyond the tensors that the trace shows."""

    transient_bytes: tuple[int, ...] = ()  # taken together when the call begins, free when it is over
    trial_bytes: int = 0  # taken once before the first such call; then the cache is given back (cudnn.benchmark)
    kept: tuple[tuple[str, int], ...] = ()  # (key, bytes): taken once per key, thread and stream; never given back


NO_SCRATCH = Scratch()


class Workspaces(Protocol):
    """What a call takes on the card in question. It is asked once per call, thread and stream, so it must be pure."""

    def __call__(self, call: Call, thread: int, stream: int) -> Scratch: ...


def no_workspaces(call: Call, thread: int, stream: int) -> Scratch:  # noqa: ARG001 (the protocol's names)
    return NO_SCRATCH


class Peaks(Record, frozen=True, kw_only=True):
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int


class DidNotFit(Record, frozen=True, kw_only=True):
    """Where the replay ran out of memory, with everything cached already given back."""

    step: int
    wanted_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int


class Replayed(Record, frozen=True, kw_only=True):
    """Peaks over the whole trial. Steps count from 1; what comes after the last complete one counts as one more."""

    peaks: Peaks
    peak_step: int  # of allocated
    steps: tuple[Peaks, ...]  # of each complete step, what came before the first one included in it
    grows: bool  # steps 2 and 3 differ still: three steps do not show the peak
    scratch_bytes: int  # of libraries, at the peak of allocated
    unmatched: int  # events that contradict one another; anything but 0 means that the trace is faulty
    did_not_fit: DidNotFit | None = None

    @property
    def scratch_share(self) -> float:
        return self.scratch_bytes / self.peaks.allocated_bytes if self.peaks.allocated_bytes else 0.0


def replay(
    events: Iterable[Event],
    calls: Sequence[Call],
    options: AllocatorOptions,
    workspaces: Workspaces,
    capacity_bytes: int | None = None,
    *,
    marks: Sequence[str],
    device_bytes: int | None = None,
    by_age: bool = False,
) -> Replayed:
    """`calls` and `marks` are the report's. With a capacity, `did_not_fit` says whether the script survives it.

    `by_age`: torch's newer rule for free blocks of one size (2.14 and later); before, their addresses decide.
    """
    addresses = None if by_age else DriverAddresses()
    allocator = CachingAllocator(options, capacity_bytes, device_bytes=device_bytes, address_of=addresses)
    run = _Run(allocator, calls, marks, workspaces, options.large_segment_bytes)
    try:
        for event in events:
            run.feed(event)
    except OutOfMemory as failed:
        return run.result(failed)
    return run.result(None)


class DriverAddresses:
    """The addresses at which the driver puts new segments, called with their sizes in order.

    They matter because torch takes, among free blocks of one size, the one at the lowest address. Read off the
    histories of 677 training runs on an H200 (lab/results/h200/memory): new memory is taken downwards in granules of 32
    MiB; what a segment leaves of its last granule is used by later segments that fit, upwards, newest granule first.
    With this order the model gives the recorded reserved memory exactly; with ascending addresses one run in nine is
    off, by up to 8 %. Memory that was released is not used again, which is rare.
    """

    def __init__(self) -> None:
        self._lowest = _TOP
        self._left: list[tuple[int, int]] = []  # (address, bytes) behind segments, oldest first

    def __call__(self, size: int) -> int:
        for place in range(len(self._left) - 1, -1, -1):
            address, room = self._left[place]
            if room >= size:
                self._left[place : place + 1] = [(address + size, room - size)] if room > size else []
                return address
        taken = -(-size // GRANULE_BYTES) * GRANULE_BYTES
        self._lowest -= taken
        if taken > size:
            self._left.append((self._lowest + size, taken - size))
        return self._lowest


class _Run:
    def __init__(
        self,
        allocator: CachingAllocator,
        calls: Sequence[Call],
        marks: Sequence[str],
        workspaces: Workspaces,
        segment_bytes: int,
    ) -> None:
        self._allocator, self._calls, self._workspaces = allocator, calls, workspaces
        self._segment_bytes = segment_bytes
        self._step_ends = frozenset(index for index, mark in enumerate(marks) if mark == STEP_END)
        self._scratch: dict[tuple[int, int, int], Scratch] = {}
        self._kept: set[tuple[str, int, int]] = set()
        self._next_scratch = -1  # the trace's own ids are never negative
        self._scratch_bytes = 0
        self._peak_allocated = self._peak_scratch_bytes = 0
        self._peak_step = 1
        self._steps: list[Peaks] = []
        self._unmatched = 0

    def feed(self, event: Event) -> None:
        kind, allocator = event.kind, self._allocator
        if kind == ALLOC:
            if event.id in allocator:
                self._unmatched += 1
                allocator.free(event.id)
            allocator.malloc(event.id, event.bytes, event.stream)
            self._look()
        elif kind == FREE:
            if event.id in allocator:
                allocator.free(event.id)
            else:
                self._unmatched += 1
        elif kind == CALL:
            self._call(event)
        elif kind == MARK:
            if event.what in self._step_ends:
                self._end_step()
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        elif kind == OTHER_STREAM:
            if event.id in allocator:
                allocator.record_stream(event.id, event.stream)
            else:
                self._unmatched += 1

    def _look(self) -> None:
        if self._allocator.allocated > self._peak_allocated:
            self._peak_allocated = self._allocator.allocated
            self._peak_scratch_bytes, self._peak_step = self._scratch_bytes, len(self._steps) + 1

    def _call(self, event: Event) -> None:
        where = (event.what, event.thread, event.stream)
        if where not in self._scratch:
            self._scratch[where] = self._workspaces(self._calls[event.what], event.thread, event.stream)
            self._try(self._scratch[where].trial_bytes, event.stream)
        scratch = self._scratch[where]
        for key, size in scratch.kept:
            if (owner := (key, event.thread, event.stream)) not in self._kept:
                self._kept.add(owner)
                self._take(size, event.stream)
        taken = [self._take(size, event.stream) for size in scratch.transient_bytes]
        self._look()
        before = self._allocator.allocated
        for identity in taken:
            self._allocator.free(identity)
        self._scratch_bytes -= before - self._allocator.allocated

    def _try(self, size: int, stream: int) -> None:
        """torch's search for the fastest engine ends with an empty cache."""
        if size:
            before, identity = self._scratch_bytes, self._take(size, stream)
            self._look()
            self._allocator.free(identity)
            self._scratch_bytes = before
            self._allocator.empty_cache()

    def _take(self, size: int, stream: int) -> int:
        before, identity = self._allocator.allocated, self._next_scratch
        self._next_scratch -= 1
        self._allocator.malloc(identity, size, stream)
        self._scratch_bytes += self._allocator.allocated - before
        return identity

    def _end_step(self) -> None:
        self._steps.append(self._peaks())
        # Few loops go on without reading a loss or a gradient's norm; that is when the other streams are waited for.
        self._allocator.synchronize()
        self._allocator.reset_peaks()

    def _peaks(self) -> Peaks:
        return Peaks(
            allocated_bytes=self._allocator.peak_allocated,
            reserved_bytes=self._allocator.peak_reserved,
            requested_bytes=self._allocator.peak_requested,
        )

    def result(self, failed: OutOfMemory | None) -> Replayed:
        all_peaks = [*self._steps, self._peaks()]
        return Replayed(
            peaks=Peaks(
                allocated_bytes=max(peaks.allocated_bytes for peaks in all_peaks),
                reserved_bytes=max(peaks.reserved_bytes for peaks in all_peaks),
                requested_bytes=max(peaks.requested_bytes for peaks in all_peaks),
            ),
            peak_step=self._peak_step,
            steps=tuple(self._steps),
            grows=_grows(self._steps, self._segment_bytes),
            scratch_bytes=self._peak_scratch_bytes,
            unmatched=self._unmatched,
            did_not_fit=self._did_not_fit(failed) if failed is not None else None,
        )

    def _did_not_fit(self, failed: OutOfMemory) -> DidNotFit:
        return DidNotFit(
            step=len(self._steps) + 1,
            wanted_bytes=failed.wanted_bytes,
            allocated_bytes=failed.allocated_bytes,
            reserved_bytes=failed.reserved_bytes,
            limit_bytes=failed.limit_bytes,
        )


def _grows(steps: Sequence[Peaks], segment_bytes: int) -> bool:
    if len(steps) < 3:
        return False
    second, third = steps[1], steps[2]
    if third.allocated_bytes > second.allocated_bytes * GROWS_FROM:
        return True
    # One more segment can be the small change of a script that has settled, and over 1 % of a small model.
    more = third.reserved_bytes - second.reserved_bytes
    return third.reserved_bytes > second.reserved_bytes * GROWS_FROM and more > segment_bytes
