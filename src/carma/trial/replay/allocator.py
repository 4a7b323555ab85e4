"""A model of PyTorch's caching allocator for one GPU: the blocks and segments after a sequence of mallocs and frees.

It follows the rules of c10's CUDACachingAllocator (torch 2.5 to 2.13) in their order: round, best fit among the free
blocks of the stream, garbage collection, a new segment, release of cached memory, out of memory. It is pure.

Unknown to it, with its assumption:
- Addresses of new segments. Between free blocks of one size the lower address wins (from torch 2.14 on the older
  segment). `address_of` gives them (`replay.DriverAddresses`); without it they ascend, as if by age.
- When another stream has finished with a block (`record_stream`). torch checks that at each malloc. A training loop
  runs ahead of its GPU, so the stream is assumed to be busy until `synchronize`, `empty_cache` or pressure: the larger
  figure.
Not modelled: pools of CUDA graphs, and settings that the script changes while it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from carma.trial.replay.allocator_blocks import AllocatorBlock, Pool
from carma.trial.replay.allocator_expandable import ExpandableSegments
from carma.trial.replay.allocator_options import MIB, AllocatorOptions

SMALLEST_BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB  # largest request of the small pool, and largest rest that the large pool does not split off
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_FROM_BYTES = 10 * MIB  # larger requests have a segment of their own size
ROUND_LARGE_BYTES = 2 * MIB
_ANY_CARD_BYTES = 1 << 40  # if the GPU's memory is unknown: it only sets the length of a virtual range


class AllocatorOutOfMemory(Exception):
    """The request did not fit, even after the whole cache was released."""


def round_request(size: int, options: AllocatorOptions) -> int:
    if size < SMALLEST_BLOCK_BYTES:
        return SMALLEST_BLOCK_BYTES
    divisions = options.roundup_power2_divisions
    steps = divisions[min(max(size.bit_length() - 21, 0), len(divisions) - 1)]  # the first class is 1 MiB and less
    if steps > 1 and size > SMALLEST_BLOCK_BYTES * steps:
        step = (1 << (size.bit_length() - 1)) // steps
        return -(-size // step) * step
    return -(-size // SMALLEST_BLOCK_BYTES) * SMALLEST_BLOCK_BYTES


def segment_for(rounded: int, options: AllocatorOptions) -> int:
    if rounded <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < LARGE_FROM_BYTES:
        return options.large_segment_bytes
    return -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class CachingAllocator:
    """Figures in bytes, as `torch.cuda.memory_stats` has them.

    `allocated` counts whole blocks until they are freed, `active` until they can be used again, `requested` the
    requests. `capacity_bytes` is the memory that the driver has for this process. `device_bytes` is the GPU's memory,
    to which `per_process_memory_fraction` refers (without it: to the capacity).
    """

    def __init__(
        self,
        options: AllocatorOptions,
        capacity_bytes: int | None = None,
        *,
        device_bytes: int | None = None,
        address_of: Callable[[int], int] | None = None,
    ) -> None:
        self._options, self._capacity = options, capacity_bytes
        limited_bytes = (device_bytes or capacity_bytes) if options.memory_fraction < 1 else None
        self._limit = None if limited_bytes is None else int(options.memory_fraction * limited_bytes)
        self._max_split = options.max_split_bytes
        self._small, self._large = (
            Pool(small=True, page_bytes=SMALL_SEGMENT_BYTES),
            Pool(small=False, page_bytes=options.large_segment_bytes),
        )
        self._live: dict[int, AllocatorBlock | None] = {}  # None: zero bytes, which take no block
        self._awaited: dict[int, AllocatorBlock] = {}  # freed, but perhaps still used by another stream
        self._address_of = address_of or self._ascending
        self._next_address = MIB
        self._expandable = ExpandableSegments(
            device_bytes or _ANY_CARD_BYTES, self._address_of, self._reserve, self._give_back
        )
        self.allocated = self.reserved = self.active = self.requested = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        self.peak_active, self.peak_requested = self.active, self.requested

    def __contains__(self, identity: int) -> bool:
        return identity in self._live

    def malloc(self, identity: int, size: int, stream: int = 0) -> None:
        if size <= 0:
            self._live[identity] = None
            return
        rounded = round_request(size, self._options)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        block = self._from_pool(pool, rounded, stream) or self._from_device(pool, rounded, stream)
        if self._splits(block, rounded):
            rest, block = block, block.cut(rounded)
            pool.add(rest)
        block.in_use, block.requested = True, size
        self._live[identity] = block
        self.allocated += block.bytes
        self.active += block.bytes
        self.requested += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        self.peak_requested = max(self.peak_requested, self.requested)

    def record_stream(self, identity: int, stream: int) -> None:
        block = self._live[identity]
        if block is not None and block.stream != stream:
            block.other_streams = True

    def free(self, identity: int) -> None:
        self.request_free(identity)
        block = self._awaited.get(identity)
        if block is not None and not block.other_streams:
            self.complete_free(identity)

    def request_free(self, identity: int) -> None:
        """First half of a free: the program has released the block, but it cannot be used again yet."""
        block = self._live.pop(identity)
        if block is None:
            return
        if identity in self._awaited:  # the id was used again meanwhile
            self.complete_free(identity)
        self.allocated -= block.bytes
        self._awaited[identity] = block

    def complete_free(self, identity: int) -> None:
        block = self._awaited.pop(identity)
        self.active -= block.bytes
        self.requested -= block.requested
        block.in_use = block.other_streams = False
        block.pool.merge(block)
        block.pool.add(block)

    def synchronize(self) -> None:
        """All streams have finished: the blocks that waited for them are free."""
        for identity in list(self._awaited):
            self.complete_free(identity)

    def empty_cache(self) -> None:
        self.synchronize()
        for pool in (self._large, self._small):
            for block in pool:
                if self._options.expandable_segments:
                    self._expandable.unmap(block)
                elif block.is_whole:
                    self._release(block)

    def live_blocks(self) -> list[tuple[int, int]]:
        """(address, bytes) of all blocks that are not free; for checks."""
        held = [*self._live.values(), *self._awaited.values()]
        return [(block.address, block.bytes) for block in held if block is not None]

    def _ascending(self, size: int) -> int:
        address = self._next_address
        self._next_address += size
        return address

    def _from_pool(self, pool: Pool, rounded: int, stream: int) -> AllocatorBlock | None:
        pool.searches += 1
        block = pool.best_fit(rounded, stream, by_growth=self._options.expandable_segments)
        if block is None or not self._may_take(block, rounded):
            return None
        pool.remove(block)
        return block

    def _may_take(self, block: AllocatorBlock, rounded: int) -> bool:
        """Whether max_split_size allows the block: small requests must not take oversize blocks, nor large ones far too
        large blocks."""
        if self._max_split is None:
            return True
        if rounded < self._max_split:
            return block.bytes < self._max_split
        return block.bytes < rounded + self._options.max_non_split_rounding_bytes

    def _splits(self, block: AllocatorBlock, rounded: int) -> bool:
        rest = block.bytes - rounded
        if block.pool.small or self._options.expandable_segments:
            return rest >= SMALLEST_BLOCK_BYTES
        return rest > SMALL_BYTES and (self._max_split is None or rounded < self._max_split)

    def _from_device(self, pool: Pool, rounded: int, stream: int) -> AllocatorBlock:
        self._collect_garbage()
        block = self._new_block(pool, rounded, stream)
        if block is None and self._release_oversize(pool, rounded, stream):
            block = self._new_block(pool, rounded, stream)
        if block is None:
            self.empty_cache()
            block = self._new_block(pool, rounded, stream)
        if block is None:
            limit = min(bound for bound in (self._limit, self._capacity) if bound is not None)
            wanted = segment_for(rounded, self._options)
            raise AllocatorOutOfMemory(
                f"wanted {wanted}, allocated {self.allocated}, reserved {self.reserved}, limit {limit} bytes"
            )
        return block

    def _new_block(self, pool: Pool, rounded: int, stream: int) -> AllocatorBlock | None:
        size = segment_for(rounded, self._options)
        if self._limit is not None and self.reserved + size > self._limit:
            return None
        if self._options.expandable_segments:
            return self._expandable.grow(pool, rounded, stream)
        if not self._reserve(size):
            return None
        address = self._address_of(size)
        return AllocatorBlock(address, size, stream, pool, address)

    def _reserve(self, size: int) -> bool:
        if self._capacity is not None and self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release(self, block: AllocatorBlock) -> None:
        block.pool.remove(block)
        self._give_back(block.bytes)

    def _give_back(self, size: int) -> None:
        self.reserved -= size

    def _collect_garbage(self) -> None:
        """Releases whole large blocks of at least average age until reserved memory is at the threshold."""
        threshold = self._options.garbage_collection_threshold
        if self._limit is None or not threshold or self._options.expandable_segments:
            return
        too_much = self.reserved - int(threshold * self._limit)
        candidates = [block for block in self._large if block.is_whole]
        while too_much > 0 and candidates:
            ages = [self._large.searches - block.inserted_at for block in candidates]
            average = sum(ages) / len(ages)
            younger: list[AllocatorBlock] = []
            for block, age in zip(candidates, ages, strict=True):
                if age < average:
                    younger.append(block)
                    continue
                too_much -= block.bytes
                self._release(block)
            candidates = younger

    def _release_oversize(self, pool: Pool, rounded: int, stream: int) -> bool:
        """Releases, with max_split_size, one block that is large enough, or the largest ones until their sum is."""
        if self._max_split is None or self._options.expandable_segments:
            return False
        wanted = max(rounded, self._max_split)
        if enough := pool.at_least(wanted, stream):
            self._release(enough[0])
            return True
        released = 0
        for block in reversed(pool.at_least(self._max_split, stream)):
            if released >= wanted:
                break
            released += block.bytes
            self._release(block)
        return released >= wanted
