"""Memory of a program without torch: a rough estimate, which steers the generator and reserves memory of the collector.

1. `ProgramSums` runs a program for one sample and sums up weights, bytes kept for the backward pass, and operations.
2. STEPS says what each op of `inside/build.py` adds, by what torch's backward passes keep.
3. `RoughEstimate` is the memory for any batch. No estimator uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpumemnet.dataset.config import Config, Op
from gpumemnet.dataset.ranges import Common
from gpumemnet.summaries.training_options import OPTIMIZERS

# Their backward passes need the output; all others need the input, or a copy of it if they work in place.
BY_OUTPUT = ("relu", "tanh", "sigmoid")
INPLACE_BY_OUTPUT = (*BY_OUTPUT, "elu", "selu", "celu", "leaky_relu")
SEVERAL = {"logsigmoid": 1, "softsign": 2, "tanhshrink": 1}  # number of tensors that their parts keep
TOTALS = ("weights", "saved", "products", "convolutions", "grouped", "traffic")  # add up over the ops
MIB = 1 << 20


class Unfit(ValueError):
    """The model cannot be built, or cannot be trained."""


@dataclass
class Flow:
    """A tensor of one sample. `held`: it is already kept for the backward pass."""

    shape: tuple[int, ...]
    size: int
    held: bool = False

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise Unfit(f"nothing is left of the image: {self.shape}")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ProgramSums:
    """The sums over all ops of a program. Sizes are bytes of one sample."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.low = 2 if config.precision in ("bf16-amp", "fp16-amp", "bf16") else 4
        self.amp = config.precision.endswith("amp")
        self.weights = 0
        self.saved = self.products = self.convolutions = self.grouped = self.traffic = 0.0
        self.largest = 0  # elements of the largest tensor
        self.inner = 0.0  # bytes of the largest block while it is recomputed
        self.needs_two_samples = False  # for a batch norm over one value of each sample
        self.embedding = 0
        self.memory: Flow | None = None
        self.size = 2 if config.precision == "bf16" else 4  # of a weight
        start = Flow(config.input, 8 if config.vocabulary else self.size)
        self.keep(start)
        self.end = end = self.run(config.model, start)
        # The loss: scores in full precision, their logarithms, and the gradient of both.
        self.saved += end.elements * ((4 if self.amp else 0) + end.size * 2 + max(end.size, 4 if self.amp else 0))

    def run(self, program: Sequence[Op], x: Flow) -> Flow:
        for op in program:
            x = self._times(op, x, op.get("times", 1))
        return x

    def _times(self, op: Op, x: Flow, times: int) -> Flow:
        """Repeats an op. When two rounds begin with equal tensors, the rest cost as much as the second."""
        act = STEPS[str(op["op"])]
        while times:
            before, begin = {name: getattr(self, name) for name in TOTALS}, replace(x)
            x = act(self, op, x)
            times -= 1
            if times and x == begin:
                for name, old in before.items():
                    setattr(self, name, getattr(self, name) + times * (getattr(self, name) - old))
                break
        return x

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
        self.weights += width * out + (out if bias else 0)
        self.products += 2.0 * x.elements * out
        return self.made((*x.shape[:-1], out), self.low)


Step = Callable[[ProgramSums, Op, Flow], Flow]


def _linear(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    y = sums.product(x, op["out"], op.get("bias", True))
    if op.get("tied"):
        if x.shape[-1] * op["out"] != sums.embedding:
            raise Unfit("a tied layer of another size than the embedding")
        sums.weights -= sums.embedding
    return y


def _conv(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    width, sides = x.shape[0], x.shape[1:]
    k, s, d = op.get("k", 3), op.get("s", 1), op.get("d", 1)
    p = op["p"] if "p" in op else d * (k - 1) // 2
    out, groups = op.get("out") or width, op.get("groups", 1) or width
    if width % groups or out % groups:
        raise Unfit(f"{groups} groups of {width} and {out} channels")
    sums.feed(x)
    each = width // groups * k ** len(sides)
    sums.weights += each * out + (out if op.get("bias", True) else 0)
    y = sums.made((out, *((side + 2 * p - d * (k - 1) - 1) // s + 1 for side in sides)), sums.low)
    if groups > 1:
        sums.grouped += 2.0 * y.elements * each
    else:
        sums.convolutions += 2.0 * y.elements * each
    return y


def _deconv(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    k, s, out = op.get("k", 3), op.get("s", 1), op["out"]
    sums.feed(x)
    sums.weights += x.shape[0] * out * k ** len(x.shape[1:]) + out
    sums.convolutions += 2.0 * x.elements * out * k ** len(x.shape[1:])
    return sums.made((out, *((side - 1) * s + k for side in x.shape[1:])), sums.low)


def _norm(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    kind = op["f"]
    if kind == "batch" and math.prod(x.shape[1:]) == 1:
        sums.needs_two_samples = True
    if kind == "instance" and math.prod(x.shape[1:]) == 1:
        raise Unfit("an instance norm over a single figure")
    sums.weights += 2 * (x.shape[-1] if kind in ("layer", "rms") else x.shape[0])
    full = sums.amp and kind in ("layer", "group", "rms")  # computed in full precision under autocast
    if full and x.size == 2:
        sums.saved += x.elements * 4
    else:
        sums.keep(x)
    return sums.made(x.shape, 4 if full else x.size)


def _act(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    if op.get("inplace"):
        if op["f"] in INPLACE_BY_OUTPUT:
            sums.keep(x)
        else:
            sums.saved += x.elements * x.size  # autograd keeps a copy of what is overwritten
        return x
    sums.saved += x.elements * x.size * SEVERAL.get(op["f"], 0)
    y = sums.made(x.shape, x.size)
    sums.keep(y if op["f"] in BY_OUTPUT else x)
    return y


def _dropout(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    if not op["p"]:
        return x
    sums.saved += x.elements
    return sums.made(x.shape, x.size)


def _pool(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    k = op["k"]
    if not k:  # a mean, whose backward pass needs only the size
        return sums.made((x.shape[0], *(1 for _ in x.shape[1:])), x.size)
    sums.keep(x)
    s, p = op.get("s", k), op.get("p", 0)
    y = sums.made((x.shape[0], *((side + 2 * p - k) // s + 1 for side in x.shape[1:])), x.size)
    if op["f"] == "max":
        sums.saved += y.elements * 8
    return y


def _upsample(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    return sums.made((x.shape[0], *(side * op["scale"] for side in x.shape[1:])), x.size)


def _embed(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    size = op["vocabulary"] * op["out"]
    if not (op.get("tied") and sums.embedding):
        sums.weights += size
        sums.embedding = sums.embedding or size
    return sums.made((*x.shape, op["out"]), sums.size)


def _positions(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    sums.weights += op["length"] * x.shape[-1]
    return sums.made(x.shape, x.size)


def _attention(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    length, width = x.shape
    heads = op["heads"]
    narrow = width // heads * (op.get("kv", 0) or heads)
    source = sums.memory if op.get("cross") and sums.memory is not None else x
    style, bias = op.get("style", "split"), bool(op.get("bias", True))
    if style in ("fused", "conv1d") and not op.get("cross"):
        sums.product(x, width + 2 * narrow, bias)
    else:
        sums.product(x, width, bias)
        sums.product(source, narrow, bias)
        sums.product(source, narrow, bias)
    sums.saved += (length + 2 * source.shape[0]) * width * sums.low
    pairs = heads * length * source.shape[0]
    sums.products += 4.0 * pairs * (width // heads)
    if op.get("how", "sdpa") == "eager" and style != "torch":
        sums.largest = max(sums.largest, pairs)
        sums.traffic += 4 * pairs * 4
        sums.saved += pairs * (4 + (2 if sums.low == 2 else 0) + (sums.low + 1 if op.get("dropout") else 0))
    return sums.product(sums.made(x.shape, sums.low), width, bias)


def _branches(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    parts = [sums.run(body, x) for body in op["bodies"]]
    size = max(part.size for part in parts)
    if op["op"] == "cat":
        if len({part.shape[1:] for part in parts}) > 1:
            raise Unfit("branches of different sizes meet")
        return sums.made((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), size)
    if op["op"] == "mul":
        for part in parts:
            sums.keep(part)
    elif len({part.shape for part in parts}) > 1:
        raise Unfit("branches of different sizes meet")
    return sums.made(max((part.shape for part in parts), key=math.prod), size)


def _block(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    if not sums.config.checkpointing:
        return sums.run(op["body"], x)
    sums.keep(x)
    before = sums.saved
    y = sums.run(op["body"], x)
    sums.inner = max(sums.inner, sums.saved - before)
    sums.saved = before
    y.held = False
    return y


def _seq2seq(sums: ProgramSums, op: Op, x: Flow) -> Flow:
    sums.memory = sums.run(op["encoder"], x)
    return sums.run(op["decoder"], Flow((sums.config.target,), 8, held=True))


def _reshaped(shape: Callable[[Flow], tuple[int, ...]]) -> Step:
    """A view: no new tensor."""
    return lambda _sums, _op, x: Flow(shape(x), x.size, x.held)


STEPS: dict[str, Step] = {
    "linear": _linear, "conv": _conv, "deconv": _deconv, "norm": _norm, "act": _act, "dropout": _dropout,
    "conv1d": lambda sums, op, x: sums.product(x, op["out"], True),
    "pool": _pool, "upsample": _upsample, "embed": _embed, "positions": _positions, "attention": _attention,
    "add": _branches, "cat": _branches, "mul": _branches, "block": _block, "seq2seq": _seq2seq,
    "flatten": _reshaped(lambda x: (x.elements,)),
    "tokens": _reshaped(lambda x: (math.prod(x.shape[1:]), x.shape[0])),
    "rows": _reshaped(lambda x: (*x.shape[1:], x.shape[0])),
    "image": _reshaped(lambda x: (x.shape[-1], *x.shape[:-1])),
    "mean": _reshaped(lambda x: (x.shape[-1],)),
    "first": _reshaped(lambda x: (x.shape[-1],)),
}  # fmt: skip


class RoughEstimate:
    """A rough estimate for one model and any batch, to steer the generator and to reserve memory. No estimator uses it.
    Everything except the weights grows with the batch, so the batch for a footprint follows by division."""

    def __init__(self, config: Config, common: Common) -> None:
        self.sums = sums = ProgramSums(config)
        self.common = common
        self.lasting = sums.weights * sums.size * (1 + OPTIMIZERS[config.optimizer][1])
        self.updating = sums.weights * sums.size * 2  # gradients, and temporary tensors of the optimizer
        self.casting = sums.weights * 2 if sums.amp else 0
        self.sample = sums.saved + sums.inner + 2 * sums.largest * sums.low

    def mib(self, batch: int) -> int:
        peak = max(self.sample * batch + self.casting, self.updating)
        return round(self.common.context_mib + self.common.slack * (self.lasting + peak) / MIB)

    def batch_for(self, mib: float) -> float:
        """Batch size for an amount of memory; below 1 if the weights alone need more."""
        room = (mib - self.common.context_mib) * MIB / self.common.slack - self.lasting - self.casting
        return room / self.sample

    def step_s(self, batch: int) -> float:
        """Forward and backward pass have three times the operations of the forward pass."""
        sums, rates = self.sums, self.common.rates
        convolutions = sums.convolutions / (rates["convolution"] * (2 if sums.low == 2 else 1))
        compute = sums.products / rates[sums.config.precision] + convolutions + sums.grouped / rates["grouped"]
        return batch * (3 * compute / 1e12 + 6 * sums.traffic / 3e12) + sums.weights * 40 / 3e12

    def most(self) -> int:
        """The largest batch within the limits."""
        elements = self.common.tensor_elements // max(1, self.sums.largest)
        inputs = self.common.input_elements // math.prod(self.sums.config.input)
        fixed = self.step_s(0)
        steps = int((self.common.step_s - fixed) / max(1e-12, self.step_s(1) - fixed))
        return min(elements, inputs, steps)
