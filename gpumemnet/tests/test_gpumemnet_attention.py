"""GPUMemNet's arithmetic: attention's scores, what its projections keep, and the gradients that come of it together."""

from __future__ import annotations

import pytest

from carma.trial.layers.description import Described, Layer
from gpumemnet.serving.features import features
from gpumemnet_fixtures.allocator_watch import Played, follow, layer, linear, mib, model, played

BATCH, QUERIES, KEYS, WIDTH, HEADS = 4, 128, 512, 1_024, 16
Q, KV = 2, 8  # MiB of 4 × 128 and of 4 × 512 words of width 1,024
PAIRS = 16  # MiB of 4 × 16 × 128 × 512 scores of 32 bits

CROSS = (
    linear(WIDTH, BATCH, QUERIES, WIDTH),
    linear(WIDTH, BATCH, KEYS, WIDTH),
    linear(WIDTH, BATCH, KEYS, WIDTH),
    linear(WIDTH, BATCH, QUERIES, WIDTH),
)
DROPOUT = layer("Dropout", BATCH, QUERIES, WIDTH)


def crossed(attention: str, *more: Layer, dtype: str = "float32", autocast: str = "") -> Described:
    """Queries look at keys of another length."""
    return model(*CROSS, *more, attention=attention, heads=HEADS, dtype=dtype, autocast=autocast)


def scores_kept(*more: Layer, dtype: str = "float32", autocast: str = "") -> float:
    eager, fused = (played(crossed(one, *more, dtype=dtype, autocast=autocast)) for one in ("eager", "sdpa"))
    return eager.kept - fused.kept


def test_scores_are_of_every_query_and_every_key() -> None:
    assert [mib(4 * pairs) for pairs in played(crossed("eager")).sizes.pairs] == [0, 0, 0, PAIRS]
    assert played(crossed("sdpa")).sizes.pairs == [0, 0, 0, 0]  # never written out


def test_the_softmax_of_the_scores_is_kept_in_32_bits() -> None:
    assert scores_kept() == PAIRS


@pytest.mark.parametrize("half", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}])
def test_in_half_precision_the_cast_copy_is_kept_too(half: dict[str, str]) -> None:
    assert scores_kept(**half) == PAIRS + PAIRS / 2


def test_dropout_keeps_what_it_gave_and_a_mask_of_bytes() -> None:
    assert scores_kept(DROPOUT) == PAIRS + PAIRS + PAIRS / 4


@pytest.mark.parametrize("half", [{"dtype": "float16"}, {"autocast": "float16"}])
def test_dropout_in_half_precision_replaces_the_kept_copy(half: dict[str, str]) -> None:
    assert scores_kept(DROPOUT, **half) == PAIRS + PAIRS / 2 + PAIRS / 4


@pytest.mark.parametrize("kind", ["Dropout", "Softmax"])
def test_modules_on_the_scores_are_counted_with_attention(kind: str) -> None:
    """The scores' own dropout tells no more than any other one would."""
    *before, last = CROSS
    inside = model(*before, layer(kind, BATCH, HEADS, QUERIES, KEYS), last, attention="eager", heads=HEADS)
    outside = model(*CROSS, *([DROPOUT] if kind == "Dropout" else []), attention="eager", heads=HEADS)
    mask = mib(BATCH * QUERIES * WIDTH) if kind == "Dropout" else 0.0  # of the other one; less than a MiB is not seen
    assert mask < 1
    assert played(inside).kept == played(outside).kept


def test_a_dropout_of_another_size_counts_for_itself() -> None:
    *before, last = CROSS
    wide = layer("Dropout", BATCH, QUERIES, 2 * HEADS * KEYS)
    found = played(model(*before, wide, last, attention="eager", heads=HEADS))
    assert found.sizes.is_view == [False] * 5
    assert mib(found.sizes.masks[3]) == 2 * PAIRS / 4


def test_forward_the_product_and_the_scaled_are_there_for_a_moment() -> None:
    events = played(crossed("eager")).events
    assert follow(events, PAIRS, PAIRS, -PAIRS, PAIRS, -PAIRS)  # the third is the softmax
    half = played(crossed("eager", dtype="bfloat16")).events
    narrow = PAIRS / 2
    assert follow(half, narrow, narrow, -narrow, PAIRS, -narrow, narrow)


def test_back_the_softmax_has_a_product_of_its_own() -> None:
    whole, narrow = PAIRS, PAIRS / 2
    assert follow(played(crossed("eager")).back, whole, whole, whole, -whole, -whole, whole, -whole, -whole)
    half = (narrow, whole, -narrow, whole, narrow, -whole, -whole, narrow, -narrow, -narrow)
    assert follow(played(crossed("eager", dtype="bfloat16")).back, *half)
    dropped = (narrow, narrow, -narrow, *half[1:])
    assert follow(played(crossed("eager", DROPOUT, dtype="bfloat16")).back, *dropped)


WORDS, WINDOW = (4, 512), "WindowAttention"
SELF = 64  # MiB of 4 × 16 × 512 × 512 scores
ONE = 8  # MiB of 4 × 512 words of width 1,024


def module(kind: str, attention: str = "sdpa", parameters: int = 4 * WIDTH * WIDTH) -> Played:
    one = layer(kind, *WORDS, WIDTH, parameters=parameters)
    return played(model(one, one, attention=attention, heads=HEADS))


def test_torchs_own_module_never_writes_its_scores_out() -> None:
    assert module("MultiheadAttention", "eager").events == module("MultiheadAttention").events
    assert module(WINDOW, "eager").kept == module(WINDOW).kept + 2 * SELF


def test_torchs_own_module_keeps_what_it_turned_round() -> None:
    assert module("MultiheadAttention").kept == module(WINDOW).kept + 2 * ONE


@pytest.mark.parametrize(
    ("kind", "told", "true"),
    [
        ("MultiheadAttention", 3 * WIDTH * WIDTH, 4 * WIDTH * WIDTH),
        ("MultiheadAttention", 3 * WIDTH * (WIDTH + 1), 4 * WIDTH * (WIDTH + 1)),
        ("MultiheadAttention", 4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH),
        (WINDOW, 3 * WIDTH * WIDTH, 3 * WIDTH * WIDTH),
    ],
)
def test_lists_that_leave_out_a_fourth_of_torchs_weights(kind: str, told: int, true: int) -> None:
    assert module(kind, parameters=told).weights == 2 * mib(4 * true)


def test_gradients_of_values_keys_and_queries_come_together() -> None:
    """Of what went into the last layer (`Q`), and then it is not needed any more."""
    found = played(crossed("sdpa"))
    assert found.sizes.fans == {3: [2, 1, 0]}
    assert follow(found.back, KV, KV, Q, -Q)


def test_gradients_of_the_same_words_are_added_up_in_the_first() -> None:
    """Values, then keys, then queries, each of which gives a gradient of what the norm gave."""
    projection, norm = linear(WIDTH, *WORDS, WIDTH), layer("LayerNorm", *WORDS, WIDTH, parameters=2 * WIDTH)
    weights = 4
    back = played(model(norm, projection, projection, projection, projection, attention="sdpa")).back
    fan = (ONE, ONE, ONE, -ONE)
    begin = next(place for place in range(len(back)) if back[place : place + 4] == fan) + 4
    values = (ONE, weights, -ONE, -ONE)  # its input's gradient, its weights'; what it was given and what it kept go
    assert back[begin : begin + 4] == values
    assert back[begin + 4 : begin + 9] == (*values, -ONE)  # keys: the sum is in the values' one


def fused_and_gated(*layers: Layer) -> Played:
    return played(model(*layers, input=(*WORDS, WIDTH)))


def test_the_gradient_of_a_fused_product_is_put_together_of_three() -> None:
    found = fused_and_gated(linear(WIDTH, *WORDS, 3 * WIDTH), linear(WIDTH, *WORDS, WIDTH))
    assert found.sizes.fans == {1: [0]}
    assert follow(found.back, ONE, ONE, ONE, 3 * ONE, -ONE, -ONE, -ONE, -ONE)


def test_both_sides_of_a_gate_have_a_gradient_at_once() -> None:
    """Four times as wide as the words are."""
    up, down = linear(WIDTH, *WORDS, 4 * WIDTH), linear(4 * WIDTH, *WORDS, WIDTH)
    found = fused_and_gated(up, up, down)
    assert found.sizes.fans == {2: [1, 0]}
    assert follow(found.back, 4 * ONE, 4 * ONE, -4 * ONE)


def test_a_gate_with_a_function_that_is_a_module_fans_too() -> None:
    up, down = linear(WIDTH, *WORDS, 2 * WIDTH), linear(2 * WIDTH, *WORDS, WIDTH)
    norm, function = layer("RMSNorm", *WORDS, WIDTH, parameters=WIDTH), layer("SiLU", *WORDS, 2 * WIDTH)
    found = fused_and_gated(norm, up, function, up, down)
    assert found.sizes.fans == {4: [3, 2]}
    assert follow(found.back, 2 * ONE, 2 * ONE, -2 * ONE)


def test_under_autocast_queries_keys_and_values_are_each_a_cast() -> None:
    """A norm gives 32 bits; all three make a narrow copy of it for themselves. Attention gives what is narrow."""
    projection, norm = linear(WIDTH, *WORDS, WIDTH), layer("LayerNorm", *WORDS, WIDTH, parameters=2 * WIDTH)
    layers = (norm, projection, projection, projection, projection)
    sizes = played(model(*layers, attention="sdpa", autocast="bfloat16")).sizes
    assert [mib(size) for size in sizes.copies] == [0, ONE / 2, ONE / 2, ONE / 2, 0]
    plain = played(model(*layers, attention="sdpa")).sizes
    assert plain.copies == [0] * 5


def test_heads_that_share_keys_have_copies_of_them() -> None:
    """Keys and values of a fourth of the width: what attention keeps is three of the queries' size, not one."""
    whole, part = linear(WIDTH, *WORDS, WIDTH), linear(WIDTH, *WORDS, WIDTH // 4)
    shared, apart = (played(model(whole, one, one, whole, attention="sdpa")) for one in (part, whole))
    assert shared.kept == apart.kept + 2 * ONE - 2 * (ONE - ONE / 4)


def test_a_dropout_that_drops_nothing_does_not_part_attention() -> None:
    nothing = Layer(kind="Dropout", output=(BATCH, QUERIES, WIDTH), attributes={"p": "0.0"})
    parted = model(*CROSS[:3], nothing, CROSS[3], attention="eager", heads=HEADS)
    assert [mib(4 * pairs) for pairs in played(parted).sizes.pairs] == [0, 0, 0, 0, PAIRS]


def test_the_gradient_of_the_keys_words_does_not_stand_in_for_the_queries() -> None:
    """They are of another length, so that both are there at the end."""
    found = played(crossed("sdpa"))
    assert found.left == pytest.approx(found.weights * (1 + found.sizes.slots), abs=1e-6)
    assert KV in found.back


def fused(wide: int, heads: int | None) -> Described:
    """Queries, keys and values in one projection, as GPT-2 has it (c_attn), and the layer behind attention."""
    rows = (2, 32, wide)
    norm, behind = layer("LayerNorm", *rows, parameters=2 * wide), layer("Linear", *rows, parameters=wide * wide)
    projection = layer("Linear", 2, 32, 3 * wide, parameters=3 * wide * wide)
    up = layer("Linear", 2, 32, 4 * wide, parameters=4 * wide * wide)
    down = layer("Linear", *rows, parameters=4 * wide * wide)
    blocks = (norm, projection, behind, norm, up, layer("GELU", 2, 32, 4 * wide), down) * 2
    return model(*blocks, norm, layer("Linear", 2, 32, 5_000, parameters=5_000 * wide), attention="eager", heads=heads)


@pytest.mark.parametrize(("wide", "heads"), [(768, 12), (256, 4), (64, 1)])
def test_unknown_heads_are_not_derived_from_the_fused_projection(wide: int, heads: int) -> None:
    """A GPT-2 was once taken to have 36."""
    untold, told, thrice = (features(fused(wide, each)).scalars.tolist() for each in (None, heads, 3 * heads))
    assert untold == told
    assert untold != thrice
