"""A convolution as cuDNN sees it, whether it comes from a trial run's call or from a measured row.

A transposed convolution is the other direction of a plain one, and one dimension is run as two; both are said that way
here, so that what was measured for one serves the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2, prod
from typing import NamedTuple, cast

from carma.trial.report import Call

FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2
OPS = {"conv": FORWARD, "conv_input_grad": INPUT_GRAD, "conv_weight_grad": WEIGHT_GRAD}
DIRECTIONS = {"forward": FORWARD, "dgrad": INPUT_GRAD, "wgrad": WEIGHT_GRAD}
STRICT_FP32, TF32, BF16, FP16 = 0, 1, 2, 3  # how cuDNN may compute; fp64 is taken for strict fp32 of twice the size
DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
CUDNN = ("Cudnn", "CudnnTranspose")

Row = Mapping[str, object]
Sizes = tuple[int, ...]


class ConvShape(NamedTuple):
    """Everything that cuDNN's choice can depend on. The sizes begin with the batch and the channels."""

    direction: int
    precision: int
    item_bytes: int
    channels_last: bool
    deterministic: bool
    benchmark: bool
    image: Sizes
    weight: Sizes
    output: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int

    @property
    def group_channels(self) -> tuple[int, int]:
        """Channels of the image and of the output in one group."""
        return self.weight[1], self.weight[0] // self.groups


def of_call(call: Call) -> ConvShape | None:
    """None where it is no convolution, or one of a kind that nobody measured (complex numbers, integers)."""
    dtype = DTYPES.get(call.dtype)
    if call.op not in OPS or dtype is None or len(call.sizes) != 3:
        return None
    image, weight, output = call.sizes
    rank = len(image) - 2
    if rank < 1 or len(call.numbers) != 3 * rank + 1 or not prod(image) * prod(weight) * prod(output):
        return None
    return _shape(
        direction=OPS[call.op],
        precision=_precision(dtype, "tf32" in call.flags),
        item_bytes=ITEM_BYTES[dtype],
        layout=("channels_last" in call.flags, "deterministic" in call.flags, "benchmark" in call.flags),
        sizes=(image, weight, output),
        window=(call.numbers[:rank], call.numbers[rank : 2 * rank], call.numbers[2 * rank : 3 * rank]),
        groups=call.numbers[-1],
    )


def of_row(row: Row) -> ConvShape | None:
    """Of a row that `inside/carma_measure` wrote; None where torch did not ask cuDNN."""
    if row.get("op") != "convolution" or row.get("backend") not in CUDNN:
        return None
    n, cin, cout, groups = (cast(int, row[name]) for name in ("n", "cin", "cout", "groups"))
    size, kernel, stride, padding, dilation = (
        tuple(cast(Sequence[int], row[name])) for name in ("size", "kernel", "stride", "padding", "dilation")
    )
    direction, transposed, dtype = DIRECTIONS[str(row["direction"])], bool(row["transposed"]), str(row["dtype"])
    windows = zip(size, kernel, stride, padding, dilation, strict=True)
    there = tuple(_side_after(*window, transposed=transposed) for window in windows)
    image, output = (n, cin, *size), (n, cout, *there)
    if transposed:
        image, output = output, image
        direction = {FORWARD: INPUT_GRAD, INPUT_GRAD: FORWARD}.get(direction, direction)
    return _shape(
        direction=direction,
        precision=_precision(dtype, bool(row["tf32"])),
        item_bytes=ITEM_BYTES[dtype],
        layout=(bool(row["channels_last"]), row["mode"] == "deterministic", row["mode"] == "benchmark"),
        sizes=(image, (output[1], image[1] // groups, *kernel), output),
        window=(stride, padding, dilation),
        groups=groups,
    )


def scratch_bytes(row: Row) -> int:
    """What the call of a measured row took beside its result."""
    return cast(int, row["peak_bytes"]) - max(0, cast(int, row["kept_bytes"]))


def _precision(dtype: str, tf32: bool) -> int:
    if dtype == "fp32":
        return TF32 if tf32 else STRICT_FP32
    return {"bf16": BF16, "fp16": FP16}.get(dtype, STRICT_FP32)


def _side_after(size: int, kernel: int, stride: int, padding: int, dilation: int, *, transposed: bool) -> int:
    reach = dilation * (kernel - 1) + 1
    if transposed:
        return (size - 1) * stride - 2 * padding + reach
    return (size + 2 * padding - reach) // stride + 1


def _shape(
    *,
    direction: int,
    precision: int,
    item_bytes: int,
    layout: tuple[bool, bool, bool],
    sizes: tuple[Sizes, Sizes, Sizes],
    window: tuple[Sizes, Sizes, Sizes],
    groups: int,
) -> ConvShape:
    image, weight, output = sizes
    stride, padding, dilation = window
    if len(image) == 3:
        image, weight, output = ((*each[:2], 1, each[2]) for each in sizes)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    return ConvShape(
        direction, precision, item_bytes, *layout, image, weight, output, stride, padding, dilation, groups
    )


def features(shape: ConvShape) -> tuple[float, ...]:
    """What the trees ask about. Only add at the end: trees that are shipped name a feature by its place.

    Logarithms, because thresholds were drawn at random when the trees were grown, and sizes span six decades.
    """
    return tuple(log2(1 + value) for value in (*_sizes(shape), *_alignments(shape)))


def _sizes(shape: ConvShape) -> tuple[float, ...]:
    c, k = shape.group_channels
    n, groups = shape.image[0], shape.groups
    pixels, out_pixels, taps = prod(shape.image[2:]), prod(shape.output[2:]), prod(shape.weight[2:])
    image, output, weight = n * groups * c * pixels, n * groups * k * out_pixels, groups * c * k * taps
    return (
        shape.direction,
        shape.precision,
        shape.channels_last,
        shape.deterministic,
        len(shape.stride),
        n,
        groups,
        c,
        k,
        c * groups,
        k * groups,
        _alignment(c),
        _alignment(k),
        shape.image[2],
        shape.image[-1],
        shape.output[2],
        shape.output[-1],
        shape.weight[2],
        shape.weight[-1],
        taps,
        max(shape.stride),
        max(shape.dilation),
        max(shape.padding),
        2 * shape.padding[0] >= shape.weight[2] - 1,
        n * pixels,
        n * out_pixels,
        pixels,
        out_pixels,
        c * k,
        c * taps,
        k * taps,
        image,
        output,
        weight,
        output * c * taps,
        n * out_pixels / (c * taps),
        c / k,
        n * out_pixels * groups / (c * k * taps),
        (image + output) / weight,
        _tiles(n * out_pixels) * _tiles(k) * groups,
        _tiles(c * taps) * _tiles(k) * groups,
    )


def _alignments(shape: ConvShape) -> tuple[int, ...]:
    """Tensor cores and wide loads want multiples; what cannot be loaded so is copied first."""
    c, k = shape.group_channels
    return (
        _alignment(prod(shape.image[2:])),
        _alignment(prod(shape.output[2:])),
        _alignment(c * shape.groups),
        _alignment(k * shape.groups),
        _alignment(shape.image[0]),
        min(c, k),
        shape.benchmark,
    )


def _alignment(count: int) -> int:
    """The largest power of two up to 64 that divides it."""
    return count & -count if count % 64 else 64


def _tiles(value: int) -> int:
    return -(-value // 128)
