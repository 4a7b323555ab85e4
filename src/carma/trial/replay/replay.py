"""Feeds the events of a trial run through the model of the allocator: what the GPU would have held, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from carma.core.model.values import Record
from carma.trial.replay.allocator import AllocatorOutOfMemory, CachingAllocator
from carma.trial.replay.allocator_options import AllocatorOptions
from carma.trial.report import ALLOC, CALL, EMPTY_CACHE, FREE, MARK, OTHER_STREAM, Call, TrialEvent

STEP_END = "step_end"
GRANULE_BYTES = 32 << 20
_TOP = 1 << 50
GROWS_FROM = 1.01  # step 3 over step 2


class Scratch(Record, frozen=True, kw_only=True):
    """Memory that a library allocates for one call, beyond the tensors that the trace shows."""

    transient_bytes: tuple[int, ...] = ()  # allocated together at the start of the call, freed at its end
    trial_bytes: int = 0  # allocated before the first such call; then the cache is emptied (cudnn.benchmark)
    kept: tuple[tuple[str, int], ...] = ()  # (key, bytes): allocated once per key, thread and stream; never freed


NO_SCRATCH = Scratch()
Workspaces = Callable[[Call], Scratch]  # must be pure: called once for each call, thread and stream


class Peaks(Record, frozen=True, kw_only=True):
    allocated_bytes: int
    reserved_bytes: int


class Replayed(Record, frozen=True, kw_only=True):
    """Peaks over the whole trial. Steps count from 1; events after the last complete step count as one more."""

    peaks: Peaks
    steps: tuple[Peaks, ...]  # of each complete step; the first includes what came before it
    grows: bool  # steps 2 and 3 still differ: three steps do not show the peak
    scratch_bytes: int  # of libraries, at the peak of allocated
    unmatched: int  # events that contradict each other; more than 0 means that the trace is faulty
    over_limit: bool = False  # it ended where memory exceeded the script's own limit


def replay(
    events: Iterable[TrialEvent],
    calls: Sequence[Call],
    options: AllocatorOptions,
    workspaces: Workspaces,
    *,
    marks: Sequence[str],
    device_bytes: int | None = None,
    by_age: bool = False,
) -> Replayed:
    """`calls` and `marks` are the report's. It ends where memory exceeds the script's own limit (a memory fraction).

    `by_age`: torch's newer rule for free blocks of one size (2.14 and later); before, their addresses decide.
    """
    addresses = None if by_age else DriverAddresses()
    allocator = CachingAllocator(options, device_bytes=device_bytes, address_of=addresses)
    run = _Replay(allocator, calls, marks, workspaces)
    over_limit = False
    try:
        for event in events:
            run.feed(event)
    except AllocatorOutOfMemory:
        over_limit = True
    return replace(run.result(options.large_segment_bytes), over_limit=over_limit)


class DriverAddresses:
    """The addresses at which the driver puts new segments, called with their sizes in order.

    They matter because torch prefers, among free blocks of one size, the one at the lowest address. Derived from the
    histories of 677 training runs on an H200 (lab/results/h200/memory): new memory is taken downwards in granules of 32
    MiB; the rest of a segment's last granule is used by later segments that fit, upwards, newest granule first. With
    this order the model gives the recorded reserved memory exactly; with ascending addresses one run in nine differs,
    by up to 8 %. Released memory is not used again here, which is rare.
    """

    def __init__(self) -> None:
        self._lowest = _TOP
        self._rests: list[tuple[int, int]] = []  # (address, bytes) behind segments, oldest first

    def __call__(self, size: int) -> int:
        for place in range(len(self._rests) - 1, -1, -1):
            address, room = self._rests[place]
            if room >= size:
                self._rests[place : place + 1] = [(address + size, room - size)] if room > size else []
                return address
        taken = -(-size // GRANULE_BYTES) * GRANULE_BYTES
        self._lowest -= taken
        if taken > size:
            self._rests.append((self._lowest + size, taken - size))
        return self._lowest


class _Replay:
    def __init__(
        self, allocator: CachingAllocator, calls: Sequence[Call], marks: Sequence[str], workspaces: Workspaces
    ) -> None:
        self._allocator, self._calls, self._workspaces = allocator, calls, workspaces
        self._step_ends = frozenset(index for index, mark in enumerate(marks) if mark == STEP_END)
        self._scratch: dict[tuple[int, int, int], Scratch] = {}
        self._kept: set[tuple[str, int, int]] = set()
        self._next_scratch = -1  # the trace's own ids are never negative
        self._scratch_bytes = self._unmatched = 0
        self._peak_allocated = self._peak_scratch_bytes = 0
        self._steps: list[Peaks] = []

    def feed(self, event: TrialEvent) -> None:
        kind, allocator = event.kind, self._allocator
        if kind == ALLOC:
            if event.id in allocator:
                self._unmatched += 1
                allocator.free(event.id)
            allocator.malloc(event.id, event.bytes, event.stream)
            self._note_peak()
        elif kind == CALL:
            self._call(event)
        elif kind == MARK:
            if event.what in self._step_ends:
                self._end_step()
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        elif event.id not in allocator:
            self._unmatched += kind in (FREE, OTHER_STREAM)
        elif kind == FREE:
            allocator.free(event.id)
        elif kind == OTHER_STREAM:
            allocator.record_stream(event.id, event.stream)

    def _note_peak(self) -> None:
        if self._allocator.allocated > self._peak_allocated:
            self._peak_allocated, self._peak_scratch_bytes = self._allocator.allocated, self._scratch_bytes

    def _call(self, event: TrialEvent) -> None:
        where = (event.what, event.thread, event.stream)
        if where not in self._scratch:
            self._scratch[where] = found = self._workspaces(self._calls[event.what])
            if found.trial_bytes:  # torch's search for the fastest engine ends with an empty cache
                self._hold([found.trial_bytes], event.stream)
                self._allocator.empty_cache()
        scratch = self._scratch[where]
        for key, size in scratch.kept:
            if (owner := (key, event.thread, event.stream)) not in self._kept:
                self._kept.add(owner)
                self._take(size, event.stream)
        self._hold(scratch.transient_bytes, event.stream)

    def _hold(self, sizes: Iterable[int], stream: int) -> None:
        """Allocates them together, and frees them."""
        before = self._scratch_bytes
        taken = [self._take(size, stream) for size in sizes]
        self._note_peak()
        for identity in taken:
            self._allocator.free(identity)
        self._scratch_bytes = before

    def _take(self, size: int, stream: int) -> int:
        before, identity = self._allocator.allocated, self._next_scratch
        self._next_scratch -= 1
        self._allocator.malloc(identity, size, stream)
        self._scratch_bytes += self._allocator.allocated - before
        return identity

    def _end_step(self) -> None:
        self._steps.append(self._peaks())
        # Nearly all loops read a loss or the norm of a gradient, which waits for the other streams.
        self._allocator.synchronize()
        self._allocator.reset_peaks()

    def _peaks(self) -> Peaks:
        return Peaks(allocated_bytes=self._allocator.peak_allocated, reserved_bytes=self._allocator.peak_reserved)

    def result(self, segment_bytes: int) -> Replayed:
        every = [*self._steps, self._peaks()]
        return Replayed(
            peaks=Peaks(
                allocated_bytes=max(peaks.allocated_bytes for peaks in every),
                reserved_bytes=max(peaks.reserved_bytes for peaks in every),
            ),
            steps=tuple(self._steps),
            grows=_grows(self._steps, segment_bytes),
            scratch_bytes=self._peak_scratch_bytes,
            unmatched=self._unmatched,
        )


def _grows(steps: Sequence[Peaks], segment_bytes: int) -> bool:
    if len(steps) < 3:
        return False
    second, third = steps[1], steps[2]
    # A script that has settled may still add one segment, which can be over 1 % of a small model.
    more = third.reserved_bytes - second.reserved_bytes
    grows = third.reserved_bytes > second.reserved_bytes * GROWS_FROM and more > segment_bytes
    return grows or third.allocated_bytes > second.allocated_bytes * GROWS_FROM
