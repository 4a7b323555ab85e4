"""What must hold for the model of the allocator whatever a program does; a slow and plain model says the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carma.trial.replay.allocator import AllocatorOutOfMemory, CachingAllocator
from carma.trial.replay.allocator_options import MIB, AllocatorOptions, parse

SIZES = st.one_of(
    st.integers(0, 4096), st.integers(0, 3 * MIB), st.sampled_from([MIB, 10 * MIB, 20 * MIB]), st.integers(0, 80 * MIB)
)
# A size allocates; the second number picks one to free (one in two of the steps), the third is the stream.
STEPS = st.lists(st.tuples(SIZES, st.integers(-8, 7), st.integers(0, 1)), max_size=80)
SETTINGS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4", "large_segment_size_mb:40"]
)

NO_CLOCK = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def play(made: CachingAllocator, steps: list[tuple[int, int, int]]) -> list[int]:
    """Runs the steps and returns what is live at the end; checks the invariants after each step."""
    live: list[int] = []
    for identity, (size, pick, stream) in enumerate(steps):
        if pick >= 0 and live:
            made.free(live.pop(pick % len(live)))
        else:
            try:
                made.malloc(identity, size, stream)
            except AllocatorOutOfMemory:
                continue
            live.append(identity)
            if pick == -8:
                made.record_stream(identity, 1 - stream)
        check(made)
    return live


def check(made: CachingAllocator) -> None:
    blocks = sorted(made.live_blocks())
    assert all(address + size <= following for (address, size), (following, _) in pairwise(blocks))
    assert sum(size for _, size in blocks) == made.active
    assert made.requested <= made.active <= made.reserved
    assert made.allocated <= made.active
    assert made.reserved <= made.peak_reserved


@NO_CLOCK
@given(STEPS, SETTINGS)
def test_live_blocks_never_overlap_and_nothing_is_lost(steps: list[tuple[int, int, int]], text: str) -> None:
    made = CachingAllocator(parse(text))
    for identity in play(made, steps):
        made.free(identity)
    made.synchronize()
    assert (made.allocated, made.active, made.requested) == (0, 0, 0)
    made.empty_cache()
    assert made.reserved == 0


@NO_CLOCK
@given(STEPS, SETTINGS, st.integers(20, 200))
def test_a_capacity_is_never_passed(steps: list[tuple[int, int, int]], text: str, capacity_mib: int) -> None:
    made = CachingAllocator(parse(text), capacity_mib * MIB)
    play(made, steps)
    assert made.peak_reserved <= capacity_mib * MIB


@dataclass
class Plain:
    """The rules without settings, over lists that are searched from end to end: slow, and easy to see to be right."""

    segments: list[tuple[bool, int, list[list[int]]]] = field(default_factory=list)  # small?, stream, [size, id or -1]

    def malloc(self, identity: int, asked: int, stream: int) -> None:
        size = max(512, -(-asked // 512) * 512)
        small = size <= MIB
        fits = [
            (piece[0], number, place)
            for number, (is_small, owner, pieces) in enumerate(self.segments)
            if (is_small, owner) == (small, stream)
            for place, piece in enumerate(pieces)
            if piece[1] < 0 and piece[0] >= size
        ]
        if not fits:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, stream, [[whole, -1]]))
            fits = [(whole, len(self.segments) - 1, 0)]
        found, number, place = min(fits)
        pieces = self.segments[number][2]
        left = found - size
        if left >= 512 if small else left > MIB:
            pieces[place : place + 1] = [[size, identity], [left, -1]]
        else:
            pieces[place][1] = identity

    def free(self, identity: int) -> None:
        for _, _, pieces in self.segments:
            for piece in pieces:
                if piece[1] == identity:
                    piece[1] = -1
            for place in range(len(pieces) - 1, 0, -1):
                if pieces[place][1] < 0 and pieces[place - 1][1] < 0:
                    pieces[place - 1][0] += pieces.pop(place)[0]

    @property
    def reserved(self) -> int:
        return sum(size for _, _, pieces in self.segments for size, _ in pieces)

    @property
    def allocated(self) -> int:
        return sum(size for _, _, pieces in self.segments for size, owner in pieces if owner >= 0)


@NO_CLOCK
@given(STEPS)
def test_a_slow_and_plain_model_comes_to_the_same_figures(steps: list[tuple[int, int, int]]) -> None:
    made, plain, live = CachingAllocator(AllocatorOptions()), Plain(), list[int]()
    for identity, (size, pick, stream) in enumerate(steps):
        if pick >= 0 and live:
            chosen = live.pop(pick % len(live))
            made.free(chosen)
            plain.free(chosen)
        else:
            made.malloc(identity, size + 1, stream)
            plain.malloc(identity, size + 1, stream)
            live.append(identity)
        assert (made.reserved, made.allocated) == (plain.reserved, plain.allocated)
