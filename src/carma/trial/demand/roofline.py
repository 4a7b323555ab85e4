"""How long a step's kernels take on a card, and what it shows meanwhile: a roofline with fitted constants.

A kernel takes as long as its arithmetic or its bytes, whichever is more, longer where its blocks do not fill the card,
and a little to get going. A step takes as long as the GPU or as the processor needs to launch everything, whichever is
more. Activity is that time over the step; SM activity counts a kernel by the part of the card that it fills, occupancy
by the warps of its kind, DRAM by the bytes that no cache catches, power by all of these.

Constants come from `python -m lab.tools.fit_demand`, which calls this very function on all runs at once. Pure
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carma.core.model.values import Record
from carma.trial.demand.card_rates import Rates
from carma.trial.demand.kernel_work import ATTENTION, CAST, CONVOLUTION, KERNELS, OPTIMIZER, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

Total = Callable[["NDArray[np.float64]"], "NDArray[np.float64]"]
FIGURES = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power")
# Kernels that fill a card alike: products and attention, convolutions, all the others.
_CLASS = np.array([0, 1, 1, 0, 2, 2, 2, 2, 2])
_CORNER = 4.0  # how sharp the corner between two bounds is


class Constants(Record, frozen=True, kw_only=True):
    """All above 0. Of lists with nine entries, one for each of KERNELS; with three, one for each class of them."""

    efficiency: tuple[tuple[float, float, float], ...]  # of peak arithmetic: product … attention, by number format
    channels_last: float  # how much faster convolutions are with that memory format
    bandwidth: tuple[float, ...]  # of the card's
    starting_s: tuple[float, ...]  # of each launch, on the GPU
    blocks: tuple[float, ...]  # how many there really are for each that is counted
    slower: tuple[float, ...]  # power of the part that is filled
    narrower: tuple[float, ...]
    widest: tuple[float, ...]  # SM activity of a kernel that fills the card
    starts_wide: tuple[float, ...]  # and while it gets going
    warps: tuple[float, ...]
    moved: tuple[float, ...]  # of the bytes that are counted, what passes the caches
    cached_bytes: float  # kernels of so many have half of it in the caches
    launch_s: float  # on the processor, each
    layer_s: float
    tensor_s: float
    optimizer_s: float
    cast_s: float
    step_s: float
    scaled_s: float
    copy_s: float  # for each byte that comes from the host
    corner: float
    engine: float
    power: tuple[float, ...]  # at rest, of engine, SM and DRAM activity, of arithmetic in each number format


@dataclass(frozen=True)
class Batch:
    """Works side by side. Those of work k are kernels from `begins[k]` on."""

    kernels: NDArray[np.float64]
    begins: NDArray[np.int64]
    layers: NDArray[np.float64]
    tensors: NDArray[np.float64]
    scaled: NDArray[np.float64]
    last: NDArray[np.bool_]  # of each kernel: whether channels are in the last place
    copied: NDArray[np.float64]


def batch_of(works: Sequence[Work], copied_bytes: Sequence[float] = ()) -> Batch:
    """`copied_bytes`: what each brings from the host; nothing where a loader does that meanwhile."""
    counts = [len(work.kernels) for work in works]
    return Batch(
        kernels=np.concatenate([work.kernels for work in works]),
        begins=np.cumsum([0, *counts[:-1]]),
        layers=np.array([work.layers for work in works], np.float64),
        tensors=np.array([work.tensors for work in works], np.float64),
        scaled=np.array([work.scaled for work in works], np.float64),
        last=np.repeat([work.channels_last for work in works], counts),
        copied=np.array(copied_bytes or [0.0] * len(works), np.float64),
    )


def shown(batch: Batch, constants: Constants, card: Rates) -> dict[str, NDArray[np.float64]]:
    """Of each work FIGURES, and `step_s`."""
    kernel, flops, size, blocks, launches, number, count = batch.kernels.T
    kind, form = kernel.astype(np.int64), number.astype(np.int64)
    like = _CLASS[kind]
    peaks = np.array(card.peaks) * 1e12
    bandwidth = card.dram_gbs * 1e9
    waves = blocks * _of(constants.blocks, like) / card.sms
    filled = np.maximum(waves / (1.0 + waves**_CORNER) ** (1.0 / _CORNER), 1e-4)
    table = np.ones((len(KERNELS), 3))
    table[: len(constants.efficiency)] = constants.efficiency
    efficiency = table[kind, form] * np.where(batch.last & (kind == CONVOLUTION), constants.channels_last, 1.0)
    slow = filled ** _of(constants.slower, like)
    works = count * _either(
        flops / (peaks[form] * efficiency), size / (bandwidth * _of(constants.bandwidth, kind)), _CORNER
    ) / slow  # fmt: skip
    starts = count * launches * _of(constants.starting_s, like)

    def total(each: NDArray[np.float64]) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = np.add.reduceat(each, batch.begins)
        return summed

    gpu_s = total(works + starts)
    step_s = _either(gpu_s, _processor_s(batch, constants, total), constants.corner) + constants.step_s
    step_s = step_s + constants.scaled_s * batch.scaled + constants.copy_s * batch.copied
    wide = filled ** _of(constants.narrower, like) * _of(constants.widest, like)
    engine = _part(gpu_s / step_s * constants.engine)
    sm = _part(total(works * wide + starts * _of(constants.starts_wide, like)) / step_s)
    passes = size * count * _of(constants.moved, kind) * size / (size + constants.cached_bytes)
    dram = _part(total(passes) / step_s / bandwidth)
    arithmetic = [
        total(np.where((form == place) & (kind <= ATTENTION), flops * count, 0.0)) / (peak * step_s)
        for place, peak in enumerate(peaks)
    ]
    sm = np.minimum(sm, engine)
    return {
        "sm_active": sm,
        "sm_occupancy": _part(total(works * wide * _of(constants.warps, kind)) / step_s),
        "dram_active": dram,
        "gr_active": engine,
        "power": _power((engine, sm, dram, *arithmetic), constants, card),
        "step_s": step_s,
    }


def _power(parts: Sequence[NDArray[np.float64]], constants: Constants, card: Rates) -> NDArray[np.float64]:
    """Of what the card can draw above idle. `parts`: engine, SM and DRAM activity, then arithmetic."""
    if card.curve is not None:
        of_sm, of_dram, sharpness = card.curve
        found: NDArray[np.float64] = 1.0 - np.exp(-((of_sm * parts[1] + of_dram * parts[2]) ** sharpness))
        return found
    rest, *weights = constants.power
    return _part(rest + np.tensordot(np.array(weights), np.array(parts), axes=1))


def _processor_s(batch: Batch, constants: Constants, total: Total) -> NDArray[np.float64]:
    kind, launches = batch.kernels[:, 0], batch.kernels[:, 4] * batch.kernels[:, 6]
    of_step = np.where(kind == OPTIMIZER, constants.optimizer_s, constants.launch_s)
    each = launches * (of_step + np.where(kind == CAST, constants.cast_s, 0.0))
    return total(each) + constants.layer_s * batch.layers + constants.tensor_s * batch.tensors


def _of(values: Sequence[float], places: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.array(values)[places]
    return found


def _either(one: NDArray[np.float64], other: NDArray[np.float64], corner: float) -> NDArray[np.float64]:
    """The larger of the two, and somewhat more where they are near."""
    most = np.maximum(np.maximum(one, other), 1e-12)
    found: NDArray[np.float64] = most * ((one / most) ** corner + (other / most) ** corner) ** (1.0 / corner)
    return found


def _part(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Into 0 to 1, levelling off."""
    found: NDArray[np.float64] = value / (1.0 + value**12) ** (1.0 / 12)
    return found
