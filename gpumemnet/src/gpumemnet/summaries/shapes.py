"""The output shape of a module, from its printed attributes (after torch.nn's documentation). Shapes are of one sample,
without the batch: channels first for images, (length, width) for sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import floor, prod
from typing import Any

from gpumemnet.summaries.module_parameters import NAMES_CACHED, Printed, by_name, integers, named

Shape = tuple[int, ...]
_CONVOLUTION = r"(?:Deform|(?:Scaled)?Std)?Conv[123]d(?:Same)?|Conv3D(?:Simple|NoTemporal)"
_TRANSPOSED = "ConvTranspose[123]d"
_BY_CHANNELS = r"(?:Sync|Frozen)?(?:BatchNorm|InstanceNorm)(?:[123]d)?\w*|(?:Layer|Rms|Simple)Norm(?:Act)?2d(?:Fp32)?"
_POOL = "(?:Max|Avg|LP)Pool[123]d(?:Same)?"
_WHOLE = r"(?:Global|Fast|SelectAdaptive)\w*Pool\w*|GeM\w*"  # of a whole image
_ADAPTIVE = "Adaptive(?:Max|Avg)Pool[123]d"
_PLACES = re.compile(
    r"(?:(?:Deform|(?:Scaled)?Std)?Conv|ConvTranspose|(?:Adaptive)?(?:Max|Avg|LP)Pool|BatchNorm(?:Act)?(?!1)"
    r"|InstanceNorm(?!1)|(?:Layer|Rms|Simple)Norm(?:Act)?)([123])d(?:Same|Fp32)?|Conv(3)D(?:Simple|NoTemporal)"
)
_ROW_NORMS = ".*(?:LayerNorm|RMSNorm|LayerNormFp32|LayerNormAct|RmsNorm|RmsNormFp32|SimpleNorm)"
_RECURRENT = "LSTM|GRU|RNN"

is_convolution = named(_CONVOLUTION)
is_whole_pool = named(_WHOLE)
is_pool = named(f"{_POOL}|{_ADAPTIVE}|{_WHOLE}")
keeps_channels = named(_POOL)
_channels_key = by_name({"GroupNorm1?(?:Act)?": "1", f"{_CONVOLUTION}|{_TRANSPOSED}|{_BY_CHANNELS}": "0"})
_features_key = by_name(
    {"Conv1D": "nx", "Bilinear": "in1_features", f"{_RECURRENT}|{_ROW_NORMS}": "0", r"\w*Linear": "in_features"}
)


@lru_cache(NAMES_CACHED)
def _sizes(text: str) -> Shape:
    return tuple(integers(text))


def taken(kind: str, printed: Printed) -> tuple[int | None, Shape | None]:
    """The first size of the module's input (channels), or its last sizes (features); None if any fit."""
    channels, features = _channels_key(kind), _features_key(kind)
    return (
        None if channels is None else _sizes(printed[channels])[0],
        None if features is None else _sizes(printed[features]),
    )


@lru_cache(NAMES_CACHED)
def places_of(kind: str) -> int | None:
    """The number of sizes of its input besides the channels (2 of an image); None if any fits."""
    found = _PLACES.fullmatch(kind)
    return int(found[1] or found[2]) if found else None


def changes_shape(kind: str) -> bool:
    return _rule(kind) is not None


class Last(tuple[int, ...]):
    """The shape of an image with channels last."""

    __slots__ = ()


def turned_first(shape: Shape) -> Shape:
    return (shape[-1], *shape[:-1]) if type(shape) is Last else shape


def has_channels(shape: Shape, channels: int, places: int | None) -> bool:
    return type(shape) is not Last and shape[0] == channels and (places is None or len(shape) == places + 1)


def steps_of(printed: Printed) -> int:
    """The largest stride that is printed."""
    return max(integers(printed.get("stride", "1")), default=1)


def show(shape: Shape) -> str:
    return "x".join(map(str, shape))


def made_of(kind: str, printed: Printed, shape: Shape) -> Shape:
    """The output. Raises KeyError, ValueError or IndexError if the attributes do not determine it."""
    rule = _rule(kind)
    return shape if rule is None else rule(printed, shape)


def _each(printed: Printed, name: str, count: int, default: str) -> Shape:
    """`(3, 3)`, `3` or `(3,)`: one for each size."""
    found = _sizes(printed.get(name, default))
    return found * count if len(found) == 1 else found[:count]


def _same(printed: Printed, shape: Shape) -> Shape:
    """Output size with padding so that only the stride counts, as in TensorFlow."""
    made = int(printed["1"]) if "1" in printed else shape[0]
    return (made, *_strided(printed, shape, printed.get("kernel_size", "1")))


def _blurred(printed: Printed, shape: Shape) -> Shape:
    """Output of a blur layer. Its stride is mostly not printed; it is 2 if it is used for downsampling."""
    return (shape[0], *_strided(printed, shape, "2"))


def _strided(printed: Printed, shape: Shape, default: str) -> Iterator[int]:
    return (-(-size // step) for size, step in _windows(printed, shape, stride=default))


def _whole(printed: Printed, shape: Shape) -> Shape:
    """One number for each channel, two if mean and maximum are concatenated."""
    channels = shape[0] * (2 if printed.get("pool_type", "").startswith("cat") else 1)
    is_flat = "Flatten" in printed.get("flatten", "") or printed.get("flatten") == "True"
    return (channels,) if is_flat else (channels, *(1 for _ in shape[1:]))


def _windows(printed: Printed, shape: Shape, **defaults: str) -> Iterator[tuple[Any, ...]]:
    """Each size of the image, with these attributes for it."""
    each = (_each(printed, name, len(shape) - 1, default) for name, default in defaults.items())
    return zip(shape[1:], *each, strict=True)


def _convolved(printed: Printed, shape: Shape) -> Shape:
    padding = printed.get("padding", "0").strip("'\"")
    if padding == "same":
        return (int(printed["1"]), *shape[1:])
    padded = {**printed, "padding": "0" if padding == "valid" else padding}
    windows = _windows(padded, shape, kernel_size="", stride="1", padding="0", dilation="1")
    sizes = (
        (size + 2 * around - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, around, dilation in windows
    )
    return (int(printed["1"]), *sizes)


def _transposed(printed: Printed, shape: Shape) -> Shape:
    windows = _windows(printed, shape, kernel_size="", stride="1", padding="0", output_padding="0", dilation="1")
    sizes = (
        (size - 1) * stride - 2 * around + dilation * (kernel - 1) + more + 1
        for size, kernel, stride, around, more, dilation in windows
    )
    return (int(printed["1"]), *sizes)


def _pooled(printed: Printed, shape: Shape) -> Shape:
    sides = printed.get("kernel_size", printed.get("1", ""))
    up = printed.get("ceil_mode") == "True"
    sizes = []
    windows = _windows(printed, shape, kernel_size=sides, stride=sides, padding="0", dilation="1")
    for size, kernel, stride, around, dilation in windows:
        room = size + 2 * around - dilation * (kernel - 1) - 1
        count = (-(-room // stride) if up else room // stride) + 1
        if up and (count - 1) * stride >= size + around:
            count -= 1  # a window must not begin beyond the input and its left padding
        sizes.append(count)
    return (shape[0], *sizes)


def _adapted(printed: Printed, shape: Shape) -> Shape:
    wanted = re.findall(r"\d+|None", printed["output_size"])
    wanted = wanted * (len(shape) - 1) if len(wanted) == 1 else wanted
    return (shape[0], *(size if want == "None" else int(want) for want, size in zip(wanted, shape[1:], strict=True)))


def _last(name: str) -> Callable[[Printed, Shape], Shape]:
    return lambda printed, shape: (*shape[:-1], int(printed[name]))


def _recurrent(printed: Printed, shape: Shape) -> Shape:
    width = int(printed.get("proj_size", "0")) or int(printed["1"])
    return (*shape[:-1], width * (2 if printed.get("bidirectional") == "True" else 1))


def _flattened(printed: Printed, shape: Shape) -> Shape:
    """The flattened shape. Dimensions are counted with the batch, as printed: `start_dim=1` is the first size of a
    sample."""
    start = max(int(printed.get("start_dim", "1")) - 1, 0)
    last = int(printed.get("end_dim", "-1"))
    end = len(shape) + last + 1 if last < 0 else last
    return (*shape[:start], prod(shape[start:end]), *shape[end:])


def _unflattened(printed: Printed, shape: Shape) -> Shape:
    place = int(printed.get("dim", "1")) - 1
    return (*shape[:place], *integers(printed["unflattened_size"]), *shape[place + 1 :])


def _upsampled(printed: Printed, shape: Shape) -> Shape:
    places = len(shape) - 1
    if printed.get("size", "None") != "None":
        return (shape[0], *_each(printed, "size", places, ""))
    factors = [float(number) for number in printed["scale_factor"].strip("()").split(",") if number.strip()]
    factors = factors * places if len(factors) == 1 else factors
    return (shape[0], *(floor(size * factor) for size, factor in zip(shape[1:], factors, strict=True)))


def _shuffled(printed: Printed, shape: Shape) -> Shape:
    factor = int(printed["upscale_factor"])
    return (shape[0] // factor**2, *(size * factor for size in shape[1:]))


def _padded(printed: Printed, shape: Shape) -> Shape:
    """The padded shape. Paddings begin with the last size, before and after: `(left, right, top, bottom)`."""
    around = integers(printed.get("padding") or printed["0"])
    around = around * 2 * (len(shape) - 1) if len(around) == 1 else around
    sizes = list(shape)
    for place in range(len(around) // 2):
        sizes[-1 - place] += around[2 * place] + around[2 * place + 1]
    return tuple(sizes)


def _halved(printed: Printed, shape: Shape) -> Shape:
    place = int(printed.get("dim", "-1"))
    place = place if place < 0 else place - 1
    sizes = list(shape)
    sizes[place] //= 2
    return tuple(sizes)


_rule = by_name(
    {
        r"\w*(Conv|Pool)2dSame": _same,
        _CONVOLUTION: _convolved,
        _TRANSPOSED: _transposed,
        _POOL: _pooled,
        _ADAPTIVE: _adapted,
        _WHOLE: _whole,
        r"BlurPool\w*": _blurred,
        "Conv1D": _last("nf"),
        r"\w*Linear|Bilinear": _last("out_features"),
        _RECURRENT: _recurrent,
        "Flatten": _flattened,
        "Unflatten": _unflattened,
        r"Upsampl\w*": _upsampled,
        "PixelShuffle": _shuffled,
        r"\w*Pad[123]d": _padded,
        "GLU": _halved,
    }
)
