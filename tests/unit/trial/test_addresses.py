"""Where new segments come to lie."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from carma.trial.replay.replay import GRANULE_BYTES, DriverAddresses

MIB = 1 << 20


def test_new_ground_is_taken_downwards() -> None:
    place = DriverAddresses()
    first, second, third = place(20 * MIB), place(20 * MIB), place(148 * MIB)
    assert first - second == GRANULE_BYTES
    assert second - third == 5 * GRANULE_BYTES


def test_what_a_segment_leaves_of_its_granule_is_used_upwards() -> None:
    place = DriverAddresses()
    first = place(20 * MIB)
    assert [place(2 * MIB) - first for _ in range(6)] == [size * MIB for size in (20, 22, 24, 26, 28, 30)]
    assert place(2 * MIB) < first


def test_the_newest_granule_goes_first() -> None:
    place = DriverAddresses()
    place(20 * MIB)
    newer = place(20 * MIB)
    assert place(2 * MIB) == newer + 20 * MIB


@given(st.lists(st.integers(1, 200), max_size=60))
def test_segments_never_overlap(sizes_in_mib: list[int]) -> None:
    place = DriverAddresses()
    taken = sorted((place(size * MIB), size * MIB) for size in sizes_in_mib)
    for (address, size), (following, _) in pairwise(taken):
        assert address + size <= following
