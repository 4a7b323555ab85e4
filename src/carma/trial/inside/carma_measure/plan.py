"""Which convolutions to measure, in which order. Pure: the same seed gives the same plan.

60 % are layers of common networks (``conv_layers.json``) at random batch sizes and resolutions, 10 % are transposed,
one-dimensional or volume convolutions of real networks, 30 % are random.

``conv_layers.json`` holds one layer a line: input channels, output channels, input size, kernel, stride, padding,
dilation, groups.
"""

from __future__ import annotations

import json
import math
import os
import random
from typing import Any, NamedTuple

Params = dict[str, Any]

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "conv_layers.json"), encoding="utf-8") as _file:
    LAYERS: dict[str, Any] = json.load(_file)
FAMILIES: dict[str, list[Any]] = LAYERS["families"]

SEED = 4
# Cases, each of which gives three rows. `mode`: deterministic ones, and as many benchmarked ones.
BROAD = {"convolution": 12_000, "mode": 500}
QUICK = {"convolution": 2_500, "mode": 60}

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Workers share one GPU, and libraries choose other algorithms when the GPU is full.
TENSOR_BYTES_MAX = 4 << 30
# Keeps a case well under a second on a GPU shared by a dozen workers.
FLOPS_MAX = 3e12
BATCHES = [1, 2, 4, 8, 10, 16, 20, 24, 32, 48, 64, 96, 100, 128, 192, 256, 384, 512]
BATCH_WEIGHTS = [2, 2, 2, 4, 1, 6, 1, 1, 8, 2, 8, 2, 1, 8, 1, 5, 1, 2]
PRECISIONS = [("fp32", True), ("fp32", False), ("bf16", True), ("fp16", True)]
PRECISION_WEIGHTS = [4, 3, 4, 2]
SCALES = [0.5, 0.57, 0.75, 1.0, 1.0, 1.0, 1.0, 1.14, 1.29, 1.5]


def out_size(params: Params) -> list[int]:
    """Spatial size of the output."""
    sides = []
    for axis, size in enumerate(params["size"]):
        kernel, stride = params["kernel"][axis], params["stride"][axis]
        padding, dilation = params["padding"][axis], params["dilation"][axis]
        if params["transposed"]:
            sides.append((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
        else:
            sides.append((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)
    return sides


def tensor_bytes(params: Params) -> int:
    """Bytes of input, output, weight and their gradients together."""
    item = ITEM_BYTES[params["dtype"]]
    moved = params["n"] * (
        params["cin"] * math.prod(params["size"]) + params["cout"] * math.prod(map(abs, out_size(params)))
    )
    weight = params["cin"] * params["cout"] // params["groups"] * math.prod(params["kernel"])
    return int(2 * item * (moved + weight))


def flops(params: Params) -> float:
    """Multiplications and additions of the forward direction."""
    sides = params["size"] if params["transposed"] else out_size(params)
    taps = params["cin"] * params["cout"] / params["groups"] * math.prod(params["kernel"])
    return float(2.0 * params["n"] * math.prod(sides) * taps)


def fit(params: Params) -> Params | None:
    """The case with a batch size within the limits, or None if the shape is impossible or too large."""
    if min(out_size(params)) < 1 or min(params["size"]) < 1:
        return None
    while tensor_bytes(params) > TENSOR_BYTES_MAX or flops(params) > FLOPS_MAX:
        if params["n"] == 1:
            return None
        params = {**params, "n": params["n"] // 2}
    return params


def conv(
    rng: random.Random,
    channels: tuple[int, int],
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: int = 1,
    groups: int = 1,
    transposed: bool = False,
    source: str = "random",
) -> Params | None:
    """A case of the given shape with a random batch size, precision and layout."""
    dtype, tf32 = rng.choices(PRECISIONS, PRECISION_WEIGHTS)[0]
    return fit(
        {
            "op": "convolution",
            "source": source,
            "n": rng.choices(BATCHES, BATCH_WEIGHTS)[0],
            "cin": channels[0],
            "cout": channels[1],
            "size": size,
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": [dilation] * len(size),
            "groups": groups,
            "transposed": transposed,
            "dtype": dtype,
            "tf32": tf32,
            "channels_last": len(size) > 1 and rng.random() < 0.35,
            "mode": "default",
        }
    )


def family_conv(rng: random.Random) -> Params | None:
    """A layer of a real network at a scaled resolution."""
    name = rng.choice(sorted(FAMILIES))
    return layer_conv(rng, FAMILIES[name], name)


def other_rank(rng: random.Random) -> Params | None:
    """A transposed, a one-dimensional or a volume convolution of a real network."""
    kind = rng.choice(["transposed", "transposed", "1d", "3d"])
    return layer_conv(rng, LAYERS[kind], kind)


def layer_conv(rng: random.Random, layers: list[Any], source: str) -> Params | None:
    """One of these layers; all but volumes are scaled."""
    cin, cout, size, kernel, stride, padding, dilation, groups = rng.choice(layers)
    if len(size) < 3:
        scale, least = rng.choice(SCALES), kernel[0] if len(size) == 1 else 1
        size = [max(least, round(side * scale)) for side in size]
    return conv(rng, (cin, cout), size, kernel, stride, padding, dilation, groups, source == "transposed", source)


def random_channels(rng: random.Random) -> int:
    """Log-uniform from 1 to 2048, mostly a multiple of something round."""
    step = rng.choice([1, 4, 8, 8, 16, 16, 32, 32])
    return max(1, round(math.exp(rng.uniform(0, math.log(2048))) / step)) * step


def random_conv(rng: random.Random) -> Params | None:
    """A random two-dimensional convolution."""
    cin, cout = random_channels(rng), random_channels(rng)
    kind = rng.choice(["plain", "plain", "plain", "grouped", "depthwise"])
    groups = 1
    if kind == "depthwise":
        cout = groups = cin
    elif kind == "grouped":
        groups = rng.choice([2, 3, 4, 6, 8, 16, 32, 64])
        cin, cout = (max(1, round(c / groups)) * groups for c in (cin, rng.choice([cin, cin, cout])))
    side = rng.choice([1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 7, 11])
    kernel = [side, side]
    if rng.random() < 0.1:
        kernel = [side, 1] if rng.random() < 0.5 else [1, side]
    height = max(1, round(math.exp(rng.uniform(0, math.log(512)))))
    width = height if rng.random() < 0.8 else max(1, round(height * rng.uniform(0.5, 2)))
    dilation = rng.choice([2, 3, 4, 6]) if side > 1 and rng.random() < 0.1 else 1
    padding = [dilation * (k // 2) for k in kernel] if rng.random() < 0.8 else [0, 0]
    stride = rng.choice([1, 1, 1, 1, 2, 2, 4])
    return conv(rng, (cin, cout), [height, width], kernel, [stride, stride], padding, dilation, groups)


def convolutions(rng: random.Random, count: int) -> list[Params]:
    """``count`` different cases."""
    cases: list[Params] = []
    seen = set()
    while len(cases) < count:
        draw = rng.choices([family_conv, other_rank, random_conv], [6, 1, 3])[0]
        case = draw(rng)
        key = repr(sorted((case or {}).items()))
        if case is None or key in seen:
            continue
        seen.add(key)
        cases.append(case)
    return cases


class MeasuringPlan(NamedTuple):
    """Cases in the order in which to measure them; ``apart`` would change the results of the others (see command)."""

    cases: list[Params]
    apart: list[Params]


def make_plan(broad: bool, seed: int = SEED) -> MeasuringPlan:
    """The plan, shuffled so that a run that stops early has measured a fair sample."""
    rng = random.Random(seed)
    counts = BROAD if broad else QUICK
    convs = convolutions(rng, counts["convolution"])
    modes = convolutions(rng, 2 * counts["mode"])
    cases = convs + [{**case, "mode": "deterministic"} for case in modes[::2]]
    rng.shuffle(cases)
    return MeasuringPlan(cases, [{**case, "mode": "benchmark"} for case in modes[1::2]])
