"""A learned model refuses networks outside of its training data."""

from __future__ import annotations

from dataclasses import replace as change

import numpy as np
import pytest
from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer
from carma.trial.layers.kinds import INDEX, KINDS
from gpumemnet.serving.features import FEATURES, PLACE, features
from gpumemnet.serving.limits import _CHARACTERISTIC, _NAMES, _SETTING, _WORDS, ALTERNATIVES, inside, offences, refusal
from gpumemnet_fixtures import gpumemnet_models as tiny

UNSEEN = "are not in its training data"


def said(described: Described, **changed: object) -> list[str]:
    return offences(features(described), tiny.facts(**changed))  # type: ignore[arg-type]


def log(size: float) -> float:
    return float(np.log2(1.0 + size))


def test_inside_the_ranges_there_is_no_offence() -> None:
    assert said(tiny.perceptron()) == []
    assert said(tiny.convolutions()) == []


def test_a_batch_beyond_is_named_with_its_range() -> None:
    ranges = tiny.facts().ranges | {"batch": (log(1), log(16_384))}
    found = said(tiny.perceptron(batch=65_536), ranges=ranges)
    assert found == ["the batch of 65,536 is outside its training data (1 to 16,384)"]


@pytest.mark.parametrize(("batch", "fits"), [(16_383, True), (16_384, False), (1, True)])
def test_there_is_no_margin(batch: int, fits: bool) -> None:
    assert (said(tiny.perceptron(batch=batch)) == []) is fits


def test_below_is_outside_too() -> None:
    ranges = tiny.facts().ranges | {"parameters": (log(10_000_000), log(100_000_000))}
    (found,) = said(tiny.perceptron(), ranges=ranges)
    assert found == "the number of parameters, 1.05 million, is outside its training data (10 million to 100 million)"


def test_nearly_equal_figures_are_printed_with_more_digits() -> None:
    ranges = tiny.facts().ranges | {"parameters": (log(1_000), log(1_049_000))}
    (found,) = said(tiny.perceptron(), ranges=ranges)
    assert found.startswith("the number of parameters, 1.0496 million, is outside")
    assert "1.049 million" in found


def together(**changed: str | int) -> list[str]:
    return said(replace(tiny.perceptron(), **changed), ways=("2+1 fp32", "2+1 bf16-amp", "0+0 fp32", "0+0 fp16-amp"))


def test_settings_that_occur_only_separately_are_refused_in_combination() -> None:
    assert together() == []
    assert together(autocast="bfloat16") == []
    assert together(optimizer="NAdam", autocast="bfloat16") == []  # it keeps and makes what Adam does
    assert together(optimizer="SGD", optimizer_slots=0, autocast="float16") == []
    assert together(autocast="float16") == [
        "an optimizer that keeps 2 tensors for each weight is in its training data with bf16-amp, fp32, but not with "
        "fp16-amp"
    ]
    (found,) = together(optimizer="RMSprop", optimizer_slots=1)
    assert found.startswith("an optimizer that keeps 1 tensors for each weight")
    assert found.endswith("is not in its training data")


def test_a_model_without_a_list_of_combinations_refuses_no_combination() -> None:
    assert said(tiny.perceptron(autocast="float16")) == []


@pytest.mark.parametrize(
    ("changed", "way"),
    [
        ({}, "2+1 fp32"),
        ({"autocast": "float16"}, "2+1 fp16-amp"),
        ({"dtype": "bfloat16"}, "2+1 bf16"),
        ({"optimizer": "SGD", "optimizer_slots": 1, "autocast": "bfloat16"}, "1+1 bf16-amp"),
        ({"dtype": "float64"}, "2+1 float64"),
    ],
)
def test_a_way_to_train_is_an_optimizer_and_a_number_format(changed: dict[str, object], way: str) -> None:
    assert features(replace(tiny.perceptron(), **changed)).way == way


def beyond(name: str, value: float) -> list[str]:
    """The offences of a network in which this feature alone has that value."""
    found = features(tiny.perceptron())
    scalars = found.scalars.copy()
    scalars[PLACE[name]] = value
    return offences(change(found, scalars=scalars), tiny.facts(kinds_seen=dict.fromkeys(KINDS, 1)))


def is_not_characteristic(name: str) -> bool:
    what, _, kind = name.partition("_")
    return what in ("count", "output") and kind not in _CHARACTERISTIC


def test_every_feature_has_words() -> None:
    """Each feature that is a size, beyond its range alone, has a phrase of its own."""
    for name in FEATURES:
        if name in _SETTING or name in ("cos_function", "sin_function") or is_not_characteristic(name):
            continue
        (found,) = beyond(name, 50.0)
        assert "is outside its training data" in found, name
        assert "_" not in found
    assert set(_NAMES) == set(KINDS)
    assert set(_WORDS) | set(_SETTING) <= set(FEATURES)


def test_the_number_of_dropouts_and_reshapes_is_not_limited() -> None:
    not_limited = [name for name in FEATURES if is_not_characteristic(name)]
    assert {"count_dropout", "output_shape", "output_inplace"} <= set(not_limited)
    for name in not_limited:
        assert beyond(name, 50.0) == [], name


def test_fewer_layers_of_a_kind_or_up_to_twice_as_many_are_accepted() -> None:
    ranges = tiny.facts().ranges | {"count_linear": (log(20), log(40)), "output_linear": (30.0, 40.0)}
    assert said(tiny.perceptron(depth=2), ranges=ranges) == []
    assert said(tiny.perceptron(depth=80), ranges=ranges) == []
    (found,) = said(tiny.perceptron(depth=90), ranges=ranges)
    assert found == "the number of linear layers, 90, is outside its training data (20 to 40)"


def test_in_a_transformer_the_memory_format_does_not_matter() -> None:
    layers = [Layer(kind="Linear", output=(2, 64, 64), parameters=64 * 64) for _ in range(4)]
    network = Described(layers=tuple(layers), batch=2, input=(2, 64, 64), channels_last=True)
    assert features(network).family == "transformer"
    assert said(network) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"channels_last": True}, "the memory format channels-last"),
        ({"autocast": "bfloat16"}, "autocast"),
        ({"dtype": "bfloat16"}, "weights in half precision"),
        ({"checkpointing": True}, "gradient checkpointing"),
        ({"attention": "eager"}, "attention whose scores are written out"),
    ],
)
def test_an_unknown_combination_of_optimizer_and_precision_is_refused(changed: dict[str, object], words: str) -> None:
    ranges = tiny.facts().ranges | dict.fromkeys(("amp", "half", "checkpointing", "eager"), (0.0, 0.0))
    assert said(replace(tiny.perceptron(), **changed), ranges=ranges) == [f"{words} is not in its training data"]


def test_an_optimizer_with_more_state_than_any_is_refused() -> None:
    (found,) = said(tiny.perceptron(optimizer_slots=3))
    assert found == "the optimizer's state, 3 tensors for each weight, is outside its training data (0 to 2)"


def test_an_optimizer_with_a_larger_step_than_any_is_refused() -> None:
    ranges = tiny.facts().ranges | {"temporaries": (0.0, 1.0)}
    assert said(tiny.perceptron(optimizer="Adam"), ranges=ranges) == []
    (found,) = said(tiny.perceptron(optimizer="Adagrad", optimizer_slots=1), ranges=ranges)
    assert found.startswith("the optimizer's room in a step, 2 tensors for each weight, is outside")


def with_attention(outputs: int) -> Described:
    base = tiny.perceptron()
    layer = Layer(kind="MultiheadAttention", output=(8, outputs), parameters=0)
    return replace(base, layers=(*base.layers, layer))


def test_an_unknown_kind_of_layer_may_only_be_a_small_part() -> None:
    assert said(with_attention(outputs=100)) == []  # of 2,148
    (found,) = said(with_attention(outputs=1024))
    assert found == f"attention layers (MultiheadAttention), 33 % of its outputs, {UNSEEN}"


def test_a_small_part_of_unknown_layers_is_accepted_in_a_small_network_too() -> None:
    base = tiny.perceptron(width=16)
    layer = Layer(kind="MultiheadAttention", output=(8, 1), parameters=0)  # 3 % of the outputs
    assert said(replace(base, layers=(*base.layers, layer))) == []


def test_unknown_layers_are_named_the_largest_first() -> None:
    """The phrase `other layers` would not help a user to find them."""
    strange = [Layer(kind=f"Strange{size}", output=(8, size)) for size in (120, 400, 200, 300)]
    network = tiny.perceptron()
    layers = (*network.layers, *strange, strange[0])
    (found,) = said(replace(network, layers=layers), kinds_seen={"linear": 10, "rectifier": 10})
    assert found.startswith("other layers (Strange400, Strange300, Strange120 and 1 more), ")


def test_weights_count_as_outputs_do() -> None:
    base = tiny.perceptron()
    layer = Layer(kind="MultiheadAttention", output=(8, 1), parameters=1024 * 1025)
    (found,) = said(replace(base, layers=(*base.layers, layer)))
    assert found == f"attention layers (MultiheadAttention), 50 % of its weights, {UNSEEN}"


def test_more_layers_than_in_any_training_run_are_refused() -> None:
    (found,) = said(tiny.perceptron(depth=301, width=8))
    assert found == "the number of layers, 602, is above the maximum of its training data, 600"


def test_a_refusal_names_three_reasons_and_the_number_of_the_others() -> None:
    assert refusal(["a"]) == f"a. {ALTERNATIVES}"
    assert refusal(["a", "b", "c"]) == f"a; b; c. {ALTERNATIVES}"
    assert refusal(["a", "b", "c", "d", "e"]) == f"a; b; c; and 2 more of that kind. {ALTERNATIVES}"


def test_an_accepted_value_above_the_range_is_clipped_to_it() -> None:
    found = features(tiny.perceptron(batch=25_000))
    moved = inside(found, tiny.facts())
    assert moved.scalars[PLACE["batch"]] == pytest.approx(14.0)
    assert found.scalars[PLACE["batch"]] > 14.0
    others = [place for name, place in PLACE.items() if name != "batch"]
    np.testing.assert_array_equal(moved.scalars[others], found.scalars[others])


def test_an_unknown_kind_is_replaced_by_another() -> None:
    found = features(with_attention(outputs=100))
    assert inside(found, tiny.facts()).kinds.tolist() == [INDEX["linear"], INDEX["rectifier"], INDEX["other"]]
    few = tiny.facts(kinds_seen={"linear": 9, "rectifier": 5})
    assert inside(found, few).kinds.tolist() == [INDEX["linear"], INDEX["rectifier"], INDEX["linear"]]


def test_unknown_views_are_neither_outputs_nor_inputs_of_the_model() -> None:
    plain = tiny.perceptron()
    wide = Layer(name="view", kind="Identity", output=plain.layers[0].output)
    with_views = replace(plain, layers=(plain.layers[0], *[wide] * 9, *plain.layers[1:]))
    assert said(with_views, kinds_seen={"linear": 9, "rectifier": 9}, most_layers=len(plain.layers)) == []
    facts = tiny.facts(kinds_seen={"linear": 9, "rectifier": 9})
    fed, wanted = inside(features(with_views), facts), inside(features(plain), facts)
    assert fed.kinds.tolist() == wanted.kinds.tolist()
    assert fed.tokens.shape == wanted.tokens.shape
