"""Estimators side by side on what they have not seen: by the kind of network, and why they refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_bench_memory_verbs import FOUND, Trials, truth_file

from carma.cli import main
from carma.core.model.values import NoEstimate
from carma.trial.layers.description import Described, Layer
from carma_lab.bench.memory import compare, published18
from carma_lab.bench.memory import comparison_file as written
from carma_lab.bench.memory.figures import Row, by_network, refusals
from carma_lab.bench.memory.queries import network_of
from gpumemnet_fixtures import gpumemnet_models as tiny


def row(estimator: str, estimated: float | None, **more: Any) -> Row:
    told: dict[str, Any] = {"case": "a.0", "family": "a", "took_s": 1.0, "measured_mib": 1000.0}
    return Row(**{**told, "estimator": estimator, "estimated_mib": estimated, **more})


def test_each_estimator_is_summed_up_for_each_kind_of_network() -> None:
    rows = [
        row("trace", 1000, network="cnn"),
        row("trace", 900, network="transformer"),
        row("gpumemnet", 1200, network="cnn"),
        row("gpumemnet", None, network="cnn", refused="no"),
        row("gpumemnet", 1000),
    ]
    found = {one.name: one for one in by_network(rows)}
    assert list(found) == ["cnn: trace", "cnn: gpumemnet", "transformer: trace"]
    assert (found["cnn: gpumemnet"].answered, found["cnn: gpumemnet"].refused) == (1, 1)
    assert found["cnn: gpumemnet"].error_median == pytest.approx(0.2)
    assert found["transformer: trace"].under_share == 1.0


def test_refusals_that_differ_in_their_numbers_are_of_one_kind() -> None:
    batch = "the batch of {} is outside its training data (1 to 16,384)"
    rows = [
        row("gpumemnet", None, family="b", refused=batch.format("65,536") + "; the input of 9 elements is outside"),
        row("gpumemnet", None, family="a", refused=batch.format("20,000")),
        row("gpumemnet", None, refused="no model of transformers has been learned"),
        row("horus", None, refused=batch.format("7")),
        row("horus", 1000),
    ]
    found = refusals(rows)
    assert [(one.estimator, one.runs, one.families) for one in found] == [
        ("gpumemnet", 2, ("a", "b")),
        ("gpumemnet", 1, ("a",)),
        ("horus", 1, ("a",)),
    ]
    assert found[0].reason.startswith("the batch of 65,536")


def test_a_network_is_of_the_kind_that_gpumemnet_takes_it_for() -> None:
    assert network_of(tiny.perceptron()) == "mlp"
    assert network_of(tiny.convolutions()) == "cnn"
    recurrent = Described(layers=(Layer(kind="LSTM", output=(4, 8, 16), parameters=100),), batch=4)
    assert network_of(recurrent) == ""
    assert network_of(NoEstimate(source="trace", reason="it stopped")) == ""


def test_the_comparison_has_networks_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    options = compare.Options(truth=truth_file(tmp_path), estimators=("trace", "horus"), out=str(out))
    assert compare.run(options, interpreter=FOUND, trials=Trials()) == 0
    found = written.read(out)
    assert [(one.name, one.cases) for one in found.networks] == [("mlp: trace", 2), ("mlp: horus", 2)]
    assert [(one.estimator, one.runs, one.families) for one in found.refusals] == [
        ("horus", 1, ("f1",)),
        ("trace", 1, ("f1",)),
    ]
    printed = capsys.readouterr().out
    assert "mlp: horus" in printed
    assert "horus, 1 run: it stopped with an error" in printed
    assert main(["bench", "estimators", "--redraw", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_all_our_estimators_stand_beside_the_published_ones() -> None:
    one = published18.PUBLISHED[0]
    near = row("gpumemnet", one.measured_mib + 100, case=one.run.id, measured_mib=one.measured_mib)
    found = published18.errors({}, {"gpumemnet": {one.run.id: near}})
    (ours,) = [off for off in found if off.name == "ours, gpumemnet" and off.against == "measured"]
    assert (ours.models, ours.mean_mib, ours.under) == (1, 100, 0)
    assert not any(off.name == "ours" for off in found)
