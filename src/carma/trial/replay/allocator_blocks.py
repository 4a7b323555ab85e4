"""Blocks and pools of the caching allocator's model: neighbours in a segment, and the best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A piece of a segment. `previous` and `next` are its neighbours in the same segment."""

    address: int
    bytes: int
    stream: int
    pool: Pool
    segment_address: int  # where its segment, or its expandable range, begins
    mapped: bool = True  # always, except for pages of an expandable range
    previous: AllocatorBlock | None = None
    next: AllocatorBlock | None = None
    requested: int = 0
    in_use: bool = False  # allocated, or freed and still awaited by another stream
    other_streams: bool = False
    inserted_at: int = 0

    @property
    def is_whole(self) -> bool:
        return self.previous is None and self.next is None

    @property
    def could_grow_to(self) -> int:
        following = self.next
        return self.bytes + (following.bytes if following is not None and not following.mapped else 0)

    def cut(self, size: int) -> AllocatorBlock:
        """Cuts off the first `size` bytes and returns them as a block; the block itself if it is not larger."""
        if size >= self.bytes:
            return self
        front = AllocatorBlock(
            self.address, size, self.stream, self.pool, self.segment_address, self.mapped, self.previous, self
        )
        if self.previous is not None:
            self.previous.next = front
        self.previous = front
        self.address += size
        self.bytes -= size
        return front

    def take_in(self, neighbour: AllocatorBlock) -> None:
        """Merges with a neighbour, which is then no longer used."""
        if neighbour is self.previous:
            self.address, self.previous = neighbour.address, neighbour.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.previous = self
        self.bytes += neighbour.bytes


class Pool:
    """The free blocks of one kind (small or large), by stream; within a stream ordered by size, then by address."""

    def __init__(self, *, small: bool, page_bytes: int) -> None:
        """`page_bytes`: of expandable segments."""
        self.small, self.page_bytes = small, page_bytes
        self.searches = 0  # the clock of garbage collection
        self._order: dict[int, list[tuple[int, int]]] = {}
        self._free: dict[int, AllocatorBlock] = {}
        self._unmapped: dict[int, list[tuple[int, AllocatorBlock]]] = {}

    def __iter__(self) -> Iterator[AllocatorBlock]:
        """Blocks in torch's order: by stream, size, address. A copy, so that blocks may be removed meanwhile."""
        keys = [key for stream in sorted(self._order) for key in self._order[stream]]
        return iter([self._free[address] for _, address in keys])

    def add(self, block: AllocatorBlock) -> None:
        block.inserted_at = self.searches
        insort(self._order.setdefault(block.stream, []), (block.bytes, block.address))
        self._free[block.address] = block

    def remove(self, block: AllocatorBlock) -> None:
        order = self._order[block.stream]
        del order[bisect_left(order, (block.bytes, block.address))]
        del self._free[block.address]

    def merge(self, block: AllocatorBlock) -> None:
        """Merges a block with its free neighbours: mapped with mapped ones, unmapped with unmapped ones."""
        for neighbour in (block.previous, block.next):
            if neighbour is None or neighbour.in_use or neighbour.mapped != block.mapped:
                continue
            if neighbour.mapped:
                self.remove(neighbour)
            else:
                self.remove_unmapped(neighbour)
            block.take_in(neighbour)

    def best_fit(self, size: int, stream: int, *, by_growth: bool) -> AllocatorBlock | None:
        """The smallest block of at least `size`; with expandable segments, by the size that a block could grow to."""
        order = self._order.get(stream)
        if not order or (index := bisect_left(order, (size, -1))) == len(order):
            return None
        found = self._free[order[index][1]]
        if by_growth:
            for place in range(index + 1, len(order)):
                following = self._free[order[place][1]]
                if following.could_grow_to >= found.could_grow_to:
                    break
                found = following
        return found

    def at_least(self, size: int, stream: int) -> list[AllocatorBlock]:
        """Smallest first."""
        order = self._order.get(stream, [])
        return [self._free[address] for _, address in order[bisect_left(order, (size, -1)) :]]

    def add_unmapped(self, block: AllocatorBlock) -> None:
        insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: AllocatorBlock) -> None:
        self._unmapped[block.stream].remove((block.address, block))

    def unmapped(self, stream: int) -> list[AllocatorBlock]:
        return [block for _, block in self._unmapped.get(stream, ())]
