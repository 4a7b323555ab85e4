"""The catalogue of cards: who is meant by a name, as a driver gives it and as a user types it."""

from __future__ import annotations

import pytest

from carma.trial.cards import CARDS, DEFAULT, as_gpu, card_for, find_card, unknown_card


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe"),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),  # before drivers 450
        ("Tesla V100-PCIE-32GB", "Tesla V100-SXM2-32GB"),
        ("NVIDIA A10G", "NVIDIA A10G"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA L40S", "NVIDIA L40S"),
    ],
)
def test_a_drivers_name_is_one_of_the_models(given: str, name: str) -> None:
    card = card_for(given)
    assert card is not None
    assert card.name == name


@pytest.mark.parametrize("given", ["NVIDIA L40", "NVIDIA A1000", "Quadro RTX 6000", "Virtual GPU", "", "NVIDIA"])
def test_a_name_that_only_begins_alike_is_no_model(given: str) -> None:
    assert card_for(given) is None


@pytest.mark.parametrize(
    ("typed", "alias"),
    [("h200", "h200"), ("H200", "h200"), ("RTX 3090", "rtx3090"), ("4090", "rtx4090"), ("nvidia a30", "a30")],
)
def test_what_a_user_types(typed: str, alias: str) -> None:
    card = find_card(typed)
    assert card is not None
    assert card.alias == alias


def test_a_typed_name_counts_whole() -> None:
    assert find_card("h200 with more words") is None
    assert find_card("h") is None


def test_every_spelling_belongs_to_one_card() -> None:
    for card in CARDS:
        for spelled in card.names:
            assert find_card(spelled) is card
            assert card_for(spelled) is card


def test_figures_are_those_of_a_card() -> None:
    assert find_card(DEFAULT) is not None
    for card in CARDS:
        assert 8_000 < card.memory_mib < 200_000
        assert (7, 0) <= card.capability <= (12, 1)
        assert 40 <= card.multiprocessors <= 170


def test_an_unknown_name_names_the_nearest_and_lists_all() -> None:
    error = unknown_card("h20O")
    assert "'h20O'" in str(error)
    assert "Did you mean h200?" in error.hint
    assert all(card.alias in error.hint for card in CARDS)
    assert "Did you mean" not in unknown_card("banana").hint


def test_as_a_gpu_of_this_machine() -> None:
    card = find_card("l4")
    assert card is not None
    first, second = as_gpu(card), as_gpu(card, 1)
    assert (first.name, first.memory_mib, first.kind) == ("NVIDIA L4", card.memory_mib, "card")
    assert first.id != second.id
    assert second.index == 1
