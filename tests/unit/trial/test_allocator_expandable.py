"""Expandable segments: pages mapped on demand, blocks split to 512 B, whole free pages given back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from carma.trial.replay.allocator import AllocatorOutOfMemory, CachingAllocator
from carma.trial.replay.allocator_options import MIB, parse

EXPANDABLE = parse("expandable_segments:True")


def after(*sizes: float, capacity_mib: int | None = None) -> CachingAllocator:
    made = CachingAllocator(EXPANDABLE, None if capacity_mib is None else capacity_mib * MIB)
    for identity, mib in enumerate(sizes):
        made.malloc(identity, int(mib * MIB))
    return made


@pytest.mark.parametrize(
    ("mib", "reserved_mib"), [(0.5, 2), (1, 2), (3, 20), (19.9, 20), (20, 20), (33, 40), (100, 100), (101, 120)]
)
def test_one_request_maps_whole_pages(mib: float, reserved_mib: int) -> None:
    made = after(mib)
    assert made.reserved == reserved_mib * MIB
    assert made.allocated == -(-int(mib * MIB) // 512) * 512  # never the rest of a page


def test_the_segment_grows_by_what_is_missing_and_no_more() -> None:
    made = after(15, 33)  # 48 MiB in pages of 20
    assert made.reserved == 60 * MIB
    (first, _), (second, _) = sorted(made.live_blocks())
    assert second == first + 15 * MIB
    made.malloc(2, 12 * MIB)
    assert made.reserved == 60 * MIB


def test_small_and_large_requests_and_streams_have_ranges_of_their_own() -> None:
    made = after(15, 1)
    assert made.reserved == 22 * MIB
    made.malloc(2, MIB, stream=1)
    made.malloc(3, 3 * MIB, stream=1)
    assert made.reserved == 44 * MIB


def test_a_free_block_inside_is_preferred_to_the_end_that_could_grow() -> None:
    made = after(12, 6, 11)  # 29 of 40: the end has 11 free and could grow without limit
    inside = min(address for address, _ in made.live_blocks())
    made.free(0)
    made.malloc(3, 11 * MIB)  # the end would fit exactly
    assert min(address for address, _ in made.live_blocks()) == inside
    made.malloc(4, 11 * MIB)
    assert made.reserved == 40 * MIB


def test_freeing_and_asking_for_more_grows_the_same_pages() -> None:
    made = after(30)
    made.free(0)
    made.malloc(1, 50 * MIB)
    assert made.reserved == 60 * MIB  # without expandable segments it would be 80


def test_empty_cache_unmaps_whole_free_pages_between_live_blocks() -> None:
    made = after(10, 50, 10)  # 70 of 80
    made.free(1)
    made.empty_cache()  # free: 10 to 60; whole pages in it: 20 to 60. The free end (70 to 80) is no whole page
    assert made.reserved == 40 * MIB
    made.free(0)
    made.free(2)
    made.empty_cache()
    assert made.reserved == 0


def test_holes_are_filled_from_the_lowest_address_on() -> None:
    made = after(10, 50, 10)
    lowest = min(address for address, _ in made.live_blocks())
    made.free(1)
    made.empty_cache()
    made.malloc(3, 45 * MIB)  # 10 free, 40 unmapped, 0 free: it fits from 10 on
    assert (lowest + 10 * MIB, 45 * MIB) in made.live_blocks()
    assert made.reserved == 80 * MIB


def test_a_block_grows_over_a_hole_and_the_free_block_behind_it() -> None:
    made = after(10, 30, 10)  # 50 of 60
    made.free(1)
    made.empty_cache()  # 10 to 20 is free, 20 to 40 a hole
    made.free(2)  # 40 to 60 is free
    made.malloc(3, 70 * MIB)  # from 10 on: the hole's page, and one more at the end
    assert made.reserved == 80 * MIB


def test_a_hole_without_a_free_block_before_it_is_filled_first_too() -> None:
    made = after(20, 20, 10)
    made.free(1)
    made.empty_cache()  # 20 to 40 is a hole
    made.free(2)
    made.malloc(3, 70 * MIB)  # 20 to 90
    assert made.reserved == 100 * MIB


def test_a_range_without_any_page_is_given_back_itself() -> None:
    made = after(20, 20)
    first = min(address for address, _ in made.live_blocks())
    made.free(1)
    made.empty_cache()
    made.free(0)
    made.empty_cache()
    made.malloc(2, 20 * MIB)
    assert made.live_blocks()[0][0] > first + 40 * MIB


def test_a_hole_that_is_too_small_is_left_alone() -> None:
    made = after(10, 50, 10)
    made.free(1)
    made.empty_cache()
    made.malloc(3, 55 * MIB)  # 50 in the hole, so the end grows: 70 + 55 = 125 of 140, less the 40 of the hole
    assert made.reserved == 100 * MIB


def test_under_pressure_free_pages_are_given_back_and_mapped_elsewhere() -> None:
    made = after(40, 40, capacity_mib=100)
    made.free(0)
    made.malloc(2, 60 * MIB)
    assert (made.reserved, made.allocated) == (100 * MIB, 100 * MIB)


def test_out_of_memory_when_pages_cannot_be_had() -> None:
    made = after(40, 40, capacity_mib=90)
    made.free(0)
    with pytest.raises(AllocatorOutOfMemory):
        made.malloc(2, 60 * MIB)
    made.malloc(3, 40 * MIB)
    assert made.reserved == 80 * MIB


def test_the_large_segment_size_is_the_size_of_a_page() -> None:
    made = CachingAllocator(parse("expandable_segments:True,large_segment_size_mb:12"))
    made.malloc(0, 13 * MIB)
    assert made.reserved == 24 * MIB


def test_a_range_that_is_used_up_is_followed_by_another() -> None:
    made = CachingAllocator(EXPANDABLE, device_bytes=80 * MIB)  # ranges of 90, rounded up to pages: 100
    for identity in range(3):
        made.malloc(identity, 60 * MIB)
    assert made.reserved == 180 * MIB
    addresses = sorted(address for address, _ in made.live_blocks())
    assert [high - low for low, high in pairwise(addresses)] == [100 * MIB, 100 * MIB]
