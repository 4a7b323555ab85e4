"""Replaying a trial's events: peaks, steps, scratch of libraries, and whether it fits."""

from __future__ import annotations

import pytest

from carma.trial.replay.allocator_options import MIB, AllocatorOptions, parse
from carma.trial.replay.replay import (
    NO_SCRATCH,
    Peaks,
    Replayed,
    Scratch,
    Workspaces,
    replay,
)
from carma.trial.report import (
    ALLOC,
    CALL,
    EMPTY_CACHE,
    FREE,
    MARK,
    OTHER_STREAM,
    Call,
    TrialEvent,
    read_events,
)
from tests.trials import write_events

DEVICE_MIB = 1000
MARKS = ("forward", "step_end")
CONV, LINEAR = Call(op="conv", dtype="float32"), Call(op="blas", dtype="float32")
CALLS = (CONV, LINEAR)


def alloc(identity: int, mib: float, stream: int = 0) -> TrialEvent:
    return TrialEvent(ALLOC, 0, stream, 0, identity, int(mib * MIB))


def free(identity: int) -> TrialEvent:
    return TrialEvent(FREE, 0, 0, 0, identity, 0)


def call(what: int, thread: int = 0, stream: int = 0) -> TrialEvent:
    return TrialEvent(CALL, thread, stream, what, 0, 0)


FORWARD, STEP_END = TrialEvent(MARK, 0, 0, 0, 0, 0), TrialEvent(MARK, 0, 0, 1, 0, 0)


def replayed(
    *events: TrialEvent,
    workspaces: Workspaces = lambda _call: NO_SCRATCH,
    options: AllocatorOptions = AllocatorOptions(),
) -> Replayed:
    stored = read_events(write_events(events))
    return replay(stored, CALLS, options, workspaces, marks=MARKS, device_bytes=DEVICE_MIB * MIB)


def peaks(allocated_mib: float, reserved_mib: float) -> Peaks:
    return Peaks(allocated_bytes=int(allocated_mib * MIB), reserved_bytes=int(reserved_mib * MIB))


def test_peaks_are_those_of_the_whole_trial() -> None:
    found = replayed(alloc(1, 30), alloc(2, 33), free(1), STEP_END, alloc(3, 12), free(2), FORWARD, alloc(4, 2))
    assert found.peaks == peaks(64, 64)  # 33 takes a block of 34
    assert found.steps == (peaks(64, 64),)
    assert (found.grows, found.scratch_bytes, found.unmatched) == (False, 0, 0)


def test_each_step_has_its_own_peaks() -> None:
    def step(temporary: int) -> list[TrialEvent]:
        return [alloc(9, temporary), free(9), STEP_END]

    found = replayed(alloc(1, 12), *step(30), *step(40), *step(20), alloc(2, 50))
    assert found.steps == (peaks(42, 42), peaks(52, 82), peaks(32, 82))
    assert found.peaks == peaks(62, 132)  # after the last complete step


@pytest.mark.parametrize(("extra_mib", "grows"), [(0, False), (1, False), (2, True)])
def test_growth_from_step_two_to_three_is_noticed_above_one_percent(extra_mib: int, grows: bool) -> None:
    # Step 2 holds 20 MiB more than step 1: that is the optimizer's state, and as it should be.
    found = replayed(alloc(1, 100), STEP_END, alloc(2, 20), STEP_END, alloc(3, extra_mib), STEP_END)
    assert found.grows == grows


def test_two_steps_cannot_show_growth() -> None:
    assert not replayed(alloc(1, 10), STEP_END, alloc(2, 50), STEP_END).grows


@pytest.mark.parametrize(("temporary_mib", "grows"), [(48, False), (49.5, True)])
def test_a_reserved_that_grows_alone_counts_too(temporary_mib: float, grows: bool) -> None:
    # 11 MiB are cut off the front of the 60 of the steps before. What is left holds 49 MiB; more needs a new segment.
    temporary = [alloc(9, 60), free(9), STEP_END]
    found = replayed(alloc(1, 100), *temporary, *temporary, alloc(2, 11), alloc(9, temporary_mib), free(9), STEP_END)
    assert [step.allocated_bytes // MIB for step in found.steps[:2]] == [160, 160]
    assert found.steps[2].allocated_bytes <= 161 * MIB
    assert found.grows == grows


def test_one_more_segment_is_no_growth() -> None:
    found = replayed(alloc(1, 30), alloc(2, 170), STEP_END, STEP_END, alloc(3, 1.5), STEP_END)
    assert [step.reserved_bytes // MIB for step in found.steps] == [200, 200, 220]
    assert not found.grows


def scratch_for(call: Call) -> Scratch:
    if call is CONV:
        return Scratch(transient_bytes=(40 * MIB, 20 * MIB))
    return Scratch(kept=(("cublas", 32 * MIB),))


def test_transient_scratch_is_there_at_the_call_and_reused_after_it() -> None:
    found = replayed(alloc(1, 12), call(0), alloc(2, 40), call(0), workspaces=scratch_for)
    assert found.peaks.allocated_bytes == (12 + 40 + 60) * MIB
    assert found.peaks.reserved_bytes == (12 + 40 + 20 + 40) * MIB
    assert found.scratch_bytes == 60 * MIB
    assert found.peaks.allocated_bytes == 112 * MIB


def test_transient_blocks_of_one_call_are_there_at_once() -> None:
    assert replayed(call(0), workspaces=scratch_for).peaks == peaks(60, 60)


def test_kept_scratch_is_taken_once_per_key_thread_and_stream() -> None:
    found = replayed(call(1), call(1), call(1, thread=1), call(1, thread=1), workspaces=scratch_for)
    assert found.peaks == peaks(64, 64)
    assert found.scratch_bytes == 64 * MIB
    assert replayed(call(1), call(1, stream=3), workspaces=scratch_for).peaks == peaks(64, 64)


def test_kept_scratch_is_part_of_a_later_peak() -> None:
    found = replayed(call(1), alloc(1, 96), workspaces=scratch_for)
    assert (found.scratch_bytes, found.peaks.allocated_bytes) == (32 * MIB, 128 * MIB)


def test_a_trial_without_any_allocation_has_no_peak() -> None:
    found = replayed(STEP_END)
    assert (found.peaks, found.scratch_bytes) == (peaks(0, 0), 0)


def test_workspaces_are_asked_once_for_the_same_call() -> None:
    asked: list[str] = []

    def ask(call: Call) -> Scratch:
        asked.append(call.op)
        return NO_SCRATCH

    replayed(call(0), call(0), call(1, thread=2, stream=3), call(0), workspaces=ask)
    assert asked == ["conv", "blas"]


def test_the_scripts_own_memory_fraction_releases_the_cache_and_ends_the_replay() -> None:
    events = [alloc(1, 30), free(1), STEP_END, alloc(2, 40), alloc(3, 20), STEP_END]
    assert replayed(*events).peaks.reserved_bytes == 70 * MIB
    squeezed = replayed(*events, options=parse("per_process_memory_fraction:0.06"))
    assert (squeezed.peaks, len(squeezed.steps), squeezed.over_limit) == (peaks(60, 60), 2, False)
    ended = replayed(*events, options=parse("per_process_memory_fraction:0.059"))
    assert (ended.peaks, len(ended.steps), ended.over_limit) == (peaks(40, 40), 1, True)


def test_empty_cache_and_the_settings_are_honoured() -> None:
    emptied = replayed(alloc(1, 30), free(1), TrialEvent(EMPTY_CACHE, 0, 0, 0, 0, 0), alloc(2, 40))
    assert emptied.peaks == peaks(40, 40)
    expandable = replayed(alloc(1, 30), free(1), alloc(2, 40), options=parse("expandable_segments:True"))
    assert expandable.peaks == peaks(40, 40)


def test_a_block_used_on_another_stream_is_free_again_in_the_next_step() -> None:
    used = [alloc(1, 30), TrialEvent(OTHER_STREAM, 0, 5, 0, 1, 0), free(1)]
    assert replayed(*used, alloc(2, 30)).peaks == peaks(30, 60)
    assert replayed(*used, STEP_END, alloc(2, 30)).peaks == peaks(30, 30)


def test_events_that_contradict_one_another_are_counted() -> None:
    found = replayed(free(5), TrialEvent(OTHER_STREAM, 0, 5, 0, 5, 0), alloc(1, 30), alloc(1, 30))
    assert found.unmatched == 3
    assert found.peaks == peaks(30, 30)


def test_a_search_for_the_fastest_engine_happens_once_and_ends_with_an_empty_cache() -> None:
    def searches(call: Call) -> Scratch:  # noqa: ARG001 (the protocol's name)
        return Scratch(trial_bytes=300 * MIB)

    once = replayed(alloc(1, 40), free(1), call(0), STEP_END, alloc(2, 40), call(0), STEP_END, workspaces=searches)
    first, second = once.steps
    assert first.allocated_bytes == 300 * MIB
    assert first.reserved_bytes == 340 * MIB
    assert second.reserved_bytes == 40 * MIB  # neither the block that was tried nor the cached one is still held
