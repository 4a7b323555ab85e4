"""What is drawn can be built and trained by `inside/build.py` and `inside/loop.py`, and the guess knows its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gpumemnet.dataset
from carma.trial.layers.description import Precision
from gpumemnet import FAMILIES, Family
from gpumemnet.dataset.config import Config, encode
from gpumemnet.dataset.program import Ops, act, branches, op
from gpumemnet.dataset.program_memory import RoughEstimate
from gpumemnet.dataset.ranges import Ranges, load_ranges
from gpumemnet_fixtures.dataset_rows import generated
from gpumemnet_fixtures.torch_programs import run_in_torch

pytest.importorskip("torch")

INSIDE = Path(gpumemnet.dataset.__file__).parent / "inside"
# Lines of configs in, lines of what was found out: the shape that comes out, weights, what autograd keeps.
BUILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import build, torch
for line in sys.stdin:
    config, kept = json.loads(line), {}
    model = build.build(config).train()
    own = {each.untyped_storage()._cdata for each in [*model.parameters(), *model.buffers()]}
    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        whole = torch.long if config.get("vocabulary") else torch.float
        inputs = [torch.empty(64, *config["input"], dtype=whole)]
        if config.get("target"):
            inputs.append(torch.empty(64, config["target"], dtype=torch.long))
        out = model(*inputs)
    found = {"out": list(out.shape[1:]), "weights": sum(each.numel() for each in model.parameters())}
    print(json.dumps({**found, "kept": sum(each.nbytes() for each in kept.values()) / 64}))
"""
TRAIN = """
import json, math, sys
sys.path.insert(0, sys.argv[1])
import loop, torch
torch.set_num_threads(1)
numbers = loop.random_numbers()
for line in sys.stdin:
    config = json.loads(line)
    training = loop.Training(config, "cpu", numbers)
    assert all(math.isfinite(training.step()) for _ in range(2)), config["id"]
    print(json.dumps(config["id"]))
"""
PARTS: dict[str, Ops] = {
    "nothing": [],
    "relu": [act("relu")],
    "relu in place": [act("relu", inplace=True)],
    "gelu": [act("gelu")],
    "silu in place": [act("silu", inplace=True)],
    "elu": [act("elu")],
    "elu in place": [act("elu", inplace=True)],
    "relu6 in place": [act("relu6", inplace=True)],
    "batch norm": [op("norm", f="batch"), act("relu", inplace=True)],
    "group norm": [op("norm", f="group", groups=4), act("tanh")],
    "max-pool": [op("pool", f="max", k=2)],
    "average": [op("pool", f="avg", k=2)],
    "upsample": [op("upsample", scale=2)],
    "deconv": [op("deconv", out=5, k=2, s=2)],
    "depthwise": [op("conv", k=7, groups=0), op("conv", out=16, k=1), act("gelu")],
    "residual": [branches("add", [], [op("norm", f="batch"), act("relu"), op("conv", out=8, k=3)]), act("relu")],
    "dense": [branches("cat", [], [op("conv", out=4, k=3), act("sigmoid")])],
    "excite": [branches("mul", [], [op("pool", f="avg", k=0), op("conv", out=8, k=1), act("sigmoid")])],
    "repeated": [op("block", body=[op("conv", out=12, k=3), op("norm", f="batch"), act("relu")], times=5)],
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16-amp")
SMALL = """
[common]
tries = 1
[mlp]
widths = [8, 64]
inputs = [4, 64]
outputs = [1, 50]
[cnn]
widths = [8, 12]
width_cap = 48
convolutions = [1, 20]
image = [16, 40]
usual_image = 0.0
signal_length = [100, 300]
volume_side = [16, 20]
classes = [2, 20]
pixel_classes = [2, 5]
flat_widths = [16, 32]
[transformer]
widths = [32, 128]
blocks = [1, 4]
sequence = [8, 40]
usual_sequence = 0.0
vocabulary = [100, 500]
usual_vocabulary = 0.0
image = [32, 48]
"""


def run(program: str, configs: list[Config]) -> list[Any]:
    lines = b"\n".join(encode(config) for config in configs)
    return [json.loads(line) for line in run_in_torch(program, str(INSIDE), given=lines).splitlines()]


def expected(config: Config) -> list[int]:
    match config.loss:
        case "tokens":
            return [config.target or config.input[0], config.outputs]
        case "pixels":
            return [config.outputs, *config.input[1:]]
    return [config.outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_can_be_built_and_the_guess_counts_its_weights(family: Family) -> None:
    ranges = load_ranges()
    configs = generated(family, 14, 11, ranges)
    for config, found in zip(configs, run(BUILD, configs), strict=True):
        assert found["out"] == expected(config), config.id
        assert RoughEstimate(config, ranges.common).sums.weights == pytest.approx(found["weights"], rel=0.01, abs=64), (
            config.id
        )


def test_the_guess_knows_what_the_backward_pass_keeps() -> None:
    """Part by part, in full precision. Attention and dropout are not here: they keep other things without a GPU."""
    common = load_ranges().common
    configs = [small_image(name, part) for name, part in PARTS.items()]
    for config, found in zip(configs, run(BUILD, configs), strict=True):
        sums = RoughEstimate(config, common).sums
        assert sums.saved - 12 * sums.end.elements == pytest.approx(found["kept"], rel=0.03), config.id


def small_image(name: str, part: Ops) -> Config:
    model = (op("conv", out=8, k=3), *part, op("conv", out=6, k=1), op("pool", f="avg", k=0), op("flatten"))
    return Config(id=name, family="cnn", shape="part", batch=2, input=(4, 24, 24), outputs=6, model=model)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_trains(family: Family, tmp_path: Path) -> None:
    """Small ones, of two samples, on the processor."""
    own = tmp_path / "small.toml"
    own.write_text(SMALL)
    ranges = load_ranges(own)
    shapes = getattr(ranges, family).shapes
    configs = [config for shape in shapes for config in generated(family, 3, 13, only(ranges, family, shape))]
    configs = [
        msgspec.structs.replace(config, batch=2, precision=PRECISIONS[number % len(PRECISIONS)])
        for number, config in enumerate(configs)
    ]
    assert {config.shape for config in configs} == set(shapes)
    assert run(TRAIN, configs) == [config.id for config in configs]


def only(ranges: Ranges, family: Family, shape: str) -> Ranges:
    section = msgspec.structs.replace(getattr(ranges, family), shapes={shape: 1.0})
    return msgspec.structs.replace(ranges, **{family: section})
