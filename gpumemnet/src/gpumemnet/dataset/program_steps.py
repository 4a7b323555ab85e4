"""What each op of `inside/build.py` adds to a walk, by what torch's backward passes keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpumemnet.dataset.config import Config, Op
from gpumemnet.dataset.program_memory import Flow, Step, Unfit, Walk
from gpumemnet.dataset.ranges import Common

# Their backward passes need the output; all others need the input, or a copy of it if they work in place.
BY_OUTPUT = ("relu", "tanh", "sigmoid")
INPLACE_BY_OUTPUT = (*BY_OUTPUT, "elu", "selu", "celu", "leaky_relu")
SEVERAL = {
    "logsigmoid": 1,
    "softsign": 2,
    "tanhshrink": 1,
}  # number of tensors that their parts keep


def _linear(walk: Walk, op: Op, x: Flow) -> Flow:
    weights = walk.weights
    y = walk.product(x, _whole(op["out"]), bool(op.get("bias", True)))
    if op.get("tied"):
        if x.shape[-1] * _whole(op["out"]) != walk.embedding:
            raise Unfit("a tied layer of another size than the embedding")
        walk.weights = weights + (_whole(op["out"]) if op.get("bias", True) else 0)
    return y


def _conv(walk: Walk, op: Op, x: Flow) -> Flow:
    width, sides = x.shape[0], x.shape[1:]
    k, s, d = _whole(op.get("k", 3)), _whole(op.get("s", 1)), _whole(op.get("d", 1))
    p = _whole(op["p"]) if "p" in op else d * (k - 1) // 2
    out, groups = _whole(op.get("out") or width), _whole(op.get("groups", 1)) or width
    if width % groups or out % groups:
        raise Unfit(f"{groups} groups of {width} and {out} channels")
    walk.feed(x)
    walk.layers += 1
    each = width // groups * k ** len(sides)
    walk.weights += each * out + (out if op.get("bias", True) else 0)
    y = walk.made((out, *((side + 2 * p - d * (k - 1) - 1) // s + 1 for side in sides)), walk.low)
    if groups > 1:
        walk.grouped += 2.0 * y.elements * each
    else:
        walk.convolutions += 2.0 * y.elements * each
    return y


def _deconv(walk: Walk, op: Op, x: Flow) -> Flow:
    k, s, out = _whole(op.get("k", 3)), _whole(op.get("s", 1)), _whole(op["out"])
    walk.feed(x)
    walk.layers += 1
    walk.weights += x.shape[0] * out * k ** len(x.shape[1:]) + out
    walk.convolutions += 2.0 * x.elements * out * k ** len(x.shape[1:])
    return walk.made((out, *((side - 1) * s + k for side in x.shape[1:])), walk.low)


def _norm(walk: Walk, op: Op, x: Flow) -> Flow:
    kind = op["f"]
    if kind == "batch" and math.prod(x.shape[1:]) == 1:
        walk.lonely = True
    if kind == "instance" and math.prod(x.shape[1:]) == 1:
        raise Unfit("an instance norm over a single figure")
    walk.weights += 2 * (x.shape[-1] if kind in ("layer", "rms") else x.shape[0])
    full = walk.amp and kind in ("layer", "group", "rms")  # computed in full precision under autocast
    if full and x.size == 2:
        walk.saved += x.elements * 4
    else:
        walk.keep(x)
    return walk.made(x.shape, 4 if full else x.size)


def _act(walk: Walk, op: Op, x: Flow) -> Flow:
    if op.get("inplace"):
        if op["f"] in INPLACE_BY_OUTPUT:
            walk.keep(x)
        else:
            walk.saved += x.elements * x.size  # autograd keeps a copy of what is overwritten
        return x
    by_output = op["f"] in BY_OUTPUT
    walk.saved += x.elements * x.size * SEVERAL.get(str(op["f"]), 0)
    if not by_output:
        walk.keep(x)
    y = walk.made(x.shape, x.size)
    if by_output:
        walk.keep(y)
    return y


def _dropout(walk: Walk, op: Op, x: Flow) -> Flow:
    if not op["p"]:
        return x
    walk.saved += x.elements
    return walk.made(x.shape, x.size)


def _pool(walk: Walk, op: Op, x: Flow) -> Flow:
    k = _whole(op["k"])
    if not k:  # a mean, whose backward pass needs only the size
        return walk.made((x.shape[0], *(1 for _ in x.shape[1:])), x.size)
    walk.keep(x)
    s, p = _whole(op.get("s", k)), _whole(op.get("p", 0))
    y = walk.made((x.shape[0], *((side + 2 * p - k) // s + 1 for side in x.shape[1:])), x.size)
    if op["f"] == "max":
        walk.saved += y.elements * 8
    return y


def _upsample(walk: Walk, op: Op, x: Flow) -> Flow:
    return walk.made((x.shape[0], *(side * _whole(op["scale"]) for side in x.shape[1:])), x.size)


def _embed(walk: Walk, op: Op, x: Flow) -> Flow:
    size = _whole(op["vocabulary"]) * _whole(op["out"])
    if not (op.get("tied") and walk.embedding):
        walk.weights += size
        walk.embedding = walk.embedding or size
    return walk.made((*x.shape, _whole(op["out"])), 2 if walk.config.precision == "bf16" else 4)


def _positions(walk: Walk, op: Op, x: Flow) -> Flow:
    walk.weights += _whole(op["length"]) * x.shape[-1]
    return walk.made(x.shape, x.size)


def _attention(walk: Walk, op: Op, x: Flow) -> Flow:
    length, width = x.shape
    heads = _whole(op["heads"])
    narrow = width // heads * (_whole(op.get("kv", 0)) or heads)
    source = walk.memory if op.get("cross") and walk.memory is not None else x
    style, bias = op.get("style", "split"), bool(op.get("bias", True))
    if style in ("fused", "conv1d") and not op.get("cross"):
        walk.product(x, width + 2 * narrow, bias)
    else:
        walk.product(x, width, bias)
        walk.product(source, narrow, bias)
        walk.product(source, narrow, bias)
    walk.saved += (length + 2 * source.shape[0]) * width * walk.low
    pairs = heads * length * source.shape[0]
    walk.products += 4.0 * pairs * (width // heads)
    if op.get("how", "sdpa") == "eager" and style != "torch":
        walk.largest = max(walk.largest, pairs)
        walk.traffic += 4 * pairs * 4
        walk.saved += pairs * (4 + (2 if walk.low == 2 else 0) + (walk.low + 1 if op.get("dropout") else 0))
    return walk.product(walk.made(x.shape, walk.low), width, bias)


def _branches(walk: Walk, op: Op, x: Flow) -> Flow:
    bodies: Sequence[Sequence[Op]] = op["bodies"]  # type: ignore[assignment]
    parts = [walk.run(body, x) for body in bodies]
    size = max(part.size for part in parts)
    if op["op"] == "cat":
        if len({part.shape[1:] for part in parts}) > 1:
            raise Unfit("branches of different sizes meet")
        return walk.made((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), size)
    if op["op"] == "mul":
        for part in parts:
            walk.keep(part)
    elif len({part.shape for part in parts}) > 1:
        raise Unfit("branches of different sizes meet")
    return walk.made(max((part.shape for part in parts), key=math.prod), size)


def _block(walk: Walk, op: Op, x: Flow) -> Flow:
    body: Sequence[Op] = op["body"]  # type: ignore[assignment]
    if not walk.config.checkpointing:
        return walk.run(body, x)
    walk.keep(x)
    before = walk.saved
    y = walk.run(body, x)
    walk.inner = max(walk.inner, walk.saved - before)
    walk.saved = before
    y.held = False
    return y


def _seq2seq(walk: Walk, op: Op, x: Flow) -> Flow:
    encoder: Sequence[Op] = op["encoder"]  # type: ignore[assignment]
    decoder: Sequence[Op] = op["decoder"]  # type: ignore[assignment]
    walk.memory = walk.run(encoder, x)
    return walk.run(decoder, Flow((walk.config.target,), 8, held=True))


def _reshaped(shape: Callable[[Flow], tuple[int, ...]]) -> Step:
    """A view: no new tensor."""
    return lambda _walk, _op, x: Flow(shape(x), x.size, x.held)


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


STEPS: dict[str, Step] = {
    "linear": _linear, "conv": _conv, "deconv": _deconv, "norm": _norm, "act": _act, "dropout": _dropout,
    "conv1d": lambda walk, op, x: walk.product(x, _whole(op["out"]), True),
    "pool": _pool, "upsample": _upsample, "embed": _embed, "positions": _positions, "attention": _attention,
    "add": _branches, "cat": _branches, "mul": _branches, "block": _block, "seq2seq": _seq2seq,
    "flatten": _reshaped(lambda x: (x.elements,)),
    "tokens": _reshaped(lambda x: (math.prod(x.shape[1:]), x.shape[0])),
    "rows": _reshaped(lambda x: (*x.shape[1:], x.shape[0])),
    "image": _reshaped(lambda x: (x.shape[-1], *x.shape[:-1])),
    "mean": _reshaped(lambda x: (x.shape[-1],)),
    "first": _reshaped(lambda x: (x.shape[-1],)),
}  # fmt: skip

MIB = 1 << 20
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}


class Guess:
    """A rough estimate for one model and any batch, to steer the generator and to reserve memory. No estimator uses it.
    Everything except the weights grows with the batch, so the batch for a footprint follows by division."""

    def __init__(self, config: Config, common: Common) -> None:
        self.walk = walk = Walk(config, STEPS)
        self.common = common
        self.precision = config.precision
        each = 2 if config.precision == "bf16" else 4
        self.lasting = walk.weights * each * (1 + SLOTS[config.optimizer])
        self.updating = walk.weights * each * 2  # gradients, and temporary tensors of the optimizer
        self.casting = walk.weights * 2 if walk.amp else 0
        self.sample = walk.saved + walk.inner + 2 * walk.largest * walk.low

    def mib(self, batch: int) -> int:
        peak = max(self.sample * batch + self.casting, self.updating)
        return round(self.common.context_mib + self.common.slack * (self.lasting + peak) / MIB)

    def batch_for(self, mib: float) -> float:
        """Below 1 if the weights alone need more."""
        room = (mib - self.common.context_mib) * MIB / self.common.slack - self.lasting - self.casting
        return room / self.sample

    def step_s(self, batch: int) -> float:
        """Forward and backward pass have three times the operations of the forward pass."""
        walk, rates = self.walk, self.common.rates
        low = self.precision in ("bf16-amp", "fp16-amp", "bf16")
        convolution = rates["convolution"] * (2 if low else 1)
        compute = (
            walk.products / rates[self.precision] + walk.convolutions / convolution + walk.grouped / rates["grouped"]
        )
        return batch * (3 * compute / 1e12 + 6 * walk.traffic / 3e12) + walk.weights * 40 / 3e12

    def most(self) -> int:
        """The largest batch within the limits."""
        elements = self.common.tensor_elements // max(1, self.walk.largest)
        inputs = self.common.input_elements // math.prod(self.walk.config.input)
        fixed = self.step_s(0)
        steps = int((self.common.step_s - fixed) / max(1e-12, self.step_s(1) - fixed))
        return min(elements, inputs, steps)
