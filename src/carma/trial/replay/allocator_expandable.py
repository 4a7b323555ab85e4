"""Expandable segments: one long virtual range for each stream and pool, whose pages are mapped on demand."""

from __future__ import annotations

from collections.abc import Callable

from carma.trial.replay.allocator_blocks import AllocatorBlock, Pool


class ExpandableSegments:
    """Maps and unmaps pages. `reserve` says whether there is memory for a page, and `release` returns it."""

    def __init__(
        self,
        card_bytes: int,
        address_of: Callable[[int], int],
        reserve: Callable[[int], bool],
        release: Callable[[int], None],
    ) -> None:
        self._range_bytes = card_bytes + card_bytes // 8  # torch adds an eighth for pages that move to the end
        self._address_of, self._reserve, self._release = address_of, reserve, release

    def grow(self, pool: Pool, size: int, stream: int) -> AllocatorBlock | None:
        """A free block of at least `size`, removed from its pool; None if there is no memory for its pages."""
        block: AllocatorBlock | None = self._room(pool, size, stream) or self._new_range(pool, stream)
        if block is not None and not block.mapped:
            block = self._map(block, min(block.bytes, size))
        while block is not None and block.bytes < size:
            following = block.next
            assert following is not None, "a block that was found to have room has a neighbour to grow into"
            # After a failure mapped pages stay mapped, as in torch.
            block = self._map(following, min(size - block.bytes, following.bytes))
        if block is not None:
            pool.remove(block)
        return block

    def unmap(self, block: AllocatorBlock) -> None:
        """Releases the pages that are wholly inside a free block."""
        page, start = block.pool.page_bytes, block.segment_address
        first, end = _page_up(block, block.address), start + (block.address + block.bytes - start) // page * page
        if first >= end:
            return
        pool = block.pool
        pool.remove(block)
        if before := first - block.address:
            pool.add(block.cut(before))
        pages = block.cut(end - first)
        if pages is not block:
            pool.add(block)
        pages.mapped = False
        pool.merge(pages)
        if not pages.is_whole:
            pool.add_unmapped(pages)
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
        size = -(-self._range_bytes // pool.page_bytes) * pool.page_bytes
        address = self._address_of(size)
        block = AllocatorBlock(address, size, stream, pool, address, mapped=False)
        pool.add_unmapped(block)
        return block

    def _map(self, block: AllocatorBlock, size: int) -> AllocatorBlock | None:
        """Maps pages at the front of an unmapped block. Returns them, merged with their free neighbours."""
        pool, mapped = block.pool, _page_up(block, block.address + size) - block.address
        if not self._reserve(mapped):
            return None
        pool.remove_unmapped(block)
        pages = block.cut(mapped)
        if pages is not block:
            pool.add_unmapped(block)
        pages.mapped = True
        pool.merge(pages)
        pool.add(pages)
        return pages


def _page_up(block: AllocatorBlock, address: int) -> int:
    """The end of the page of the block's range in which the byte before this address lies."""
    page, start = block.pool.page_bytes, block.segment_address
    return start - (start - address) // page * page
