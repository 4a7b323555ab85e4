"""Simulates two training steps of a chain of layers, tensor by tensor, with a caching allocator.

Reserved memory and the peak depend on the order and the sizes of allocations and frees. Both are simulated as far as a
list of layers shows the tensors (`tensor_sizes`). The learned models correct the rest.
"""

from __future__ import annotations

from itertools import chain as chained
from typing import Any

from carma.trial.layers.column_reading import LayerReading
from gpumemnet.serving.caching_allocator import MIB, Block, Cache, Tape
from gpumemnet.serving.tensor_sizes import Sizes

# Of cuBLAS and cuBLASLt on Hopper; the thread of the backward pass has its own.
WORKSPACE = 33 * MIB

Tensor = int | None  # its number on the tape; None for a small tensor
Tensors = list[Tensor]


def play(reading: LayerReading, heads: float) -> tuple[float, float]:
    """MiB reserved at the end, and the peak of allocated MiB. `heads`: of attention that stores its scores, else 0."""
    chain = Sizes(reading, heads)
    weights = [size for pair in zip(chain.weights, chain.biases, strict=True) for size in pair if size]
    states = [size for size in weights for _ in range(chain.slots)]
    tape, taken = Tape(least=min(WORKSPACE, *weights) if weights else WORKSPACE), list[Block]()
    there, back, update = _Pass(chain, tape).steps(weights * chain.temporaries)
    cache = Cache(tape.least)
    cache.play([*weights, WORKSPACE], [])
    cache.play(there, taken)
    cache.play([WORKSPACE], [])
    cache.play(back, taken)
    cache.play(states, [])
    cache.play(update, taken)
    # The second step begins with the cache of the first; frees at its end no longer matter.
    cache.play([*there, *back, *update[: len(weights) * chain.temporaries]], [])
    small = chain.small * (1 + chain.slots)
    return (cache.reserved + small) / MIB, (cache.peak + small) / MIB


def _rows_there(chain: Sizes) -> list[tuple[Any, ...]]:
    """What the forward pass needs of each layer, in one tuple for speed."""
    adds = chain.adds
    if chain.amp:  # otherwise there are no copies
        adds = [is_sum and not copy for is_sum, copy in zip(chain.adds, chain.copies, strict=True)]
    begins = chain.beside, chain.joined, chain.pairs, chain.is_view, adds, chain.is_over
    ends = chain.outputs, chain.kept_more, chain.masks, chain.keeps_now, chain.scratch, chain.keeps_output
    return list(zip(*begins, *ends, strict=True))


def _rows_back(chain: Sizes) -> list[tuple[Any, ...]]:
    flows = chain.is_view, chain.copies, chain.inputs, chain.back_more, chain.scratch
    return list(zip(*flows, chain.is_norm, chain.before_sum, chain.weighs, chain.pairs, strict=True))


class _Pass:
    """Records the forward and the backward pass on a tape: allocations and frees are the same in every step."""

    def __init__(self, chain: Sizes, tape: Tape) -> None:
        self.chain, self.tape = chain, tape
        self.kept: list[Tensors] = [[] for _ in range(chain.count)]
        self.now: Tensor = None
        self.batch: Tensor = None
        self.is_kept = True
        self.joined: Tensor = None
        self.aside: Tensor = None
        self.waiting: dict[int, Tensor] = {}
        self.flowing = 0  # the size of the gradient that is passed on
        self.other: tuple[int, Tensor] = (0, None)
        self.held: dict[int, Tensors] = {}
        self.elsewhere = chain.fans.keys() | chain.skips.keys()
        self.rows_there, self.rows_back = _rows_there(chain), _rows_back(chain)

    def steps(self, temporaries: list[int]) -> tuple[list[int], list[int], list[int]]:
        """The forward pass, the backward pass, and the optimizer's part, which allocates `temporaries` and frees the
        gradients of the weights."""
        chain, take, give = self.chain, self.tape.take, self.tape.give
        batch = self.batch = self.now = take(chain.first)
        begins = self.there()
        output, is_kept = self.now, self.is_kept  # the script holds it until the end of the step
        self.join(0)
        gradient = self.loss()
        there = self.tape.cut()
        gradients: Tensors = []
        for begin, end, again in reversed(chain.spans):
            if again:
                self.now, self.is_kept = begins.pop(), True
                self.layers(begin, end, keep=True)
                self.join(0)
                if not self.is_kept:
                    give(self.now)
            gradient = self.back(begin, end, gradient, gradients)
        left = (gradient, self.aside, self.other[1], *self.waiting.values())
        for tensor in (*left, *chained.from_iterable(self.held.values()), batch, None if is_kept else output):
            give(tensor)
        back = self.tape.cut()
        for tensor in (*[take(size) for size in temporaries], *gradients):
            give(tensor)
        return there, back, self.tape.cut()

    def loss(self) -> Tensor:
        """Cross entropy keeps the logarithms, then allocates their gradient and the output's. They have 32 bits,
        whatever the output has."""
        chain, take, give = self.chain, self.tape.take, self.tape.give
        likely = take(chain.last)
        passed, gradient = take(chain.last), take(chain.last // 2 if chain.half_loss else chain.last)
        give(passed)
        give(likely)
        return gradient

    def there(self) -> Tensors:
        """The forward pass. Recomputed layers keep their input only."""
        begins: Tensors = []
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
            if keep:
                self.layer(place, self.kept[place])
                continue
            made: Tensors = []
            self.layer(place, made)
            for tensor in made:
                if tensor != self.now:
                    self.tape.give(tensor)
            self.is_kept = self.now is None or self.now == self.batch or self.now in self.kept[begin]

    def layer(self, place: int, made: Tensors) -> None:
        take, give = self.tape.take, self.tape.give
        row = self.rows_there[place]
        beside, joined, pairs, is_view, adds, is_over, size, more, mask, keeps_now, scratch, keeps = row
        for one in beside:
            made.append(take(one))
        if joined:
            self.join(joined)
        if pairs:
            self.attend(pairs, made)
        if is_view:
            return
        if adds:
            self.replace(self.chain.inputs[place])
        if is_over:
            self.write_over(place, made)
            return
        output = take(size)
        if more:
            made += [take(size) for _ in range(more)]
        if mask:
            made.append(take(mask))
        if not self.is_kept:
            if keeps_now:
                made.append(self.now)
            else:
                give(self.now)
        if scratch[0]:
            give(take(scratch[0]))
        self.now, self.is_kept = output, keeps
        if keeps:
            made.append(output)

    def replace(self, size: int) -> None:
        """The current tensor by a new one."""
        whole = self.tape.take(size)
        if not self.is_kept:
            self.tape.give(self.now)
        self.now, self.is_kept = whole, False

    def write_over(self, place: int, made: Tensors) -> None:
        if self.chain.is_met[place]:  # the tensor that is overwritten is a new one
            if not self.is_kept:
                self.tape.give(self.now)
            self.now, self.is_kept = self.tape.take(self.chain.outputs[place]), False
        if not self.is_kept:
            made.append(self.now)
        self.is_kept = True

    def fan_out(self, place: int, flows: Tensor) -> None:
        """Attention and gates: each input has a gradient of its own, and all exist together."""
        chain, take, give = self.chain, self.tape.take, self.tape.give
        into = chain.fans[place]
        parts = [take(chain.inputs[place]) for _ in range(3)] if len(into) == 1 else []
        for one in into:
            self.waiting[one] = take(chain.outputs[one])
        for part in parts:  # of one projection, whose gradient is concatenated of them
            give(part)
        give(flows)

    def meet(self, into: int, flows: Tensor) -> Tensor:
        """Gradients of the same tensor are added up in the first of them."""
        size, other = self.other
        if size != into:
            return flows
        self.tape.give(flows)
        self.other = (0, None)
        return other

    def join(self, size: int) -> None:
        """Joined branches. If a narrower copy is kept, this tensor lasts until it has gone into the next one."""
        joined = self.tape.take(size) if size else None
        self.tape.give(self.joined)
        self.joined = joined

    def attend(self, pairs: int, made: Tensors) -> None:
        """Products, scaled, their softmax in 32 bits; in half precision cast back; dropout keeps a mask."""
        take, give, size = self.tape.take, self.tape.give, 2 if self.chain.half else 4
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
        """Gradients of the dropout, the cast, the softmax (with a product of its own) and the scaling, in order."""
        take, give, size = self.tape.take, self.tape.give, 2 if self.chain.half else 4
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

    def back(self, begin: int, end: int, gradient: Tensor, gradients: Tensors) -> Tensor:
        chain, take, give = self.chain, self.tape.take, self.tape.give
        waiting, held = self.waiting, self.held
        for place in range(end - 1, begin - 1, -1):
            is_view, copy, into, more, scratch, is_norm, before_sum, weighs, pairs = self.rows_back[place]
            if is_view:
                continue
            flows = None if not place else self.narrowed(copy, into) if copy else take(into)
            if place in waiting:
                give(self.other[1])
                self.other, gradient = (self.flowing, gradient), waiting.pop(place)
            if more:
                for tensor in [take(chain.outputs[place]) for _ in range(more)]:
                    give(tensor)
            if place and scratch[1]:
                give(take(scratch[1]))
            if weighs or pairs or scratch[2]:
                self.gradients_of_weights(place, gradients)
            if is_norm:
                give(self.aside)
                self.aside = None
            if before_sum and self.aside is None:
                self.aside = gradient  # until the other branch has its gradient
            else:
                give(gradient)
            for tensor in self.kept[place]:
                give(tensor)
            self.kept[place] = []
            if place in held:
                for tensor in held.pop(place):
                    give(tensor)
            self.flowing = into
            if place in self.elsewhere:
                self.pass_on(place, flows)
                gradient = None
            else:
                gradient = flows if self.other[1] is None else self.meet(into, flows)
        return gradient

    def narrowed(self, copy: int, size: int) -> Tensor:
        """If the input was cast, its gradient first has the format of the copy."""
        wide, flows = self.tape.take(copy), self.tape.take(size)
        self.tape.give(wide)
        return flows

    def gradients_of_weights(self, place: int, gradients: Tensors) -> None:
        chain, take, give = self.chain, self.tape.take, self.tape.give
        narrow = take(chain.halves[place]) if chain.halves[place] else None
        if chain.gradients[place]:
            gradients.append(take(chain.gradients[place]))
        if chain.passing[place]:
            give(take(chain.passing[place]))
        if chain.pairs[place]:
            self.attend_back(chain.pairs[place])
        if chain.biases[place]:
            gradients.append(take(chain.biases[place]))
        if chain.scratch[place][2]:
            give(take(chain.scratch[place][2]))
        give(narrow)

    def pass_on(self, place: int, flows: Tensor) -> None:
        """Passes the gradient on to another layer than the one before, whose gradient comes from elsewhere or is a
        view of a held one."""
        if place in self.chain.fans:
            self.fan_out(place, flows)
        else:
            self.held.setdefault(self.chain.skips[place], []).append(flows)
