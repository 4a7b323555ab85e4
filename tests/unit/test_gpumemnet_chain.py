"""The small caching allocator, held against the whole one; and two training steps played through it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from carma.estimate.described import Described, Layer
from carma.estimate.gpumemnet.again import spans_of
from carma.estimate.gpumemnet.cache import MIB, Block, Cache
from carma.estimate.gpumemnet.columns import Columns
from carma.estimate.gpumemnet.features import PLACE, features
from carma.estimate.gpumemnet.kinds import INDEX
from carma.estimate.gpumemnet.unseen import find_unseen
from carma.estimate.trace.allocator import CachingAllocator
from carma.estimate.trace.allocator_options import AllocatorOptions


@pytest.mark.parametrize("seed", range(6))
def test_large_tensors_reserve_what_torch_would(seed: int) -> None:
    dice, small, whole = random.Random(seed), Cache(), CachingAllocator(AllocatorOptions())
    alive: dict[int, Block | None] = {}
    for number in range(400):
        if alive and dice.random() < 0.45:
            chosen = dice.choice(sorted(alive))
            small.give(alive.pop(chosen))
            whole.free(chosen)
        else:
            size = 512 * dice.randrange(2 * MIB // 512, 60 * MIB // 512)
            alive[number] = small.take(size)
            whole.malloc(number, size)
    assert (small.reserved, small.allocated, small.peak) == (whole.reserved, whole.allocated, whole.peak_allocated)


def test_a_part_of_a_block_is_used_and_joined_again() -> None:
    cache = Cache()
    cache.give(cache.take(40 * MIB))
    parts = [cache.take(10 * MIB), cache.take(20 * MIB)]
    assert cache.reserved == 40 * MIB
    for part in parts:
        cache.give(part)
    cache.take(40 * MIB)
    assert cache.reserved == 40 * MIB


def allocated_mib(optimizer: str, slots: int) -> float:
    """4,096 in and out: 64 MiB of weights; 16,384 rows make the outputs much larger than these."""
    layer = Layer(kind="Linear", output=(16_384, 4_096), parameters=4_096 * 4_096)
    one = Described(layers=(layer,), batch=16_384, input=(16_384, 4_096), optimizer=optimizer, optimizer_slots=slots)
    return float(2 ** features(one).scalars[PLACE["allocated_mib"]] - 1)


def test_the_second_step_finds_the_optimizers_state() -> None:
    assert allocated_mib("Adam", 2) - allocated_mib("SGD", 0) > 2 * 64 - 1


def test_attention_between_linear_layers_keeps_what_it_was_given_and_gave() -> None:
    sizes = np.full(4, 1_000.0)
    columns = Columns(
        kinds=np.full(4, INDEX["linear"]),
        outputs=sizes,
        parameters=sizes,
        channels=np.full(4, 10.0),
        inplace=np.zeros(4, np.bool_),
        inputs=sizes,
        names=np.full(4, "Linear"),
    )
    found = find_unseen(columns, np.ones(4, np.bool_), batch=10)
    assert found.elements.tolist() == [1_000, 1_000, 1_000, 1_000]
    assert found.pairs.tolist() == [0, 0, 0, 1_000]  # 100 rows: ten of each of ten
    assert found.fans == {3: [2, 1, 0]}


def spans(*layers: tuple[str, int, int]) -> list[tuple[int, int, bool]]:
    """Kind, size and parameters of each layer."""
    sizes = np.array([size for _, size, _ in layers], np.float64)
    return spans_of(
        Columns(
            kinds=np.array([INDEX[kind] for kind, _, _ in layers]),
            outputs=sizes,
            parameters=np.array([weights for _, _, weights in layers], np.float64),
            channels=np.ones(len(layers)),
            inplace=np.zeros(len(layers), np.bool_),
            inputs=sizes,
            names=np.array([kind for kind, _, _ in layers]),
        )
    )


def test_blocks_that_repeat_themselves_are_computed_again_and_nothing_else() -> None:
    unit = (("convolution", 100, 9), ("batch_norm", 100, 2), ("rectifier", 100, 0))
    stem, head = (("convolution", 100, 3), *unit[1:]), (("linear", 10, 50),)
    assert spans(*stem, *unit, *unit, *unit, *head) == [
        (0, 3, False), (3, 6, True), (6, 9, True), (9, 12, True), (12, 13, False),
    ]  # fmt: skip
    assert spans(*stem, *unit, *head) == [(0, 7, False)]


def test_what_is_computed_again_is_not_held_meanwhile() -> None:
    """Eight blocks of two layers whose inputs are 64 MiB each."""
    block = (
        Layer(kind="Linear", output=(16_384, 1_024), parameters=1_024 * 1_024),
        Layer(kind="GELU", output=(16_384, 1_024)),
    )
    whole = Described(layers=block * 8, batch=16_384, input=(16_384, 1_024), optimizer="SGD", optimizer_slots=0)

    def allocated(one: Described) -> float:
        return float(2 ** features(one).scalars[PLACE["allocated_mib"]] - 1)

    spared = allocated(whole) - allocated(replace(whole, checkpointing=True))
    assert 6 * 64 < spared < 8 * 64  # of each block but the one at work, what GELU was given
