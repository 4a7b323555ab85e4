"""A caching allocator in small: torch's rules for large blocks (best fit, splitting, joining, segments), and no more.

`estimate/trace/allocator.py` follows torch in all it does; this one answers about three times as fast. Tensors of less
than a MiB go to another pool in torch, which is hardly any memory: they are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 1 << 20
SMALL = 1 * MIB  # also the rest that is not split off
SHARED_BELOW, SHARED = 10 * MIB, 20 * MIB  # smaller requests share segments of that size
ROUND = 2 * MIB
_SHIFT = 60  # a free block's key is its size, then its address: the first that is large enough fits best


class Block:
    """Neighbours are those in its segment; where that ends stands a block that is never free."""

    __slots__ = ("address", "before", "behind", "key", "size")

    def __init__(self, address: int, size: int, before: Block | None = None, behind: Block | None = None) -> None:
        self.address, self.size = address, size
        self.before, self.behind = before or self, behind or self
        self.key = 0  # while it is free: its size, then its address


class Cache:
    """Bytes. `peak` is of what is allocated; what is reserved never shrinks."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak = 0
        # Of the free blocks, in order: the first that is large enough fits best. A key stays behind when its block is
        # joined to another, until it is met: most blocks are parted at the same place again.
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}  # of each key the block that had it last
        self._edge = Block(0, 0)

    def take(self, size: int) -> Block | None:
        if size < SMALL:
            return None
        keys, blocks = self._keys, self._blocks
        place = bisect_left(keys, size << _SHIFT)
        while place < len(keys):
            block = blocks.pop(key := keys.pop(place))
            if block.key == key:
                block.key = 0
                break
        else:
            block = self._segment(size)
        if (rest := block.size - size) > SMALL:
            self._part(block, size, rest)
        self.allocated = allocated = self.allocated + block.size
        if allocated > self.peak:
            self.peak = allocated
        return block

    def give(self, block: Block | None) -> None:
        if block is None:
            return
        size, before, behind = block.size, block.before, block.behind
        self.allocated -= size
        if behind.key:
            behind.key = 0
            size += behind.size
            block.behind = behind = behind.behind
            behind.before = block
        if before.key:
            size += before.size
            before.behind, behind.before = behind, before
            block = before
        block.size = size
        block.key = key = size << _SHIFT | block.address
        if key not in self._blocks:
            insort(self._keys, key)
        self._blocks[key] = block

    def _part(self, block: Block, size: int, rest: int) -> None:
        """What is behind the first `size` bytes is free."""
        address, behind = block.address + size, block.behind
        key = rest << _SHIFT | address
        free = self._blocks.get(key)
        if free is None:
            free = self._blocks[key] = Block(address, rest, block, behind)
            insort(self._keys, key)
        else:  # nothing else begins there: its key was left behind
            free.size, free.before, free.behind = rest, block, behind
        free.key = key
        behind.before = block.behind = free
        block.size = size

    def _segment(self, size: int) -> Block:
        """At the end of those before, which nothing is joined across."""
        whole = SHARED if size < SHARED_BELOW else -(-size // ROUND) * ROUND
        self.reserved += whole
        return Block(self.reserved - whole, whole, self._edge, self._edge)


class Tape:
    """What comes and goes, in order. A tensor that comes is its size, one that goes the complement of its number."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._count = 0

    def take(self, size: int) -> int | None:
        """Its number; None for one of the small ones."""
        if size < SMALL:
            return None
        self.steps.append(size)
        self._count += 1
        return self._count - 1

    def give(self, number: int | None) -> None:
        if number is not None:
            self.steps.append(~number)

    def cut(self) -> list[int]:
        """The steps since the last cut. Numbers go on."""
        steps, self.steps = self.steps, []
        return steps


def replay(steps: list[int], cache: Cache, taken: list[Block | None]) -> None:
    """`taken`: the blocks of the numbers so far; what comes is added to them."""
    take, give, come = cache.take, cache.give, taken.append
    for step in steps:
        if step >= 0:
            come(take(step))
        else:
            give(taken[~step])
