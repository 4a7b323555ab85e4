"""A caching allocator in small: torch's rules for large blocks (best fit, splitting, joining, segments), and no more.

`trial/replay/allocator.py` follows torch in all it does; this one answers about four times as fast. Tensors of less
than a MiB go to another pool in torch, which is hardly any memory: they are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

MIB = 1 << 20
SMALL = 1 * MIB  # also the rest that is not split off
SHARED_BELOW, SHARED = 10 * MIB, 20 * MIB  # smaller requests share segments of that size
ROUND = 2 * MIB
_NEVER = 1 << 62  # larger than any size: there is never a block of it


class Block:
    """Neighbours are those in its segment; where that ends stands a block that is never free."""

    __slots__ = ("at", "before", "behind", "free", "size", "used")

    def __init__(self, at: int, size: int, before: Block | None = None, behind: Block | None = None) -> None:
        self.at = at  # the address, below zero: the greatest is the first
        self.size = size
        self.before, self.behind = before or self, behind or self
        self.free = 0  # its size, while it is free
        self.used = 0  # of its size, what counts as allocated


class Cache:
    """Bytes. `peak` is of what is allocated; what is reserved never shrinks. `least`: no request is smaller."""

    def __init__(self, least: int = SMALL) -> None:
        self.reserved = self.allocated = self.peak = 0
        self._least = max(least, SMALL)
        # Of the free blocks that a request may fit in: their sizes, and where those of each size are, both in order.
        # What is left of a block that was joined to another stays behind, until it is met: most blocks are parted at
        # the same place again.
        self._sizes = [_NEVER]
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}  # by where they are, those that were joined to others, too
        self._edge = Block(0, 0)

    def play(self, steps: list[int], taken: list[Block]) -> None:
        """What comes and goes, as `Tape` writes it. `taken`: the blocks so far; what comes is added to them. One loop
        with few calls: most of the time that an answer takes is spent here."""
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
            while alike := places[whole := sizes[place]]:  # the smallest that is large enough, the first of these
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
            elif rest >= least or block.behind is not edge:  # else nobody can ask for the rest, nor join it
                self._part(block, step, rest)
            block.used = step
            come(block)
            allocated += step
            if allocated > peak:
                peak = allocated
        self.allocated, self.peak = allocated, peak

    def _part(self, block: Block, size: int, rest: int) -> None:
        """What is behind the first `size` bytes is free."""
        at, behind = block.at - size, block.behind
        free = self._blocks.get(at)
        if free is None:
            free = self._blocks[at] = Block(at, rest, block, behind)
        else:  # it was joined to this one
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
        """At the end of those before, which nothing is joined across. The block, and its size."""
        whole = SHARED if size < SHARED_BELOW else -(-size // ROUND) * ROUND
        at = -self.reserved
        block = self._blocks[at] = Block(at, whole, self._edge, self._edge)
        self.reserved += whole
        return block, whole


class Tape:
    """What comes and goes, in order. A tensor that comes is its size, one that goes the complement of its number."""

    def __init__(self, least: int) -> None:
        self.steps: list[int] = []
        self.least = least  # of the sizes so far
        self._count = 0

    def take(self, size: int) -> int | None:
        """Its number; None for one of the small ones."""
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
        """The steps since the last cut. Numbers go on."""
        steps, self.steps = self.steps, []
        return steps
