"""The demand of a task that has never run, predicted from its description: what it keeps busy alone on a GPU.

1. A roofline with fitted constants (`shown`). A kernel takes as long as its arithmetic or its memory traffic, whichever
   is more; longer if its blocks do not fill the GPU; plus a start time. A step takes as long as the GPU works, or as
   the CPU needs to launch everything, whichever is more. Activity is GPU time over step time; SM activity weighs a
   kernel by the part of the GPU that it fills, occupancy by the warps of its kind, DRAM activity by the bytes that no
   cache holds, power by all of these.
2. `demand_of`: the expected figures, not cautious ones (docs/goodput.md says what caution would cost). A data loader
   that holds the GPU up is not included: such a task shows less, which is the safe side. There is no demand for
   recurrent layers, several networks, unknown kinds of layers and GPUs without rates.

The constants come from `python -m lab.tools.fit_demand`, which calls `shown` on all runs at once. They were fitted on
an H200; on another GPU kernels take longer in proportion to its peaks. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from carma.core.model.values import Demand, Record
from carma.trial.cards import Card, card_for
from carma.trial.demand.kernel_work import ATTENTION, CAST, CONVOLUTION, KERNELS, OPTIMIZER, StepWork, work_of
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import Described, bytes_each

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONSTANTS = Path(__file__).with_name("constants.json")
LEAST_KNOWN = 0.8  # least share of weights and of outputs that must be in layers of known kinds
Total = Callable[["NDArray[np.float64]"], "NDArray[np.float64]"]
FIGURES = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power")
# Classes of kernels by how they fill a GPU: products and attention, convolutions, all others.
_CLASS = np.array([0, 1, 1, 0, 2, 2, 2, 2, 2])
_CORNER = 4.0  # sharpness of the transition between two bounds


class DemandConstants(Record, frozen=True, kw_only=True):
    """All above 0. Lists with nine entries have one for each of KERNELS, lists with three one for each class."""

    efficiency: tuple[tuple[float, float, float], ...]  # of peak arithmetic: product … attention, by number format
    channels_last: float  # how much faster convolutions are with that memory format
    bandwidth: tuple[float, ...]  # share of the GPU's
    starting_s: tuple[float, ...]  # of each launch, on the GPU
    blocks: tuple[float, ...]  # actual blocks for each counted block
    slower: tuple[float, ...]  # exponent of the filled part
    narrower: tuple[float, ...]
    widest: tuple[float, ...]  # SM activity of a kernel that fills the GPU
    starts_wide: tuple[float, ...]  # and while it starts
    warps: tuple[float, ...]
    moved: tuple[float, ...]  # share of the counted bytes that no cache holds
    cached_bytes: float  # a kernel of this size has half of its bytes in the caches
    launch_s: float  # CPU time of each launch
    layer_s: float
    tensor_s: float
    optimizer_s: float
    cast_s: float
    step_s: float
    scaled_s: float
    copy_s: float  # of each byte copied from the host
    corner: float
    engine: float
    power: tuple[float, ...]  # at rest, of engine, SM and DRAM activity, of arithmetic in each number format


def shown(steps: StepWork, constants: DemandConstants, card: Card) -> dict[str, NDArray[np.float64]]:
    """FIGURES and `step_s` of each step, on a card with rates."""
    _, flops, size, _, _, _, count = steps.kernels.T
    kind, form, like = _kinds(steps)
    works, starts, filled = _kernel_s(steps, constants, card)

    def total(each: NDArray[np.float64]) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = np.add.reduceat(each, steps.begins)
        return summed

    gpu_s = total(works + starts)
    step_s = _either(gpu_s, _processor_s(steps, constants, total), constants.corner) + constants.step_s
    step_s = step_s + constants.scaled_s * steps.scaled + constants.copy_s * steps.copied_bytes
    wide = filled ** _of(constants.narrower, like) * _of(constants.widest, like)
    engine = _part(gpu_s / step_s * constants.engine)
    sm = np.minimum(engine, _part(total(works * wide + starts * _of(constants.starts_wide, like)) / step_s))
    passes = size * count * _of(constants.moved, kind) * size / (size + constants.cached_bytes)
    dram = _part(total(passes) / step_s / (card.dram_gbs * 1e9))
    work = [
        np.where((form == place) & (kind <= ATTENTION), flops * count, 0.0) for place in range(len(card.peaks_tflops))
    ]
    arithmetic = [total(each) / (peak * 1e12 * step_s) for each, peak in zip(work, card.peaks_tflops, strict=True)]
    return {
        "sm_active": sm,
        "sm_occupancy": _part(total(works * wide * _of(constants.warps, kind)) / step_s),
        "dram_active": dram,
        "gr_active": engine,
        "power": _power((engine, sm, dram, *arithmetic), constants, card),
        "step_s": step_s,
    }


def _kernel_s(steps: StepWork, constants: DemandConstants, card: Card) -> tuple[NDArray[np.float64], ...]:
    """Seconds of each kernel's work, seconds of its starts, and the part of the GPU that it fills."""
    _, flops, size, blocks, launches, _, count = steps.kernels.T
    kind, form, like = _kinds(steps)
    waves = blocks * _of(constants.blocks, like) / card.multiprocessors
    filled = np.maximum(waves / (1.0 + waves**_CORNER) ** (1.0 / _CORNER), 1e-4)
    table = np.ones((len(KERNELS), 3))
    table[: len(constants.efficiency)] = constants.efficiency
    efficiency = table[kind, form] * np.where(steps.channels_last & (kind == CONVOLUTION), constants.channels_last, 1.0)
    arithmetic = flops / ((np.array(card.peaks_tflops) * 1e12)[form] * efficiency)
    memory = size / (card.dram_gbs * 1e9 * _of(constants.bandwidth, kind))
    works = count * _either(arithmetic, memory, _CORNER) / filled ** _of(constants.slower, like)
    return works, count * launches * _of(constants.starting_s, like), filled


def _kinds(steps: StepWork) -> tuple[NDArray[np.int64], ...]:
    """Kind, number format and class of each kernel."""
    kind, form = steps.kernels[:, [0, 5]].T.astype(np.int64)
    return kind, form, _CLASS[kind]


def _power(parts: Sequence[NDArray[np.float64]], constants: DemandConstants, card: Card) -> NDArray[np.float64]:
    """Share of the power above idle. `parts`: engine, SM and DRAM activity, then arithmetic."""
    if card.power_curve is not None:
        of_sm, of_dram, sharpness = card.power_curve
        found: NDArray[np.float64] = 1.0 - np.exp(-((of_sm * parts[1] + of_dram * parts[2]) ** sharpness))
        return found
    rest, *weights = constants.power
    return _part(rest + np.tensordot(np.array(weights), np.array(parts), axes=1))


def _processor_s(steps: StepWork, constants: DemandConstants, total: Total) -> NDArray[np.float64]:
    kind, launches = steps.kernels[:, 0], steps.kernels[:, 4] * steps.kernels[:, 6]
    of_step = np.where(kind == OPTIMIZER, constants.optimizer_s, constants.launch_s)
    each = launches * (of_step + np.where(kind == CAST, constants.cast_s, 0.0))
    return total(each) + constants.layer_s * steps.layers + constants.tensor_s * steps.tensors


def _of(values: Sequence[float], places: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.array(values)[places]
    return found


def _either(one: NDArray[np.float64], other: NDArray[np.float64], corner: float) -> NDArray[np.float64]:
    """A smooth maximum: somewhat more than the larger value if both are close."""
    most = np.maximum(np.maximum(one, other), 1e-12)
    found: NDArray[np.float64] = most * ((one / most) ** corner + (other / most) ** corner) ** (1.0 / corner)
    return found


def _part(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Saturates at 1."""
    found: NDArray[np.float64] = value / (1.0 + value**12) ** (1.0 / 12)
    return found


def card_with_rates(gpu: str) -> Card | None:
    """The GPU of this driver's name; None for a GPU without rates or a MIG instance."""
    card = None if "mig" in gpu.lower().split() else card_for(gpu)
    return card if card is not None and card.peaks_tflops else None


@cache
def constants() -> DemandConstants:
    return msgspec.json.decode(CONSTANTS.read_bytes(), type=DemandConstants)


def demand_of(described: Described, gpu: str) -> Demand | None:
    """None if there is no prediction. Figures have two digits, which is their accuracy."""
    card = card_with_rates(gpu)
    if card is None or described.passes > 1 or bytes_each(described.dtype) not in (2, 4):
        return None
    try:
        work = work_of(described)
    except CannotTell:
        return None
    if work.known < LEAST_KNOWN:
        return None
    found = shown(work, constants(), card)
    return Demand(**{name: round(float(found[name][0]), 2) for name in FIGURES})
