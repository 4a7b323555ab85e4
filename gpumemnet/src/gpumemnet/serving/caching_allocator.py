"""A small caching allocator: torch's rules for large blocks (best fit, splitting, merging, segments), nothing else.

`trial/replay/allocator.py` follows torch in everything; features computed with it take 2.5 to 3.5 times as long. The
shipped models were learned with this one. Tensors below 1 MiB are in another pool of torch, which needs little memory:
they are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

MIB = 1 << 20
SMALL = 1 * MIB  # also the largest rest that is not split off
SHARED_BELOW, SHARED = 10 * MIB, 20 * MIB  # smaller requests share segments of that size
ROUND = 2 * MIB
_NEVER = 1 << 62  # larger than any size: there is no block of this size


class Block:
    """`before` and `behind` are the neighbours in its segment; at its ends they are a block that is never free."""

    __slots__ = ("at", "before", "behind", "free", "size", "used")

    def __init__(self, at: int, size: int, before: Block | None = None, behind: Block | None = None) -> None:
        self.at = at  # the negative address, so that the greatest is the first
        self.size = size
        self.before, self.behind = before or self, behind or self
        self.free = 0  # its size while it is free, else 0
        self.used = 0  # the part of its size that counts as allocated


class Cache:
    """The state of a caching allocator, in bytes. `peak` is of allocated memory; reserved memory never shrinks.
    `least`: no request is smaller."""

    def __init__(self, least: int = SMALL) -> None:
        self.reserved = self.allocated = self.peak = 0
        self._least = max(least, SMALL)
        # The sizes of free blocks that a request may fit into, and the addresses for each size, both sorted.
        # The entry of a block that was merged into another one stays until it is met, because most blocks are split
        # at the same place again.
        self._sizes = [_NEVER]
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}  # by address, merged ones too
        self._edge = Block(0, 0)

    def play(self, steps: list[int], taken: list[Block]) -> None:
        """Replays the steps of a `Tape`. `taken`: the blocks so far; new blocks are appended. One loop with few calls,
        because most of the time of an answer is spent here."""
        sizes, places, blocks, edge, least = self._sizes, self._places, self._blocks, self._edge, self._least
        allocated, peak, come = self.allocated, self.peak, taken.append
        for step in steps:
            if step < 0:
                block = taken[~step]
                allocated -= block.used
                size, before, behind = block.size, block.before, block.behind
                if behind.free:
                    size += behind.free
                    behind.free = 0
                    block.behind = behind = behind.behind
                    behind.before = block
                if before.free:
                    size += before.free
                    before.behind, behind.before = behind, before
                    block = before
                block.size = block.free = size
                if alike := places[size]:
                    insort(alike, block.at)
                else:
                    alike.append(block.at)
                    insort(sizes, size)
                continue
            place = bisect_left(sizes, step)
            while alike := places[whole := sizes[place]]:  # the smallest size that fits, and the lowest address
                block = blocks[alike.pop()]
                if not alike:
                    del sizes[place]
                if block.free == whole:
                    block.free = 0
                    break
            else:
                block, whole = self._segment(step)
            if (rest := whole - step) <= SMALL:
                step = whole
            elif rest >= least or block.behind is not edge:  # else the rest is useless
                self._part(block, step, rest)
            block.used = step
            come(block)
            allocated += step
            if allocated > peak:
                peak = allocated
        self.allocated, self.peak = allocated, peak

    def _part(self, block: Block, size: int, rest: int) -> None:
        """Splits a block: the part after the first `size` bytes is free."""
        at, behind = block.at - size, block.behind
        free = self._blocks.get(at)
        if free is None:
            free = self._blocks[at] = Block(at, rest, block, behind)
        else:  # it was merged into this block
            free.size, free.before, free.behind = rest, block, behind
        behind.before = block.behind = free
        block.size, free.free = size, rest
        if rest >= self._least:
            if alike := self._places[rest]:
                insort(alike, at)
            else:
                alike.append(at)
                insort(self._sizes, rest)

    def _segment(self, size: int) -> tuple[Block, int]:
        """A new segment at the end; nothing merges across segments. Returns the block and its size."""
        whole = SHARED if size < SHARED_BELOW else -(-size // ROUND) * ROUND
        at = -self.reserved
        block = self._blocks[at] = Block(at, whole, self._edge, self._edge)
        self.reserved += whole
        return block, whole


class Tape:
    """Allocations and frees, in order. An allocation is its size, a free is the complement of the tensor's number."""

    def __init__(self, least: int) -> None:
        self.steps: list[int] = []
        self.least = least  # minimum of the sizes so far
        self._count = 0

    def take(self, size: int) -> int | None:
        """Allocates a tensor and returns its number; None for a small one."""
        if size < SMALL:
            return None
        if size < self.least:
            self.least = size
        self.steps.append(size)
        number = self._count
        self._count = number + 1
        return number

    def give(self, number: int | None) -> None:
        if number is not None:
            self.steps.append(~number)

    def cut(self) -> list[int]:
        """The steps since the last cut. Numbers continue."""
        steps, self.steps = self.steps, []
        return steps
