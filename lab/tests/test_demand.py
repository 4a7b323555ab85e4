"""Demands that are predicted from layers: what must hold of them whatever was fitted, and that they ship as found."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates
from carma.trial.cards import CARDS
from carma.trial.demand.kernel_work import ATTENTION, COLUMNS, HALVES, OPTIMIZER, PRODUCT, TF32, work_of
from carma.trial.demand.prediction import (
    CONSTANTS,
    FIGURES,
    DemandConstants,
    card_with_rates,
    constants,
    demand_of,
    shown,
)
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import Described, Layer
from carma_lab.simulator import simulated_cards
from lab.tools import demand_tables, fit_demand

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "lab" / "results" / "gpumemnet" / "demand.json").read_text(encoding="utf-8"))
CARD = "NVIDIA H200"
KNOWN = {card.alias: card for card in CARDS}


def mlp(batch: int = 512, width: int = 2048, depth: int = 6, **changes: object) -> Described:
    layers: list[Layer] = []
    for _ in range(depth):
        shape = (batch, width)
        layers.append(Layer(kind="Linear", output=shape, parameters=width * (width + 1), inputs=(shape,)))
        layers.append(Layer(kind="ReLU", output=shape, inputs=(shape,)))
    made = Described(
        layers=tuple(layers),
        batch=batch,
        parameters=depth * width * (width + 1),
        input=(batch, width),
        optimizer="AdamW",
        optimizer_slots=2,
    )
    return replace(made, **changes)


def told(described: Described, gpu: str = CARD) -> Demand:
    found = demand_of(described, gpu)
    assert found is not None
    return found


def step_s(described: Described, card: str = "h200") -> float:
    return float(shown(work_of(described), constants(), KNOWN[card])["step_s"][0])


def kernels(described: Described, kind: int) -> list[dict[str, float]]:
    rows = work_of(described).kernels
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows.tolist() if row[0] == kind]


# -- what is counted --------------------------------------------------------------------------------------------------
def test_a_linear_layer_is_two_flops_for_each_weight_and_row_three_times_but_for_the_first_inputs_gradient() -> None:
    flops = sum(one["flops"] * one["count"] for one in kernels(mlp(batch=100, width=256, depth=3), PRODUCT))
    assert flops == pytest.approx(2 * 100 * 256 * 257 * (3 * 3 - 1))


def test_a_transposed_convolution_is_counted_at_its_inputs_places() -> None:
    plain = Layer(
        kind="ConvTranspose2d",
        output=(4, 8, 32, 32),
        parameters=16 * 8 * 4,
        inputs=((4, 16, 16, 16),),
        attributes={"in_channels": "16"},
    )
    first = Layer(kind="Conv2d", output=(4, 16, 16, 16), parameters=3 * 16 * 9, inputs=((4, 3, 16, 16),))
    made = Described(layers=(first, plain), batch=4, parameters=944, input=(4, 3, 16, 16))
    assert {row[1] for row in work_of(made).kernels.tolist()} >= {2.0 * 512 * 4 * 16 * 16, 2.0 * 432 * 4 * 16 * 16}


def test_checkpointing_adds_the_forward_pass_once_more() -> None:
    plain, again = mlp(), mlp(checkpointing=True)
    more = [sum(one["flops"] * one["count"] for one in kernels(each, PRODUCT)) for each in (plain, again)]
    assert more[1] - more[0] == pytest.approx(2 * 512 * 2048 * 2049 * 6)


def test_number_formats_decide_what_products_are_computed_in() -> None:
    assert {one["number"] for one in kernels(mlp(autocast="bfloat16"), PRODUCT)} == {HALVES}
    rows = work_of(mlp(), tf32=True).kernels
    assert set(rows[rows[:, 0] == PRODUCT][:, 5]) == {TF32}


def test_an_optimizer_with_more_state_goes_over_more() -> None:
    sizes = [kernels(mlp(optimizer=name, optimizer_slots=slots), OPTIMIZER)[0]["bytes"] for name, slots in (
        ("SGD", 0), ("SGD", 1), ("RMSprop", 1), ("AdamW", 2))]  # fmt: skip
    assert sizes == sorted(set(sizes))


def test_torchs_attention_has_scores_that_grow_with_the_square_of_the_length() -> None:
    def flops(length: int) -> float:
        shape = (2, length, 64)
        layer = Layer(kind="MultiheadAttention", output=shape, parameters=3 * 64 * 64, inputs=(shape,))
        made = Described(layers=(layer,), batch=2, parameters=4 * 64 * 64, input=shape, heads=2)
        return sum(one["flops"] * one["count"] for one in kernels(made, ATTENTION))

    assert flops(512) == pytest.approx(4 * flops(256))


def test_words_are_copied_as_whole_numbers() -> None:
    words = Described(layers=(Layer(kind="Embedding", output=(2, 8, 4)),), batch=2, input=(2, 8))
    assert (fit_demand.copied_bytes(words), fit_demand.copied_bytes(mlp(batch=2, width=4))) == (2 * 8 * 8, 2 * 4 * 4)


# -- what comes out ---------------------------------------------------------------------------------------------------
def test_shares_are_shares_and_sm_activity_is_never_above_the_engines() -> None:
    for batch in (1, 64, 4_096, 65_536):
        found = told(mlp(batch=batch))
        assert all(0.0 <= getattr(found, name) <= 1.0 for name in FIGURES)
        assert found.sm_active <= (found.gr_active or 0.0)


def test_a_larger_batch_keeps_more_busy_and_takes_longer() -> None:
    small, large = mlp(batch=8, width=256), mlp(batch=32_768, width=256)
    assert told(small).sm_active < told(large).sm_active
    assert (told(small).power or 0.0) < (told(large).power or 0.0)
    assert step_s(small) < step_s(large)


def test_a_slower_card_is_kept_busier_by_the_same_step() -> None:
    made = mlp(batch=512, width=1024)
    assert step_s(made, "a100-40gb") > step_s(made)
    assert (told(made, "NVIDIA A100-SXM4-40GB").gr_active or 0.0) > (told(made).gr_active or 0.0)


def test_an_a100_draws_by_the_simulators_curve() -> None:
    curve, found = simulated_cards.A100_40, told(mlp(batch=4096), "NVIDIA A100-SXM4-40GB")
    assert (curve.of_sm, curve.of_dram, curve.sharpness) == KNOWN["a100-40gb"].power_curve
    assert found.power == pytest.approx(curve.share(found.sm_active, found.dram_active), abs=0.02)


def test_half_precision_is_faster_where_arithmetic_is_what_takes_time() -> None:
    made = mlp(batch=16_384, width=4096)
    assert step_s(replace(made, dtype="bfloat16")) < 0.5 * step_s(made)


def test_one_at_a_time_and_many_at_once_are_the_same() -> None:
    every = [mlp(), mlp(batch=7), mlp(depth=2, autocast="float16"), mlp(channels_last=True)]
    together = shown(fit_demand.joined([work_of(one) for one in every]), constants(), KNOWN["h200"])
    for place, one in enumerate(every):
        alone = shown(work_of(one), constants(), KNOWN["h200"])
        assert all(alone[name][0] == pytest.approx(together[name][place]) for name in (*FIGURES, "step_s"))


# -- where nothing is told --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "made",
    [
        mlp(passes=2),
        mlp(dtype="float64"),
        replace(mlp(), batch=None),
        replace(mlp(), layers=(*mlp().layers, Layer(kind="LSTM", output=(512, 2048), parameters=9))),
        replace(mlp(), layers=(*mlp().layers, Layer(kind="Mystery", output=(512, 2048), parameters=2048**2 * 4))),
        replace(mlp(), layers=(Layer(kind="EmbeddingBag", output=(512, 2048), parameters=10**9), *mlp().layers)),
    ],
    ids=["networks", "format", "batch", "recurrent", "unknown", "bags"],
)
def test_outside_of_what_it_knows_it_tells_nothing(made: Described) -> None:
    assert demand_of(made, CARD) is None


@pytest.mark.parametrize("gpu", ["Virtual GPU 40 GiB", "Tesla V100-SXM2-16GB", "NVIDIA H200 MIG 1g.18gb", ""])
def test_cards_without_rates_and_mig_instances_have_no_prediction(gpu: str) -> None:
    assert card_with_rates(gpu) is None
    assert demand_of(mlp(), gpu) is None


def test_a_list_without_shapes_cannot_be_counted() -> None:
    with pytest.raises(CannotTell, match="shapes"):
        work_of(Described(layers=(Layer(kind="Linear", parameters=10),), batch=2))


# -- as it was found --------------------------------------------------------------------------------------------------
def test_constants_go_into_a_vector_and_back() -> None:
    again = fit_demand.shaped(fit_demand.flat(constants()))
    assert np.allclose(fit_demand.flat(again), fit_demand.flat(constants()))
    assert len(fit_demand.flat(constants())) == FOUND["constants"]
    assert msgspec.json.decode(CONSTANTS.read_bytes(), type=DemandConstants) == constants()


def test_models_that_people_use_are_off_by_as_much_as_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs, refused, _ = fit_demand.real()
    kept = FOUND["models_that_people_use"]
    assert sorted(refused) == sorted(kept["refused"])
    found = fit_demand.predicted(runs, constants(), copies=False)
    assert fit_demand.errors(runs, found) == kept["all"]
    assert fit_demand.ERRORS.read_text(encoding="utf-8") == fit_demand.errors_text(runs, found)


@pytest.mark.parametrize("part", ["shapes_left_out", "families_left_out"])
def test_it_is_far_better_than_a_guess_on_what_it_has_not_seen(part: str) -> None:
    for found in (FOUND[part], FOUND["models_that_people_use"]["all"]):
        errors = found["error"]
        assert all(errors["predicted"][name] < 0.6 * errors["by_size"][name] for name in FIGURES)
        assert found["pairs"]["predicted"]["error"] < 0.6 * found["pairs"]["mean"]["error"]


def test_the_pages_tables_are_those_of_the_file() -> None:
    text = (ROOT / demand_tables.PAGE).read_text(encoding="utf-8")
    assert demand_tables.with_tables(text, FOUND) == text, "make them again: python -m lab.tools.demand_tables"


def test_speeds_of_pairs_are_right_where_demands_are() -> None:
    truth = [Demand(0.5, 0.2, 0.2, 0.7, 0.5), Demand(0.9, 0.4, 0.3, 1.0, 0.8), Demand(0.1, 0.05, 0.02, 0.3, 0.1)]
    found = fit_demand.pairs(truth, {"same": truth, "idle": [Demand(0.0, 0.0, 0.0, 0.0, 0.0)] * 3})
    assert found["same"] == {"error": 0.0, "slowdown_above_by_a_tenth": 0.0}
    rates = np.array([progress_rates(pair) for pair in ((truth[0], truth[1]), (truth[0], truth[2]), truth[1:])])
    assert found["idle"]["error"] == pytest.approx(float(np.mean(1.0 - rates)), abs=1e-3)
