"""A convolution as cuDNN sees it, from a trial run's call or from a measured row, and its features for the trees.

A transposed convolution is the other direction of a plain one, and one dimension is run as two. Both are written that
way here, so that measurements of one serve the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2, prod
from typing import NamedTuple, cast

from carma.trial.report import Call

FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2
OPS = {"conv": FORWARD, "conv_input_grad": INPUT_GRAD, "conv_weight_grad": WEIGHT_GRAD}
DIRECTIONS = {"forward": FORWARD, "dgrad": INPUT_GRAD, "wgrad": WEIGHT_GRAD}
# How cuDNN may compute; fp64 counts as strict fp32 of twice the size.
STRICT_FP32, TF32, BF16, FP16 = 0, 1, 2, 3
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

    def with_two_dimensions(self) -> ConvShape:
        """A signal as an image of height 1."""
        if len(self.image) != 3:
            return self
        image, weight, output = ((*each[:2], 1, each[2]) for each in (self.image, self.weight, self.output))
        return self._replace(
            image=image,
            weight=weight,
            output=output,
            stride=(1, *self.stride),
            padding=(0, *self.padding),
            dilation=(1, *self.dilation),
        )


def of_call(call: Call) -> ConvShape | None:
    """None if it is no convolution, or one of a kind without measurements (complex numbers, integers)."""
    dtype = DTYPES.get(call.dtype)
    if call.op not in OPS or dtype is None or len(call.sizes) != 3:
        return None
    image, weight, output = call.sizes
    rank = len(image) - 2
    if rank < 1 or len(call.numbers) != 3 * rank + 1 or not prod(image) * prod(weight) * prod(output):
        return None
    flags = ("channels_last" in call.flags, "deterministic" in call.flags, "benchmark" in call.flags)
    window = (call.numbers[:rank], call.numbers[rank : 2 * rank], call.numbers[2 * rank : 3 * rank])
    precision = _precision(dtype, "tf32" in call.flags)
    return ConvShape(
        OPS[call.op], precision, ITEM_BYTES[dtype], *flags, image, weight, output, *window, call.numbers[-1]
    ).with_two_dimensions()


def of_row(row: Row) -> ConvShape | None:
    """The shape of a row that `inside/carma_measure` wrote; None if torch did not call cuDNN."""
    if row.get("op") != "convolution" or row.get("backend") not in CUDNN:
        return None
    n, cin, cout, groups = (cast(int, row[name]) for name in ("n", "cin", "cout", "groups"))
    size, kernel, stride, padding, dilation = (
        tuple(cast(Sequence[int], row[name])) for name in ("size", "kernel", "stride", "padding", "dilation")
    )
    direction, transposed, dtype = DIRECTIONS[str(row["direction"])], bool(row["transposed"]), str(row["dtype"])
    windows = zip(size, kernel, stride, padding, dilation, strict=True)
    sides = (_output_side(*each, transposed=transposed) for each in windows)
    image, output = (n, cin, *size), (n, cout, *sides)
    if transposed:
        image, output = output, image
        direction = {FORWARD: INPUT_GRAD, INPUT_GRAD: FORWARD}.get(direction, direction)
    weight = (output[1], image[1] // groups, *kernel)
    flags = (bool(row["channels_last"]), row["mode"] == "deterministic", row["mode"] == "benchmark")
    precision = _precision(dtype, bool(row["tf32"]))
    return ConvShape(
        direction, precision, ITEM_BYTES[dtype], *flags, image, weight, output, stride, padding, dilation, groups
    ).with_two_dimensions()


def scratch_bytes(row: Row) -> int:
    """Memory that the call of a measured row allocated beside its result."""
    return cast(int, row["peak_bytes"]) - max(0, cast(int, row["kept_bytes"]))


def tensor_bytes(shape: ConvShape) -> int:
    return shape.item_bytes * (prod(shape.image) + prod(shape.weight) + prod(shape.output))


def _precision(dtype: str, tf32: bool) -> int:
    return {"fp32": TF32 if tf32 else STRICT_FP32, "bf16": BF16, "fp16": FP16}.get(dtype, STRICT_FP32)


def _output_side(size: int, kernel: int, stride: int, padding: int, dilation: int, *, transposed: bool) -> int:
    reach = dilation * (kernel - 1) + 1
    if transposed:
        return (size - 1) * stride - 2 * padding + reach
    return (size + 2 * padding - reach) // stride + 1


def features(shape: ConvShape) -> tuple[float, ...]:
    """The columns of the trees. Only append: the shipped trees name a feature by its index.

    Logarithms, because thresholds were drawn at random when the trees were grown, and sizes span six decades.
    """
    return tuple(log2(1 + value) for value in (*_sizes(shape), *_alignments(shape)))


def _sizes(shape: ConvShape) -> tuple[float, ...]:
    c, k = shape.group_channels
    n, groups, high_wide = shape.image[0], shape.groups, (2, -1)
    pixels, out_pixels, taps = prod(shape.image[2:]), prod(shape.output[2:]), prod(shape.weight[2:])
    image, output, weight = n * groups * c * pixels, n * groups * k * out_pixels, groups * c * k * taps
    switches = (shape.direction, shape.precision, shape.channels_last, shape.deterministic, len(shape.stride))
    channels = (n, groups, c, k, c * groups, k * groups, _alignment(c), _alignment(k))
    sides = [sizes[place] for sizes in (shape.image, shape.output, shape.weight) for place in high_wide]
    keeps_size = 2 * shape.padding[0] >= shape.weight[2] - 1
    window = (taps, max(shape.stride), max(shape.dilation), max(shape.padding), keeps_size)
    products = (n * pixels, n * out_pixels, pixels, out_pixels, c * k, c * taps, k * taps, image, output, weight)
    shares = (n * out_pixels / (c * taps), c / k, n * out_pixels * groups / (c * k * taps), (image + output) / weight)
    tiles = (_tiles(n * out_pixels) * _tiles(k) * groups, _tiles(c * taps) * _tiles(k) * groups)
    return (*switches, *channels, *sides, *window, *products, output * c * taps, *shares, *tiles)


def _alignments(shape: ConvShape) -> tuple[int, ...]:
    """Tensor cores and wide loads need multiples; other tensors are copied first."""
    c, k = shape.group_channels
    counts = (prod(shape.image[2:]), prod(shape.output[2:]), c * shape.groups, k * shape.groups, shape.image[0])
    return (*map(_alignment, counts), min(c, k), shape.benchmark)


def _alignment(count: int) -> int:
    """The largest power of two up to 64 that divides it."""
    return count & -count if count % 64 else 64


def _tiles(value: int) -> int:
    return -(-value // 128)
