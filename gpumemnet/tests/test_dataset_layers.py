"""The layers and edges of a config's model are those that a trial run would see, and torch's own shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.dataset.layer_lists import LISTER
from gpumemnet_fixtures.dataset_rows import config, run_lister, write_configs
from gpumemnet_fixtures.torch_programs import run_in_torch

CONFIGS = [config("m", "mlp"), config("c", "cnn"), config("t", "transformer"), config("s", "seq2seq")]

# The trial's own hooks on the same model, which really computes here, and the list with torch's own shapes.
AGAIN = """
import json, sys
sys.path.insert(0, sys.argv[2])
import torch, build, layers, shapes
from carma_trial import describe, report
for line in open(sys.argv[1]):
    config = json.loads(line)
    made = build.build(config).train()
    owners = {}
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    model = made.to_empty(device="cpu")  # takes tied weights apart
    for (first, its), *others in owners.values():
        for module, name in others:
            setattr(module, name, getattr(first, its))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    inputs = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in layers.inputs_of(config)]
    report.facts.clear()
    describe.start()
    model(*inputs)
    print(json.dumps(report.facts["described"]))
shapes.SHAPE_RULES.clear()
for line in open(sys.argv[1]):
    print(layers.answer({**json.loads(line), "of": layers.rows.digest(line.encode())}).decode().strip())
"""


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layers")
    run_lister(write_configs(folder / "configs.jsonl", *CONFIGS), folder / "layers.jsonl")
    lines = [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]
    return {line["id"]: line for line in lines}


def _edges(said: dict[str, Any]) -> set[tuple[str, str]]:
    """By kind and place, as in `Linear0`."""
    names = [f"{layer['kind']}{place}" for place, layer in enumerate(said["layers"])]
    return {(names[source], names[target]) for source, target in said["edges"]}


def test_a_trial_run_lists_the_same_layers_and_torch_has_the_same_shapes(
    listed: dict[str, Any], tmp_path: Path
) -> None:
    file = write_configs(tmp_path / "configs.jsonl", *CONFIGS)
    said = run_in_torch(AGAIN, str(file), str(LISTER.parent)).splitlines()
    trials, plain = said[: len(CONFIGS)], said[len(CONFIGS) :]
    for one, trial in zip(CONFIGS, map(json.loads, trials), strict=True):
        seen = [layer for layer in trial["layers"] if layer["kind"] not in ("Chain", "Block")]
        assert [{**layer, "name": ""} for layer in seen] == [
            {"name": "", **layer} for layer in listed[one.id]["layers"]
        ]
        assert trial["parameters"] == listed[one.id]["parameters"]
    assert [json.loads(line) for line in plain] == [listed[one.id] for one in CONFIGS]


def test_an_edge_passes_operations_that_are_no_layers(listed: dict[str, Any]) -> None:
    assert _edges(listed["m"]) == {
        ("Linear0", "Linear1"),
        ("Linear1", "ReLU2"),
        ("ReLU2", "Linear3"),  # through the sum …
        ("Linear0", "Linear3"),  # … and around the branch
    }


def test_branches_that_are_joined_or_multiplied_both_lead_on(listed: dict[str, Any]) -> None:
    edges = _edges(listed["c"])
    kinds = [layer["kind"] for layer in listed["c"]["layers"]]
    assert kinds[:5] == ["Conv2d", "BatchNorm2d", "Conv2d", "Conv2d", "Sigmoid"]
    assert ("BatchNorm2d1", "Conv2d2") in edges  # the function between them is no module
    assert {("BatchNorm2d1", "Conv2d3"), ("Conv2d2", "Conv2d3")} <= edges  # joined
    assert {("BatchNorm2d1", "GroupNorm5"), ("Conv2d2", "GroupNorm5"), ("Sigmoid4", "GroupNorm5")} <= edges
    assert ("Conv2d3", "GroupNorm5") not in edges  # a layer lies between


def test_the_encoder_reaches_the_decoder_by_keys_and_values_only(listed: dict[str, Any]) -> None:
    kinds = [layer["kind"] for layer in listed["s"]["layers"]]
    assert kinds == ["Embedding", "MultiheadAttention", "Embedding", *["Linear"] * 5]
    into = {target for source, target in _edges(listed["s"]) if source == "MultiheadAttention1"}
    assert into == {"Linear4", "Linear5"}
    assert {source for source, target in _edges(listed["s"]) if target == "Linear6"} == {
        "Linear3",
        "Linear4",
        "Linear5",
    }


def test_shared_and_hidden_parameters_are_counted(listed: dict[str, Any]) -> None:
    for said in listed.values():
        own = sum(layer["parameters"] for layer in said["layers"])
        assert own == said["parameters"] + said["tied"] - said["inside"]
    assert listed["t"]["tied"] == 50 * 16
    assert listed["s"]["inside"] == 16 * 16 + 16  # the output projection of torch's attention
    assert (listed["m"]["tied"], listed["m"]["inside"]) == (0, 0)


def test_listed_layers_are_kept_and_changed_configs_are_listed_again(tmp_path: Path) -> None:
    configs, layers = tmp_path / "configs.jsonl", tmp_path / "layers.jsonl"
    run_lister(write_configs(configs, config("a"), config("b")), layers, processes=2)
    whole = layers.read_bytes().splitlines(keepends=True)
    kept, cut = sorted(whole, key=lambda line: json.loads(line)["id"])
    layers.write_bytes(kept + cut[:40])  # stopped in the middle of a line
    run_lister(write_configs(configs, config("a"), config("b")), layers)
    assert layers.read_bytes() == kept + cut
    run_lister(write_configs(configs, config("a", batch=9), config("b")), layers)
    added = layers.read_bytes().removeprefix(kept + cut)
    assert json.loads(added)["layers"][0]["output"] == [9, 32]


def test_a_config_that_cannot_be_built_is_a_line_with_its_error(tmp_path: Path) -> None:
    broken = config("a", model=[{"op": "nothing"}])
    run_lister(write_configs(tmp_path / "c.jsonl", broken), tmp_path / "l.jsonl")
    assert "there is no op 'nothing'" in json.loads((tmp_path / "l.jsonl").read_text())["error"]
