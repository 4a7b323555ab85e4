"""GPUMemNet's arithmetic: weights that layers share, and the weights and states that a step leaves."""

from __future__ import annotations

import pytest

from carma.trial.layers.description import Described, Layer
from gpumemnet_fixtures.allocator_watch import layer, linear, mib, model, played

WORDS, VOCABULARY, WIDTH = (2, 256), 8_192, 1_024
TABLE = VOCABULARY * WIDTH  # of weights: 32 MiB
TABLE_MIB = 32


def embedding() -> Layer:
    return layer("Embedding", *WORDS, WIDTH, parameters=TABLE)


def language(*layers: Layer, parameters: int | None = None) -> Described:
    return model(*layers, input=WORDS, parameters=parameters)


HEAD = linear(WIDTH, *WORDS, VOCABULARY)
BIASED = layer("Linear", *WORDS, VOCABULARY, parameters=TABLE + VOCABULARY)


def each(sizes: list[int]) -> list[float]:
    return [mib(size) for size in sizes]


def test_where_the_total_counts_the_weights_once_they_are_one_tensor() -> None:
    tied, apart = language(embedding(), HEAD, parameters=TABLE), language(embedding(), HEAD, parameters=2 * TABLE)
    assert each(played(tied).sizes.weights) == [TABLE_MIB, 0]
    assert each(played(apart).sizes.weights) == [TABLE_MIB, TABLE_MIB]
    assert each(played(language(embedding(), HEAD)).sizes.weights) == [
        TABLE_MIB,
        TABLE_MIB,
    ]  # the text contains no total


def test_a_bias_is_the_last_layers_own() -> None:
    sizes = played(language(embedding(), BIASED, parameters=TABLE + VOCABULARY)).sizes
    assert each(sizes.weights) == [TABLE_MIB, 0]


def test_a_total_that_lacks_less_than_the_table_shares_nothing() -> None:
    sizes = played(language(embedding(), HEAD, parameters=TABLE + 1)).sizes
    assert each(sizes.weights) == [TABLE_MIB, TABLE_MIB]


def test_only_an_embedding_is_shared() -> None:
    """Two linear layers of one size are two, whatever is missing from the total."""
    square = linear(WIDTH, *WORDS, WIDTH)
    sizes = played(language(square, square, parameters=WIDTH * WIDTH)).sizes
    assert sizes.weights[0] == sizes.weights[1] > 0


def test_another_size_is_another_tensor() -> None:
    positions = layer("Embedding", *WORDS, WIDTH, parameters=TABLE // 2)
    sizes = played(language(positions, HEAD, parameters=TABLE)).sizes
    assert each(sizes.weights) == [TABLE_MIB / 2, TABLE_MIB]


def test_gradients_are_summed_where_the_last_of_them_is() -> None:
    """The head's comes first and stays; the embedding's is added to it, and goes at once."""
    tied = played(language(embedding(), HEAD, parameters=TABLE))
    assert (each(tied.sizes.gradients), each(tied.sizes.passing)) == ([0, TABLE_MIB], [TABLE_MIB, 0])
    tables = [event for event in tied.back if abs(event) == TABLE_MIB]
    assert tables == [TABLE_MIB, TABLE_MIB, -TABLE_MIB, -TABLE_MIB]
    place = len(tied.back) - 1 - tied.back[::-1].index(TABLE_MIB)
    assert tied.back[place + 1] == -TABLE_MIB
    apart = played(language(embedding(), HEAD))
    assert apart.back[-2:] == (-TABLE_MIB, -TABLE_MIB)  # both are there until the optimizer has been


def test_an_encoder_a_decoder_and_a_head_share_one_table() -> None:
    sizes = played(language(embedding(), embedding(), HEAD, parameters=TABLE)).sizes
    assert each(sizes.weights) == [TABLE_MIB, 0, 0]
    assert each(sizes.gradients) == [0, 0, TABLE_MIB]
    assert each(sizes.passing) == [TABLE_MIB, TABLE_MIB, 0]


def test_of_three_two_share_where_the_total_lacks_one() -> None:
    sizes = played(language(embedding(), embedding(), HEAD, parameters=2 * TABLE)).sizes
    assert each(sizes.weights) == [TABLE_MIB, 0, TABLE_MIB]


@pytest.mark.parametrize(("optimizer", "slots"), [("SGD", 0), ("SGD", 1), ("Adam", 2)])
def test_the_optimizer_keeps_its_state_of_a_shared_tensor_once(optimizer: str, slots: int) -> None:
    described = language(embedding(), HEAD, parameters=TABLE)
    found = played(model(*described.layers, input=WORDS, parameters=TABLE, optimizer=optimizer, optimizer_slots=slots))
    assert found.left == (1 + slots) * TABLE_MIB


@pytest.mark.parametrize(("optimizer", "slots"), [("SGD", 0), ("Adam", 2)])
def test_two_steps_are_played_whatever_the_optimizer(optimizer: str, slots: int) -> None:
    """2 MiB go in, and nothing else is of that size: 8 MiB of weights, 16 that come out."""
    layers = linear(128, 4_096, 1_024)
    described = model(layers, input=(4_096, 128), optimizer=optimizer, optimizer_slots=slots)
    assert played(described).events.count(2.0) == 2
