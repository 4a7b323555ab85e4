"""Two training steps of a chain of layers, played through the model of torch's caching allocator.

What an allocator reserves beyond what is allocated depends on the order and the sizes of what comes and goes. For the
few dozen layers of an MLP that takes a millisecond or two, and says it nearly to the segment. Convolutions need
workspaces that no summary tells, and deep models take too long here: for these the arithmetic of `timeline` must do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from carma.estimate.described import Described
from carma.estimate.gpumemnet.columns import Columns
from carma.estimate.gpumemnet.kinds import INDEX
from carma.estimate.gpumemnet.timeline import (
    CAST,
    HALF,
    IS_VIEW,
    KEEPS_OUTPUT,
    MASK_BYTES,
    element_bytes,
    is_before,
    slots_of,
    takes_input,
    temporaries_of,
)
from carma.estimate.trace.allocator import CachingAllocator
from carma.estimate.trace.allocator_options import AllocatorOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIB = 1 << 20
STEPS = 2  # the optimizer's state comes with the first, and the second shows the peak
# cuBLAS and cuBLASLt on Hopper; the thread of the backward pass has its own.
WORKSPACES = (32 * MIB, 1 * MIB)


class Memory:
    """Tensors by a number; 0 is none."""

    def __init__(self) -> None:
        self._allocator = CachingAllocator(AllocatorOptions())
        self._last = 0

    def take(self, size: float) -> int:
        if size < 1:
            return 0
        self._last += 1
        self._allocator.malloc(self._last, int(size))
        return self._last

    def give(self, *tensors: int) -> None:
        for tensor in tensors:
            if tensor:
                self._allocator.free(tensor)

    @property
    def reserved_mib(self) -> float:
        return self._allocator.reserved / MIB

    @property
    def allocated_peak_mib(self) -> float:
        return self._allocator.peak_allocated / MIB


class Chain:
    """The layers' sizes in bytes, and what each keeps. Only as long as the layers are one after the other."""

    def __init__(self, described: Described, columns: Columns) -> None:
        kinds, self.count = columns.kinds, columns.count
        each = element_bytes(described, columns)
        came = np.r_[each[0], each[:-1]]
        size = 2.0 if described.dtype in HALF else 4.0
        before = is_before(columns)
        before[0] = True
        self.amp = bool(described.autocast)
        self.half_loss = self.amp and each[-1] == 2.0
        self.outputs = _bytes(columns.outputs * each)
        self.inputs = _bytes(columns.inputs * came)
        self.casts = _bytes(columns.inputs * 2.0 * (came > 2.0) * CAST[kinds] if self.amp else 0.0 * each)
        self.upcasts = _bytes(columns.inputs * 4.0 * (came < 4.0) * (kinds == INDEX["norm"]) * self.amp)
        self.masks = _bytes(columns.outputs * MASK_BYTES[kinds])
        self.weights = _bytes(columns.parameters * size)
        self.biases = _bytes(np.where(columns.parameters > 2 * columns.channels, columns.channels * size, 0.0))
        self.is_product = CAST[kinds].tolist()
        self.is_view = IS_VIEW[kinds].tolist()
        self.is_over = (columns.inplace & (kinds == INDEX["rectifier"])).tolist()
        self.keeps_output = KEEPS_OUTPUT[kinds].tolist()
        self.keeps_input = takes_input(described, columns, before).tolist()
        self.is_before = before.tolist()
        self.first = float(np.prod(described.input)) * 4.0 if described.input else self.inputs[0]
        self.last = float(columns.outputs[-1]) * size
        self.slots, self.temporaries = slots_of(described), int(temporaries_of(described))


def _bytes(column: NDArray[np.float64]) -> list[float]:
    found: list[float] = column.tolist()
    return found


def play(described: Described, columns: Columns) -> tuple[float, float]:
    """MiB reserved at the end, and the most that was allocated."""
    chain, memory = Chain(described, columns), Memory()
    weights = [
        size
        for whole, bias in zip(chain.weights, chain.biases, strict=True)
        for size in (whole - bias, bias)
        if size >= 1
    ]
    for size in weights:
        memory.take(size)
    has_state = False
    for step in range(STEPS):
        gradients = _pass(chain, memory, is_first=step == 0)
        if not has_state:
            for size in weights:
                for _ in range(chain.slots):
                    memory.take(size)
            has_state = True
        memory.give(*[memory.take(size) for size in weights * chain.temporaries])
        memory.give(*gradients)
    return memory.reserved_mib, memory.allocated_peak_mib


def _pass(chain: Chain, memory: Memory, *, is_first: bool) -> list[int]:
    """Forward and back; the gradients of the weights stay."""
    batch = memory.take(chain.first)
    kept: list[list[int]] = [[] for _ in range(chain.count)]
    now, is_kept, works = batch, True, is_first
    for place in range(chain.count):
        if works and chain.is_product[place]:
            _ = [memory.take(size) for size in WORKSPACES]
            works = False
        now, is_kept = _forward(chain, memory, place, kept[place], now, is_kept)
    upcast = memory.take(chain.last) if chain.half_loss else 0
    likely, gradient = memory.take(chain.last), memory.take(chain.last)
    memory.give(likely, upcast, 0 if is_kept else now)
    if is_first:
        _ = [memory.take(size) for size in WORKSPACES]
    return _backward(chain, memory, kept, gradient, batch)


def _forward(chain: Chain, memory: Memory, place: int, kept: list[int], now: int, is_kept: bool) -> tuple[int, bool]:
    """What flows on, and whether somebody keeps it already."""
    copy = chain.casts[place] or chain.upcasts[place]
    if chain.amp and chain.is_product[place]:
        kept.append(memory.take(chain.weights[place] / 2))
    if copy:
        kept.append(memory.take(copy))
    elif chain.keeps_input[place] and not chain.is_before[place]:
        kept.append(memory.take(chain.inputs[place]))
    if chain.is_view[place]:
        return now, is_kept
    if chain.is_over[place]:
        if not is_kept:
            kept.append(now)
        return now, True
    output = memory.take(chain.outputs[place])
    kept.append(memory.take(chain.masks[place]))
    if not is_kept:
        if chain.keeps_input[place] and chain.is_before[place] and not copy:
            kept.append(now)
        else:
            memory.give(now)
    if chain.keeps_output[place]:
        kept.append(output)
    return output, chain.keeps_output[place]


def _backward(chain: Chain, memory: Memory, kept: list[list[int]], gradient: int, batch: int) -> list[int]:
    gradients: list[int] = []
    for place in range(chain.count - 1, -1, -1):
        if chain.is_view[place]:
            continue
        flows = memory.take(chain.inputs[place]) if place else 0
        narrow = memory.take(chain.weights[place] / 2) if chain.amp and chain.is_product[place] else 0
        gradients.append(memory.take(chain.weights[place] - chain.biases[place]))
        gradients.append(memory.take(chain.biases[place]))
        memory.give(narrow, gradient, *kept[place])
        gradient = flows
    memory.give(gradient, batch)
    return gradients
