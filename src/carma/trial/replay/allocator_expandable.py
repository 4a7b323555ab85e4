"""Expandable segments: one long virtual range for each stream and pool, whose pages are mapped on demand."""

from __future__ import annotations

from collections.abc import Callable

from carma.trial.replay.allocator_blocks import AllocatorBlock, Pool, Segment


class ExpandableSegments:
    """Maps and unmaps pages. `reserve` says whether there is memory for a page, and `release` returns it."""

    def __init__(
        self,
        *,
        small_page_bytes: int,
        large_page_bytes: int,
        card_bytes: int,
        address_of: Callable[[int], int],
        reserve: Callable[[int], bool],
        release: Callable[[int], None],
    ) -> None:
        self._small_page_bytes, self._large_page_bytes = small_page_bytes, large_page_bytes
        self._range_bytes = card_bytes + card_bytes // 8  # torch adds an eighth for pages that move to the end
        self._address_of, self._reserve, self._release = address_of, reserve, release

    def grow(self, pool: Pool, size: int, stream: int) -> AllocatorBlock | None:
        """A free block of at least `size`, removed from its pool; None if there is no memory for its pages."""
        block = self._room(pool, size, stream) or self._new_range(pool, stream)
        if not block.mapped and not self._map(block, min(block.bytes, size)):
            return None
        while block.bytes < size:
            following = block.next
            assert following is not None, "a block that was found to have room has a neighbour to grow into"
            if not self._map(following, min(size - block.bytes, following.bytes)):
                return None  # mapped pages stay mapped, as in torch
            block = following
        pool.remove(block)
        return block

    def unmap(self, block: AllocatorBlock) -> None:
        """Releases the pages that are wholly inside a free block."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        first, end = segment.page_up(block.address), segment.page_down(block.address + block.bytes)
        if first >= end:
            return
        pool.remove(block)
        if before := first - block.address:
            rest = AllocatorBlock(block.address, before, block.stream, pool, segment)
            rest.put_before(block)
            pool.add(rest)
        if after := block.address + block.bytes - end:
            rest = AllocatorBlock(end, after, block.stream, pool, segment)
            rest.put_after(block)
            pool.add(rest)
        block.address, block.bytes, block.mapped = first, end - first, False
        pool.merge(block)
        if not block.is_whole:
            pool.add_unmapped(block)
        self._release(end - first)

    @staticmethod
    def _room(pool: Pool, size: int, stream: int) -> AllocatorBlock | None:
        """The lowest address at which adjacent free and unmapped blocks have room for `size`."""
        for start in pool.unmapped(stream):
            before = start.previous
            first = before if before is not None and not before.in_use else start
            found = 0
            block: AllocatorBlock | None = first
            while found < size and block is not None and not block.in_use:
                found += block.bytes
                block = block.next
            if found >= size:
                return first
        return None

    def _new_range(self, pool: Pool, stream: int) -> AllocatorBlock:
        page = self._small_page_bytes if pool.small else self._large_page_bytes
        size = -(-self._range_bytes // page) * page
        segment = Segment(self._address_of(size), page)
        block = AllocatorBlock(segment.address, size, stream, pool, segment)
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def _map(self, block: AllocatorBlock, size: int) -> bool:
        """Maps pages at the front of an unmapped block, and merges it with its free neighbours."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        mapped = segment.page_up(block.address + size) - block.address
        if not self._reserve(mapped):
            return False
        pool.remove_unmapped(block)
        block.mapped = True
        if left := block.bytes - mapped:
            rest = AllocatorBlock(block.address + mapped, left, block.stream, pool, segment)
            rest.mapped = False
            rest.put_after(block)
            pool.add_unmapped(rest)
            block.bytes = mapped
        pool.merge(block)
        pool.add(block)
        return True
