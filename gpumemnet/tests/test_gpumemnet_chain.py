"""The small caching allocator, held against the whole one; and two training steps played through it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from carma.trial.layers.columns import Columns
from carma.trial.layers.description import Described, Layer
from carma.trial.layers.functions import find_unseen
from carma.trial.layers.kinds import INDEX
from carma.trial.replay.allocator import CachingAllocator
from carma.trial.replay.allocator_options import AllocatorOptions
from gpumemnet.serving.caching_allocator import MIB, Block, Cache
from gpumemnet.serving.features import PLACE, features
from gpumemnet.serving.repeated_layers import spans_of
from gpumemnet_fixtures.allocator_watch import layer, linear, model, played


def take(cache: Cache, size: int) -> Block:
    taken: list[Block] = []
    cache.play([size], taken)
    return taken[0]


def give(cache: Cache, block: Block) -> None:
    cache.play([~0], [block])


@pytest.mark.parametrize("least", [MIB, 2 * MIB, 7 * MIB, 30 * MIB])
@pytest.mark.parametrize("seed", range(6))
def test_large_tensors_reserve_what_torch_would(seed: int, least: int) -> None:
    """Whether it knows how small they may be or not."""
    dice, whole = random.Random(seed), CachingAllocator(AllocatorOptions())
    ones = Cache(least), Cache()
    alive: dict[int, list[Block]] = {}
    for number in range(400):
        if alive and dice.random() < 0.45:
            chosen = dice.choice(sorted(alive))
            for cache, block in zip(ones, alive.pop(chosen), strict=True):
                give(cache, block)
            whole.free(chosen)
        else:
            size = 512 * dice.randrange(max(2 * MIB, least) // 512, 60 * MIB // 512)
            alive[number] = [take(cache, size) for cache in ones]
            whole.malloc(number, size)
        for cache in ones:
            assert (cache.reserved, cache.allocated, cache.peak) == (
                whole.reserved,
                whole.allocated,
                whole.peak_allocated,
            )


def test_a_part_of_a_block_is_used_and_joined_again() -> None:
    cache = Cache()
    give(cache, take(cache, 40 * MIB))
    parts = [take(cache, 10 * MIB), take(cache, 20 * MIB)]
    assert cache.reserved == 40 * MIB
    for part in parts:
        give(cache, part)
    take(cache, 40 * MIB)
    assert cache.reserved == 40 * MIB


def allocated_mib(described: Described) -> float:
    """The most, as the features tell it."""
    return float(2 ** features(described).scalars[PLACE["allocated_mib"]].astype(float) - 1)


def test_the_second_step_finds_the_optimizers_state() -> None:
    """4,096 in and out: 64 MiB of weights; 16,384 rows make the outputs much larger than these."""
    square = linear(4_096, 16_384, 4_096)
    adam, sgd = (model(square, optimizer=name, optimizer_slots=slots) for name, slots in (("Adam", 2), ("SGD", 0)))
    assert allocated_mib(adam) - allocated_mib(sgd) == pytest.approx(2 * 64, abs=0.1)


def test_most_is_allocated_where_the_passes_meet() -> None:
    """In the second step. 64 MiB of weights; 256 of each tensor: what went in, the output, three of the loss. The first
    workspace of 33 has a segment of 34 to itself, the other one is cut from what the loss left."""
    assert allocated_mib(model(linear(4_096, 16_384, 4_096))) == pytest.approx(64 + 5 * 256 + 34 + 33, abs=0.1)


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
    """Eight blocks of two layers whose inputs are 64 MiB each. Both ways most is there beside the loss, where no block
    is at work: of each block what its function was given is spared."""
    block = (linear(1_024, 16_384, 1_024), layer("GELU", 16_384, 1_024))
    plain, again = (played(model(*block * 8, checkpointing=one)) for one in (False, True))
    assert plain.kept == 64 * (1 + 2 * 8 + 1)  # what went in, two of each block, the gradient of the last
    assert again.kept == 64 * (1 + 8 + 1)
    assert allocated_mib(model(*block * 8)) - allocated_mib(model(*block * 8, checkpointing=True)) == pytest.approx(
        8 * 64, abs=0.01
    )


def test_a_block_is_computed_again_where_its_gradient_comes() -> None:
    """Of the last of two: what its first layer gave, and its output, which is not needed. Then what its first layer
    gave is used and goes."""
    block = (linear(1_024, 16_384, 1_024), layer("GELU", 16_384, 1_024))
    back = played(model(*block * 2, checkpointing=True)).back
    gradient_of_function, weights = 64, 4
    assert back[:3] == (64, 64, -64)
    assert back[3:6] == (gradient_of_function, -64, -64)
    assert back[6:10] == (64, weights, -gradient_of_function, -64)  # and what went into the block


KINDS_OF_WORDS = (
    "Linear",
    "Linear",
    "LayerNorm",
    "GELU",
    "Dropout",
    "Softmax",
    "MultiheadAttention",
    "Flatten",
    "Weird",
)
KINDS_OF_IMAGES = (
    "Conv2d", "Conv2d", "BatchNorm2d", "InstanceNorm2d", "ReLU", "SiLU", "Softsign", "MaxPool2d", "AvgPool2d",
    "Upsample", "ConvTranspose2d", "Identity",
)  # fmt: skip
WEIGHED = ("Linear", "Conv2d", "ConvTranspose2d", "MultiheadAttention")


@some.composite
def networks(draw: some.DrawFn) -> tuple[Layer, ...]:
    """Any layers in any order; sizes that meet and do not meet; parts that repeat themselves."""
    is_words = draw(some.booleans())
    kinds = some.sampled_from(KINDS_OF_WORDS if is_words else KINDS_OF_IMAGES)
    wide, side, layers = 256, 32, list[Layer]()
    for kind in draw(some.lists(kinds, min_size=1, max_size=12)):
        into, out = (draw(some.sampled_from((wide, wide, 256, 512, 768))) for _ in range(2))
        is_weighed = kind in WEIGHED
        wide = out if is_weighed else wide
        side = {"MaxPool2d": max(16, side // 2), "AvgPool2d": max(16, side // 2), "Upsample": min(64, side * 2)}.get(
            kind, side
        )
        shape = (8, 1_024, wide) if is_words else (8, wide, side, side)
        weights = into * out if is_weighed else 2 * wide * ("Norm" in kind)
        layers.append(layer(kind, *shape, parameters=weights, inplace=draw(some.booleans())))
    return tuple(layers) * draw(some.integers(1, 3))


ways = some.fixed_dictionaries(
    {
        "autocast": some.sampled_from(("", "bfloat16")),
        "dtype": some.sampled_from(("float32", "bfloat16")),
        "attention": some.sampled_from(("sdpa", "eager")),
        "optimizer": some.sampled_from(("SGD", "Adam")),
        "optimizer_slots": some.sampled_from((0, 1, 2)),
        "heads": some.just(8),
    }
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(networks(), ways, some.booleans())
def test_after_the_steps_only_weights_and_states_are_left(
    layers: tuple[Layer, ...], way: dict[str, object], checkpointing: bool
) -> None:
    """Nor does anything go twice."""
    found = played(model(*layers, **way, checkpointing=checkpointing))
    assert found.left == pytest.approx(found.weights * (1 + found.sizes.slots), abs=1e-6)


def test_transformers_that_are_computed_again_under_autocast_leave_nothing() -> None:
    norm, square = layer("LayerNorm", 8, 1_024, 512, parameters=1_024), linear(512, 8, 1_024, 512)
    block = (norm, square, square, square, square, norm, linear(512, 8, 1_024, 2_048), linear(2_048, 8, 1_024, 512))
    found = played(model(*block * 3, checkpointing=True, autocast="bfloat16", attention="eager", heads=8))
    assert [again for _, _, again in found.sizes.spans] == [True] * 3
    assert found.left == pytest.approx(found.weights, abs=1e-6)


def test_joined_tensors_of_a_recomputed_block_are_freed() -> None:
    block = (layer("LayerNorm", 8, 1_024, 256, parameters=512), linear(512, 8, 1_024, 256))
    found = played(model(*block * 3, checkpointing=True, autocast="bfloat16"))
    assert found.left == pytest.approx(found.weights * (1 + found.sizes.slots), abs=1e-6)
