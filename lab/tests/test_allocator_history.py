"""Following a history that torch's allocator recorded: the model agrees, or the place is named where it does not."""

from __future__ import annotations

from carma.trial.replay.allocator_options import MIB, AllocatorOptions, parse
from lab_fixtures.allocator_history import Difference, follow

PLAIN = AllocatorOptions()
HIGH, LOW, LOWEST = 900 * MIB, 500 * MIB, 100 * MIB
Action = tuple[str, int, int, int]


def new(address: int, mib: int) -> list[Action]:
    """A request that took a segment of its own."""
    return [("segment_alloc", mib * MIB, address, 0), ("alloc", mib * MIB, address, 0)]


def freed(address: int, mib: int) -> list[Action]:
    return [("free_requested", mib * MIB, address, 0), ("free_completed", mib * MIB, address, 0)]


def test_a_history_that_keeps_the_rules_shows_no_difference() -> None:
    history = [
        ("segment_alloc", 20 * MIB, LOW, 0),
        ("alloc", 4 * MIB, LOW, 0),
        ("alloc", 6 * MIB, LOW + 4 * MIB, 0),
        *freed(LOW, 4),
        ("alloc", 3 * MIB - 600, LOW, 0),
        *new(HIGH, 30),
        *freed(HIGH, 30),
        ("segment_free", 30 * MIB, HIGH, 0),
        *new(LOWEST, 40),
    ]
    found = follow(history, PLAIN)
    assert found.differences == ()
    assert found.unknown_frees == 0
    assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes == 60 * MIB
    # 3 MiB less 600 B rounds to 3 MiB less 512 B, and leaves 1 MiB and 512 B, which is split off
    assert found.peak_allocated_bytes == 49 * MIB - 512


def test_segments_are_given_back_by_age_too() -> None:
    history = [*new(HIGH, 30), *new(LOW, 40), *freed(HIGH, 30), ("segment_free", 30 * MIB, HIGH, 0), *new(LOWEST, 12)]
    assert follow(history, PLAIN, recorded_addresses=False).differences == ()


def test_equal_blocks_are_taken_by_recorded_address_or_by_age() -> None:
    # Two equal blocks are free, the older one higher up. torch took the lower one, then one fits that needs the other.
    history = [*new(HIGH, 30), *new(LOW, 30), *freed(HIGH, 30), *freed(LOW, 30), ("alloc", 15 * MIB, LOW, 0)]
    history += [("segment_free", 30 * MIB, HIGH, 0), ("alloc", 15 * MIB, LOW + 15 * MIB, 0)]
    assert follow(history, PLAIN).differences == ()
    # By age it would have been the higher one, which then cannot be given back.
    aged = follow(history, PLAIN, recorded_addresses=False)
    assert aged.differences == (Difference(len(history) - 1, 30 * MIB, 60 * MIB),)


def test_a_segment_that_torch_did_not_need_is_a_difference_named_once() -> None:
    history = [*new(LOW, 30), *freed(LOW, 30), ("alloc", 40 * MIB, LOW, 0), *new(HIGH, 32), *new(LOWEST, 50)]
    found = follow(history, PLAIN)
    assert found.differences == (Difference(4, 30 * MIB, 70 * MIB),)


def test_a_segment_that_torch_took_beside_a_free_one_is_a_difference() -> None:
    history = [*new(LOW, 30), *freed(LOW, 30), *new(HIGH, 30)]
    history += [*new(LOWEST, 40), *freed(LOWEST, 40), ("segment_free", 40 * MIB, LOWEST, 0)]
    assert follow(history, PLAIN).differences == (Difference(5, 60 * MIB, 30 * MIB),)


def test_a_free_that_waits_for_a_stream_is_completed_when_torch_did() -> None:
    waiting = [*new(LOW, 30), ("free_requested", 30 * MIB, LOW, 0), *new(HIGH, 30)]
    later = [("free_completed", 30 * MIB, LOW, 0), ("alloc", 30 * MIB, LOW, 0)]
    found = follow([*waiting, *later], PLAIN)
    assert found.differences == ()
    assert found.peak_allocated_bytes == 60 * MIB


def test_blocks_from_before_the_recording_are_counted() -> None:
    found = follow([*freed(LOW, 30), *new(HIGH, 12)], PLAIN)
    assert (found.unknown_frees, found.differences) == (1, ())


def test_expandable_segments_are_followed_through_maps_and_unmaps() -> None:
    history: list[Action] = [
        ("segment_map", 40 * MIB, LOW, 0),
        ("alloc", 30 * MIB, LOW, 0),
        ("segment_map", 20 * MIB, LOW + 40 * MIB, 0),
        ("alloc", 30 * MIB, LOW + 30 * MIB, 0),
        *freed(LOW, 30),
        ("segment_unmap", 20 * MIB, LOW, 0),
        ("segment_map", 40 * MIB, LOW + 60 * MIB, 0),
        ("alloc", 40 * MIB, LOW + 60 * MIB, 0),
    ]
    found = follow(history, parse("expandable_segments:True"))
    assert found.differences == ()
    assert found.peak_reserved_bytes == 80 * MIB


def test_an_empty_history_has_nothing_to_differ_in() -> None:
    assert follow([], PLAIN).differences == ()
