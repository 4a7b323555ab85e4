"""Two training steps of a chain of layers, tensor by tensor, played through a caching allocator.

What an allocator reserves beyond what is allocated depends on the order and the sizes of what comes and goes; so does
the peak. Both are played here, as far as a list of layers tells what comes and goes: workspaces of convolutions, sums,
and the true graph are not in it. What is learned corrects the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from carma.estimate.described import Described
from carma.estimate.gpumemnet.again import spans_of
from carma.estimate.gpumemnet.cache import MIB, SMALL, Block, Cache
from carma.estimate.gpumemnet.columns import Columns
from carma.estimate.gpumemnet.kept import (
    CAST,
    HALF,
    INSIDE,
    IS_VIEW,
    KEEPS_OUTPUT,
    MASK_BYTES,
    element_bytes,
    is_before,
    slots_of,
    takes_input,
    temporaries_of,
)
from carma.estimate.gpumemnet.kinds import INDEX
from carma.estimate.gpumemnet.scratch import scratch_of
from carma.estimate.gpumemnet.unseen import find_unseen

if TYPE_CHECKING:
    from numpy.typing import NDArray

# cuBLAS and cuBLASLt on Hopper; the thread of the backward pass has its own.
WORKSPACE = 33 * MIB

Kept = list[Block | None]


def _whole(column: NDArray[np.float64]) -> list[int]:
    """Bytes, in the allocator's steps; 0 for what goes to the pool of small ones."""
    rounded = (-(-column // 512) * 512).astype(np.int64)
    found: list[int] = np.where(rounded < SMALL, 0, rounded).tolist()
    return found


class Chain:
    """The layers' sizes in bytes, and what each keeps."""

    def __init__(self, described: Described, columns: Columns, scores: float) -> None:
        kinds, self.count = columns.kinds, columns.count
        each = element_bytes(described, columns)
        came = np.r_[each[0], each[:-1]]
        size = 2.0 if described.dtype in HALF else 4.0
        before = is_before(columns)
        unseen = find_unseen(columns, before)
        before[0] = True
        self.amp = bool(described.autocast)
        self.half_loss = self.amp and each[-1] == 2.0
        self.outputs, self.inputs = _whole(columns.outputs * each), _whole(columns.inputs * came)
        takes = (takes_input(described, columns, before) & ~unseen.no_input) | unseen.new_input
        copied = self.amp * (CAST[kinds] * (came > 2.0) * 2.0 + (kinds == INDEX["norm"]) * (came < 4.0) * 4.0)
        self.copies = _whole(columns.inputs * copied * (takes | CAST[kinds]))
        new = takes & (~before | unseen.new_input) & (copied == 0)
        inside = columns.outputs * INSIDE[kinds] + unseen.elements
        self.extras = _whole(np.where(new, columns.inputs * came, 0.0))
        self.unseen = _whole(inside * each)
        self.masks = _whole(columns.outputs * MASK_BYTES[kinds])
        biases = np.where(columns.parameters > 2 * columns.channels, columns.channels * size, 0.0)
        whole = columns.parameters * size - biases
        self.weights, self.biases = _whole(whole), _whole(biases)
        self.small = sum(int(-(-each // 512) * 512) for each in (*whole, *biases) if each + 511 < SMALL)
        self.halves = _whole(columns.parameters * 2.0 * self.amp * CAST[kinds])
        beside = zip(self.halves, self.copies, self.extras, self.unseen, strict=True)
        self.beside = [tuple(filter(None, sizes)) for sizes in beside]
        self.is_view = IS_VIEW[kinds].tolist()
        self.is_over = (columns.inplace & (kinds == INDEX["rectifier"])).tolist()
        self.keeps_output = KEEPS_OUTPUT[kinds].tolist()
        self.keeps_now = (takes & before & ~unseen.new_input & (copied == 0)).tolist()
        self.scores = [int(scores) if attends else 0 for attends in unseen.attends.tolist()]
        self.first = int(np.prod(described.input)) * 4 if described.input else self.inputs[0]
        self.last = int(columns.outputs[-1] * size)
        self.slots, self.temporaries = slots_of(described), int(temporaries_of(described))
        self.spans = spans_of(columns) if described.checkpointing else [(0, self.count, False)]
        self.scratch = scratch_of(described)


def play(described: Described, columns: Columns, scores: float) -> tuple[float, float]:
    """MiB reserved at the end, and the most that was allocated. `scores`: bytes of one attention layer's."""
    chain, cache = Chain(described, columns, scores), Cache()
    weights = [size for pair in zip(chain.weights, chain.biases, strict=True) for size in pair if size]
    for size in weights:
        cache.take(size)
    cache.take(WORKSPACE)
    steps = 2 if chain.slots else 1  # without a state the second step is the first again
    for step in range(steps):
        gradients = _Pass(chain, cache).run(is_first=step == 0)
        if step == 0:
            for size in weights:
                for _ in range(chain.slots):
                    cache.take(size)
        for block in [cache.take(size) for size in weights * chain.temporaries]:
            cache.give(block)
        for block in gradients:
            cache.give(block)
    small = chain.small * (1 + chain.slots)
    return (cache.reserved + small) / MIB, (cache.peak + small) / MIB


class _Pass:
    """Forward and back."""

    def __init__(self, chain: Chain, cache: Cache) -> None:
        self.chain, self.cache = chain, cache
        self.kept: list[Kept] = [[] for _ in range(chain.count)]
        self.now: Block | None = None
        self.batch: Block | None = None
        self.is_kept = True

    def run(self, *, is_first: bool) -> Kept:
        """The gradients of the weights stay."""
        chain, take, give = self.chain, self.cache.take, self.cache.give
        batch = self.batch = self.now = take(chain.first)
        begins = self.there()
        output, is_kept = self.now, self.is_kept  # a script holds it until the step is over
        gradient = self.loss()
        if is_first:
            take(WORKSPACE)
        gradients: Kept = []
        for begin, end, again in reversed(chain.spans):
            if again:
                self.now, self.is_kept = begins.pop(), True
                self.layers(begin, end, keep=True)
                if not self.is_kept:
                    give(self.now)
            gradient = self.back(begin, end, gradient, gradients)
        give(gradient)
        give(batch)
        if not is_kept:
            give(output)
        return gradients

    def loss(self) -> Block | None:
        """Cross entropy: the logarithms are kept, their gradient and the output's come."""
        chain, take, give = self.chain, self.cache.take, self.cache.give
        upcast = take(chain.last) if chain.half_loss else None
        likely = take(chain.last)
        give(upcast)
        passed, gradient = take(chain.last), take(chain.last)
        give(passed)
        give(likely)
        if chain.half_loss:
            wide, gradient = gradient, take(chain.last // 2)
            give(wide)
        return gradient

    def there(self) -> Kept:
        """Of what is computed again, only what goes in is kept."""
        begins: Kept = []
        for begin, end, again in self.chain.spans:
            if again:
                begins.append(self.now)
                if not self.is_kept:
                    self.kept[begin].append(self.now)
                self.is_kept = True
            self.layers(begin, end, keep=not again)
        return begins

    def layers(self, begin: int, end: int, *, keep: bool) -> None:
        for place in range(begin, end):
            made: Kept = []
            self.layer(place, made)
            if keep:
                self.kept[place] += made
            else:
                for block in made:
                    if block is not self.now:
                        self.cache.give(block)
                self.is_kept = self.now is None or self.now is self.batch or self.now in self.kept[begin]

    def layer(self, place: int, made: Kept) -> None:
        chain, take, give = self.chain, self.cache.take, self.cache.give
        for size in chain.beside[place]:
            made.append(take(size))
        if chain.scores[place]:
            work = take(chain.scores[place])
            made += [take(chain.scores[place]), take(chain.scores[place])]
            give(work)
        if chain.is_view[place]:
            return
        if chain.is_over[place]:
            if not self.is_kept:
                made.append(self.now)
            self.is_kept = True
            return
        output = take(chain.outputs[place]) if chain.outputs[place] else None
        if chain.masks[place]:
            made.append(take(chain.masks[place]))
        if not self.is_kept:
            if chain.keeps_now[place]:
                made.append(self.now)
            else:
                give(self.now)
        if chain.scratch[place][0]:
            give(take(chain.scratch[place][0]))
        self.now, self.is_kept = output, chain.keeps_output[place]
        if self.is_kept:
            made.append(output)

    def back(self, begin: int, end: int, gradient: Block | None, gradients: Kept) -> Block | None:
        chain, take, give = self.chain, self.cache.take, self.cache.give
        for place in range(end - 1, begin - 1, -1):
            if chain.is_view[place]:
                continue
            flows = take(chain.inputs[place]) if place and chain.inputs[place] else None
            _, of_input, of_weights = chain.scratch[place]
            if place and of_input:
                give(take(of_input))
            narrow = take(chain.halves[place]) if chain.halves[place] else None
            if chain.weights[place]:
                gradients.append(take(chain.weights[place]))
            if chain.biases[place]:
                gradients.append(take(chain.biases[place]))
            if of_weights:
                give(take(of_weights))
            if narrow:
                give(narrow)
            if gradient:
                give(gradient)
            for block in self.kept[place]:
                give(block)
            self.kept[place] = []
            gradient = flows
        return gradient
