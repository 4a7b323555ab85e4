"""Holds the model against what torch's own allocator did: follows a recorded history and says where the two part.

A history is what `torch.cuda.memory._snapshot()["device_traces"][device]` has, recorded from the start of the process:
`(entry["action"], entry["size"], entry["addr"], entry["stream"])` for each entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from carma.core.model.values import Record
from carma.trial.replay.allocator import CachingAllocator
from carma.trial.replay.allocator_options import AllocatorOptions

_NOT_RECORDED = 1 << 60  # addresses of segments that the model makes and torch did not


class Difference(Record, frozen=True):
    index: int  # of the action after which the two first differed by so much
    recorded_reserved_bytes: int
    reserved_bytes: int


class Followed(Record, frozen=True, kw_only=True):
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    recorded_peak_reserved_bytes: int
    differences: tuple[Difference, ...]
    unknown_frees: int  # of blocks that were there before the recording began


def follow(
    history: Iterable[tuple[str, int, int, int]], options: AllocatorOptions, *, recorded_addresses: bool = True
) -> Followed:
    """Every decision is the model's own but two: where new segments lie, and when torch gave segments back.

    Newer torch (its pull request 183591, May 2026) goes by the age of a segment and not by its address: for histories
    of such a version, `recorded_addresses=False`.
    """
    following = _Following(options, recorded_addresses=recorded_addresses)
    index = -1
    for index, (action, size, identity, stream) in enumerate(history):
        following.feed(action, size, identity, stream)
        if action == "alloc":
            following.compare(index)
    following.compare(index)
    return following.result()


class _RecordedAllocator(CachingAllocator):
    """The model, which also releases the segments that torch released."""

    def awaits(self, identity: int) -> bool:
        """Whether it was freed and cannot be used again yet."""
        return identity in self._awaited

    def release_segment(self, address: int) -> None:
        """Releases the segment at that address, if it is one and wholly free."""
        for block in (*self._large, *self._small):
            if block.address == address and block.is_whole and not self._options.expandable_segments:
                self._release(block)
                return


class _Following:
    def __init__(self, options: AllocatorOptions, *, recorded_addresses: bool) -> None:
        self._allocator = _RecordedAllocator(options, address_of=self._address_of)
        self._recorded_addresses = recorded_addresses
        self._new_segments: deque[int] = deque()
        self._own_address: dict[int, int] = {}  # of a recorded segment
        self._next_address = _NOT_RECORDED
        self._recorded = self._recorded_peak = 0
        self._off_by = 0
        self._unmapping = False
        self._unknown_frees = 0
        self._differences: list[Difference] = []

    def feed(self, action: str, size: int, identity: int, stream: int) -> None:
        match action:
            case "alloc":
                self._allocator.malloc(identity, size, stream)
                self._new_segments.clear()
            case "free_requested":
                if identity in self._allocator:
                    self._allocator.request_free(identity)
                else:
                    self._unknown_frees += 1
            case "free_completed":
                if self._allocator.awaits(identity):
                    self._allocator.complete_free(identity)
            case "segment_alloc" | "segment_map":
                self._recorded += size
                self._recorded_peak = max(self._recorded_peak, self._recorded)
                if action == "segment_alloc":
                    self._new_segments.append(identity)
            case "segment_free":
                self._recorded -= size
                self._allocator.release_segment(self._own_address.pop(identity, identity))
            case "segment_unmap":
                self._recorded -= size
                if not self._unmapping:
                    self._allocator.empty_cache()
        self._unmapping = action == "segment_unmap"

    def compare(self, index: int) -> None:
        reserved = self._allocator.reserved
        if (off_by := reserved - self._recorded) != self._off_by:
            self._off_by = off_by
            self._differences.append(Difference(index, self._recorded, reserved))

    def result(self) -> Followed:
        return Followed(
            peak_allocated_bytes=self._allocator.peak_allocated,
            peak_reserved_bytes=self._allocator.peak_reserved,
            recorded_peak_reserved_bytes=self._recorded_peak,
            differences=tuple(self._differences),
            unknown_frees=self._unknown_frees,
        )

    def _address_of(self, size: int) -> int:
        if self._recorded_addresses and self._new_segments:
            return self._new_segments.popleft()
        address = self._next_address
        self._next_address += size
        if self._new_segments:
            self._own_address[self._new_segments.popleft()] = address
        return address
