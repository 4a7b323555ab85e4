"""A caching allocator in small: torch's rules for large blocks (best fit, splitting, joining, segments), and no more.

`estimate/trace/allocator.py` follows torch in all it does; this one answers some ten times as fast. Tensors of less
than a MiB go to another pool in torch, which is hardly any memory: they are only counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 1 << 20
SMALL = 1 * MIB  # also the rest that is not split off
SHARED_BELOW, SHARED = 10 * MIB, 20 * MIB  # smaller requests share segments of that size
ROUND = 2 * MIB


class Block:
    __slots__ = ("address", "before", "behind", "is_free", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.before: Block | None = None
        self.behind: Block | None = None
        self.is_free = False


class Cache:
    """Bytes. `peak` is of what is allocated; what is reserved never shrinks."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak = 0
        self._free: list[tuple[int, int]] = []  # size and address
        self._blocks: dict[int, Block] = {}  # the free ones by their address
        self._end = 0

    def take(self, size: int) -> Block | None:
        if size < SMALL:
            return None
        free = self._free
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._blocks.pop(free.pop(place)[1])
            block.is_free = False
        else:
            block = self._segment(size)
        if block.size - size > SMALL:
            self._split(block, size)
        self.allocated += block.size
        if self.allocated > self.peak:
            self.peak = self.allocated
        return block

    def give(self, block: Block | None) -> None:
        if block is None:
            return
        self.allocated -= block.size
        before, behind = block.before, block.behind
        if before is not None and before.is_free:
            self._remove(before)
            before.size += block.size
            before.behind = behind
            if behind is not None:
                behind.before = before
            block = before
        if behind is not None and behind.is_free:
            self._remove(behind)
            block.size += behind.size
            block.behind = behind.behind
            if behind.behind is not None:
                behind.behind.before = block
        self._add(block)

    def _segment(self, size: int) -> Block:
        whole = SHARED if size < SHARED_BELOW else -(-size // ROUND) * ROUND
        self.reserved += whole
        self._end += whole
        return Block(self._end - whole, whole)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size)
        rest.before, rest.behind = block, block.behind
        if rest.behind is not None:
            rest.behind.before = rest
        block.behind, block.size = rest, size
        self._add(rest)

    def _add(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.address] = block
        insort(self._free, (block.size, block.address))

    def _remove(self, block: Block) -> None:
        del self._blocks[block.address]
        del self._free[bisect_left(self._free, (block.size, block.address))]
