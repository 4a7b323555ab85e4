"""Traverses a program for one sample, without torch: weights, bytes kept for the backward pass, operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gpumemnet.dataset.config import Config, Op


class Unfit(ValueError):
    """The model cannot be built, or cannot be trained."""


class Flow:
    """A tensor of one sample. `held`: it is already kept for the backward pass."""

    def __init__(self, shape: tuple[int, ...], size: int, held: bool = False) -> None:
        if min(shape) < 1:
            raise Unfit(f"nothing is left of the image: {shape}")
        self.shape, self.size, self.held = shape, size, held
        self.elements = math.prod(shape)

    def state(self) -> tuple[tuple[int, ...], int, bool]:
        return self.shape, self.size, self.held


class Walk:
    """The sums over a program. Sizes are bytes of one sample."""

    def __init__(self, config: Config, steps: Mapping[str, Step]) -> None:
        self.config, self.steps = config, steps
        self.low = 2 if config.precision in ("bf16-amp", "fp16-amp", "bf16") else 4
        self.amp = config.precision.endswith("amp")
        self.weights = 0
        self.saved = self.products = self.convolutions = self.grouped = self.traffic = 0.0
        self.largest = 0  # elements of the largest tensor
        self.inner = 0.0  # bytes of the largest block while it is recomputed
        self.layers = 0
        self.lonely = False  # a batch norm over one value of each sample needs two samples
        self.embedding = 0
        self.memory: Flow | None = None
        size = 2 if config.precision == "bf16" else 4
        start = Flow(config.input, 8 if config.vocabulary else size)
        self.saved += start.elements * start.size
        start.held = True
        self.end = self.run(config.model, start)
        self._loss(self.end)

    def run(self, program: Sequence[Op], x: Flow) -> Flow:
        for op in program:
            x = self._times(op, x, int(op.get("times", 1)))  # type: ignore[call-overload]
        return x

    def _times(self, op: Op, x: Flow, times: int) -> Flow:
        """Repeats an op. When two rounds begin with equal tensors, the rest cost as much as the second."""
        act = self.steps[str(op["op"])]
        while times:
            before, state = self._sums(), x.state()
            x = act(self, op, x)
            times -= 1
            if times and x.state() == state:
                for name, old in before.items():
                    setattr(self, name, getattr(self, name) + times * (getattr(self, name) - old))
                break
        return x

    def _sums(self) -> dict[str, float]:
        names = ("weights", "saved", "products", "convolutions", "grouped", "traffic", "layers")
        return {name: getattr(self, name) for name in names}

    def keep(self, x: Flow) -> None:
        if not x.held:
            self.saved += x.elements * x.size
            x.held = True

    def made(self, shape: tuple[int, ...], size: int) -> Flow:
        flow = Flow(shape, size)
        self.largest = max(self.largest, flow.elements)
        self.traffic += flow.elements * size
        return flow

    def feed(self, x: Flow) -> None:
        """The input of a matrix product, of which mixed precision makes a copy."""
        if self.amp and x.size == 4:
            self.saved += x.elements * 2
        else:
            self.keep(x)

    def product(self, x: Flow, out: int, bias: bool) -> Flow:
        width = x.shape[-1]
        self.feed(x)
        self.layers += 1
        self.weights += width * out + (out if bias else 0)
        self.products += 2.0 * x.elements * out
        return self.made((*x.shape[:-1], out), self.low)

    def _loss(self, x: Flow) -> None:
        """The loss: scores in full precision, their logarithms, and the gradient of both."""
        self.saved += x.elements * ((4 if self.amp else 0) + x.size * 2 + max(x.size, 4 if self.amp else 0))


Step = Callable[[Walk, Op, Flow], Flow]
