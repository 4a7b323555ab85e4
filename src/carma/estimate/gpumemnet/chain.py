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
    BACK_MORE,
    CAST,
    HALF,
    IS_VIEW,
    KEEPS_OUTPUT,
    KEPT_MORE,
    MASK_BYTES,
    arriving_bytes,
    element_bytes,
    inside_of,
    is_before,
    slots_of,
    takes_input,
    temporaries_of,
)
from carma.estimate.gpumemnet.kinds import INDEX
from carma.estimate.gpumemnet.scratch import scratch_of
from carma.estimate.gpumemnet.tied import find_tied
from carma.estimate.gpumemnet.unseen import find_scores, find_skips, find_sums, find_unseen

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

    def __init__(self, described: Described, columns: Columns, heads: float) -> None:
        kinds, self.count = columns.kinds, columns.count
        each = element_bytes(described, columns)
        size = 2.0 if described.dtype in HALF else 4.0
        before = is_before(columns)
        unseen = find_unseen(columns, before, described.batch or 1)
        came = arriving_bytes(described, columns, before, each)
        for place in np.flatnonzero(unseen.no_input & (unseen.pairs == 0)).tolist():
            came[place] = came[place - 1]  # it takes what its neighbour took, and casts it once more
        before[0] = True
        self.amp = bool(described.autocast)
        self.half_loss = self.amp and each[-1] == 2.0
        self.outputs, self.inputs = _whole(columns.outputs * each), _whole(columns.inputs * came)
        takes = (takes_input(described, columns, before) & ~unseen.no_input) | unseen.new_input
        copied = self.amp * (CAST[kinds] * (came > 2.0) * 2.0 + (kinds == INDEX["norm"]) * (came < 4.0) * 4.0)
        self.copies = _whole(columns.inputs * copied * (takes | CAST[kinds]))
        new = takes & (~before | unseen.new_input) & (copied == 0)
        inside = columns.outputs * inside_of(columns) + unseen.elements
        self.extras = _whole(np.where(new, columns.inputs * came, 0.0))
        self.unseen = _whole(inside * each)
        self.masks = _whole(columns.outputs * MASK_BYTES[kinds])
        biases = np.where(columns.parameters > 2 * columns.channels, columns.channels * size, 0.0)
        whole = columns.parameters * size - biases
        lacks = 0 if described.parameters is None else columns.parameters.sum() - described.parameters
        tied = find_tied(kinds, whole / size, float(lacks))
        self.gradients, self.passing = _whole(whole), [0] * self.count
        for place in np.flatnonzero(tied >= 0).tolist():  # the sum of their gradients is made where the last one is
            owner = int(tied[place])
            kept_at = max(owner, *(np.flatnonzero(tied == owner).tolist()))
            for one in (owner, place):
                if one != kept_at and self.gradients[one]:
                    self.passing[one], self.gradients[one] = self.gradients[one], 0
        whole = np.where(tied >= 0, 0.0, whole)
        self.weights, self.biases = _whole(whole), _whole(biases)
        self.small = sum(int(-(-each // 512) * 512) for each in (*whole, *biases) if each + 511 < SMALL)
        self.halves = _whole(columns.parameters * 2.0 * self.amp * CAST[kinds])
        beside = zip(self.halves, self.copies, self.extras, self.unseen, strict=True)
        self.beside = [tuple(filter(None, sizes)) for sizes in beside]
        scores = find_scores(columns, unseen.pairs * heads)
        self.is_view = (IS_VIEW[kinds] | scores).tolist()
        self.is_norm = (kinds == INDEX["norm"]).tolist()
        self.is_sum = find_sums(kinds, before).tolist()
        self.is_over = (columns.inplace & (kinds == INDEX["rectifier"])).tolist()
        self.keeps_output = KEEPS_OUTPUT[kinds].tolist()
        self.keeps_now = (takes & before & ~unseen.new_input & (copied == 0)).tolist()
        self.half = self.amp or size == 2.0
        self.pairs = [int(pairs * heads) for pairs in unseen.pairs.tolist()]
        self.drops = bool((kinds == INDEX["dropout"]).any())
        self.kept_more = [KEPT_MORE.get(name, 0) for name in columns.names.tolist()]
        self.back_more = [BACK_MORE.get(name, 0) for name in columns.names.tolist()]
        joined = ~before & (copied > 0) & CAST[kinds] & (columns.inputs > np.r_[0.0, columns.outputs[:-1]])
        self.joined = _whole(np.where(joined, columns.inputs * came, 0.0))
        self.first = int(np.prod(described.input)) * 4 if described.input else self.inputs[0]
        self.last = int(columns.outputs[-1] * size)
        self.slots, self.temporaries = slots_of(described), int(temporaries_of(described))
        self.spans = spans_of(columns) if described.checkpointing else [(0, self.count, False)]
        begins = {begin for begin, _, again in self.spans if again}
        self.adds = [is_sum and place not in begins for place, is_sum in enumerate(self.is_sum)]
        self.scratch = scratch_of(described)
        self.fans = unseen.fans
        self.is_met = (~before & (columns.inputs > np.r_[0.0, columns.outputs[:-1]])).tolist()
        self.skips = find_skips(columns, before)
        over_view = np.r_[False, np.char.startswith(columns.names[:-1], "InstanceNorm")] & columns.inplace
        for place in np.flatnonzero(over_view).tolist():  # a view: its gradient is copied
            self.back_more[place] += 2


def play(described: Described, columns: Columns, heads: float) -> tuple[float, float]:
    """MiB reserved at the end, and the most that was allocated. `heads`: of attention that writes its scores out."""
    chain, cache = Chain(described, columns, heads), Cache()
    weights = [size for pair in zip(chain.weights, chain.biases, strict=True) for size in pair if size]
    for size in weights:
        cache.take(size)
    cache.take(WORKSPACE)
    for step in range(2):  # the second finds the cache as the first left it
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
        self.joined: Block | None = None
        self.aside: Block | None = None
        self.waiting: dict[int, Block | None] = {}
        self.other: tuple[int, Block | None] = (0, None)
        self.held: dict[int, Kept] = {}

    def run(self, *, is_first: bool) -> Kept:
        """The gradients of the weights stay."""
        chain, take, give = self.chain, self.cache.take, self.cache.give
        batch = self.batch = self.now = take(chain.first)
        begins = self.there()
        output, is_kept = self.now, self.is_kept  # a script holds it until the step is over
        self.join(0)
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
        for block in (gradient, self.aside, self.other[1], *self.waiting.values(), *sum(self.held.values(), [])):
            give(block)
        give(batch)
        if not is_kept:
            give(output)
        return gradients

    def loss(self) -> Block | None:
        """Cross entropy: the logarithms are kept, their gradient and the output's come. They are 32 bits wide, whatever
        the output is."""
        chain, take, give = self.chain, self.cache.take, self.cache.give
        likely = take(chain.last)
        passed, gradient = take(chain.last), take(chain.last // 2 if chain.half_loss else chain.last)
        give(passed)
        give(likely)
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
        if chain.joined[place]:
            self.join(chain.joined[place])
        if chain.pairs[place]:
            self.attend(chain.pairs[place], made)
        if chain.is_view[place]:
            return
        if chain.adds[place] and not chain.copies[place]:
            whole = take(chain.inputs[place])
            if not self.is_kept:
                give(self.now)
            self.now, self.is_kept = whole, False
        if chain.is_over[place]:
            if chain.is_met[place]:  # what is written over is a tensor of its own
                if not self.is_kept:
                    give(self.now)
                self.now, self.is_kept = take(chain.outputs[place]), False
            if not self.is_kept:
                made.append(self.now)
            self.is_kept = True
            return
        output = take(chain.outputs[place]) if chain.outputs[place] else None
        for _ in range(chain.kept_more[place]):
            made.append(take(chain.outputs[place]))
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

    def fan_out(self, place: int, flows: Block | None) -> None:
        """Attention and gates: each that went into it has a gradient of its own, which are there together."""
        chain, take, give = self.chain, self.cache.take, self.cache.give
        into = chain.fans[place]
        parts = [take(chain.inputs[place]) for _ in range(3)] if len(into) == 1 else []
        for one in into:
            self.waiting[one] = take(chain.outputs[one])
        for part in parts:  # of one product, which is put together of them
            give(part)
        give(flows)

    def meet(self, place: int, flows: Block | None) -> Block | None:
        """Gradients of the same tensor are added up in the first of them."""
        size, other = self.other
        if other is None or size != self.chain.inputs[place]:
            return flows
        self.cache.give(flows)
        self.other = (0, None)
        return other

    def join(self, size: int) -> None:
        """Branches that met. Where a narrower copy is what is kept, it lasts until it has gone into the next one."""
        joined = self.cache.take(size) if size else None
        self.cache.give(self.joined)
        self.joined = joined

    def attend(self, pairs: int, made: Kept) -> None:
        """Products, scaled, their softmax in 32 bits; in half precision narrowed again; dropout keeps a mask."""
        take, give, size = self.cache.take, self.cache.give, 2 if self.chain.half else 4
        product = take(pairs * size)
        scaled = take(pairs * size)
        give(product)
        made.append(take(pairs * 4))
        give(scaled)
        narrow = take(pairs * size) if self.chain.half else None
        if self.chain.drops:
            made += [take(pairs * size), take(pairs)]
            give(narrow)
        else:
            made.append(narrow)

    def attend_back(self, pairs: int) -> None:
        """Of the dropped, the narrow, the softmax (with a product of its own), the scaled, one after the other."""
        take, give, size = self.cache.take, self.cache.give, 2 if self.chain.half else 4
        gradient = take(pairs * size)
        if self.chain.drops:
            gradient, before = take(pairs * size), gradient
            give(before)
        if self.chain.half:
            gradient, before = take(pairs * 4), gradient
            give(before)
        product, flows = take(pairs * 4), take(pairs * size)
        give(product)
        give(gradient)
        scaled = take(pairs * size)
        give(flows)
        give(scaled)

    def back(self, begin: int, end: int, gradient: Block | None, gradients: Kept) -> Block | None:
        chain, take, give = self.chain, self.cache.take, self.cache.give
        for place in range(end - 1, begin - 1, -1):
            if chain.is_view[place]:
                continue
            narrow_flow = take(chain.copies[place]) if place and chain.copies[place] else None
            flows = take(chain.inputs[place]) if place and chain.inputs[place] else None
            give(narrow_flow)
            if place in self.waiting:
                give(self.other[1])
                self.other, gradient = (chain.inputs[place], gradient), self.waiting.pop(place)
            more = [take(chain.outputs[place]) for _ in range(chain.back_more[place])]
            for block in more:
                give(block)
            _, of_input, of_weights = chain.scratch[place]
            if place and of_input:
                give(take(of_input))
            narrow = take(chain.halves[place]) if chain.halves[place] else None
            if chain.gradients[place]:
                gradients.append(take(chain.gradients[place]))
            if chain.passing[place]:
                give(take(chain.passing[place]))
            if chain.pairs[place]:
                self.attend_back(chain.pairs[place])
            if chain.biases[place]:
                gradients.append(take(chain.biases[place]))
            if of_weights:
                give(take(of_weights))
            if narrow:
                give(narrow)
            if chain.is_norm[place]:
                give(self.aside)
                self.aside = None
            if place + 1 < chain.count and chain.is_sum[place + 1] and self.aside is None:
                self.aside = gradient  # the other branch waits for it
            elif gradient:
                give(gradient)
            for block in self.kept[place]:
                give(block)
            self.kept[place] = []
            for block in self.held.pop(place, ()):
                give(block)
            if place in chain.fans:
                self.fan_out(place, flows)
                gradient = None
            elif place in chain.skips:  # both parts of it are views
                self.held.setdefault(chain.skips[place], []).append(flows)
                gradient = None
            else:
                gradient = self.meet(place, flows)
        return gradient
