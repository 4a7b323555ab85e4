"""Builds the model of a config. Stdlib and torch only: the interpreter that has torch need not have carma.

A program is a list of ops; x is the tensor between them. Shapes are found by running each part on the meta device,
where nothing is computed, so an op has only the fields that are chosen. `times` repeats any op, each time with its own
weights.

  linear {out, bias, tied}            tied: the weight of the first embedding
  conv {out, k, s, p, d, groups, bias}  groups 0: as many as channels (depthwise); p left out: the size is kept
  conv1d {out}                        a linear layer in the manner of GPT-2: weight transposed, always a bias
  deconv {out, k, s}                  transposed convolution
  norm {f, groups}                    f: batch, layer, rms, group, instance
  act {f, inplace, functional}        f: a name of ACTIVATIONS; functional: no module of its own, as in F.relu
  dropout {p, functional}
  pool {f, k, s, p}                   f: max, avg; k 0: over all of the image
  upsample {scale, f}
  flatten, tokens (an image to a sequence), mean and first (of a sequence)
  rows, image                         channels to the last place, and back
  embed {vocabulary, out, tied}       tied: the first embedding itself
  positions {length}
  attention {heads, kv, style, how, causal, dropout, cross}
                                      style: split, fused, conv1d, torch; how: sdpa, eager; cross: over the encoder
  add, cat, mul {bodies}              branches and how they are joined; an empty branch is x itself
  block {body}                        computed again in the backward pass where the config says checkpointing
  seq2seq {encoder, decoder}
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ACTIVATIONS = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "selu": nn.SELU, "celu": nn.CELU,
    "gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": nn.Softplus,
    "softsign": nn.Softsign, "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "hardtanh": nn.Hardtanh,
    "logsigmoid": nn.LogSigmoid, "tanhshrink": nn.Tanhshrink, "prelu": nn.PReLU,
}  # fmt: skip
VIEWS = {
    "tokens": lambda image: image.flatten(2).transpose(1, 2),
    "rows": lambda image: image.movedim(1, -1),
    "image": lambda rows: rows.movedim(-1, 1),
    "mean": lambda tokens: tokens.mean(1),
    "first": lambda tokens: tokens[:, 0],
}


class Conv1D(nn.Module):
    """GPT-2's linear layer, with the name and the attributes that it has in Hugging Face's library."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}"

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Chain(nn.Module):
    """Steps in sequence. A step that is no module does not appear in a summary, like functional code."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps
        for number, step in enumerate(steps):
            if isinstance(step, nn.Module):
                self.add_module(str(number), step)

    def forward(self, x: Any, memory: Any = None) -> Any:
        for step in self.steps:
            x = step(x, memory) if isinstance(step, Chain | Branches | Block | Attention) else step(x)
        return x


class Block(Chain):
    def __init__(self, steps: list[Any], recompute: bool) -> None:
        super().__init__(steps)
        self.recompute = recompute

    def forward(self, x: Any, memory: Any = None) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(super().forward, x, memory, use_reentrant=False)
        return super().forward(x, memory)


class Branches(nn.Module):
    def __init__(self, how: str, bodies: list[Chain]) -> None:
        super().__init__()
        self.how = how
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x: Any, memory: Any = None) -> Any:
        return meet(self.how, [body(x, memory) for body in self.bodies])


def meet(how: str, parts: list[Any]) -> Any:
    if how == "cat":
        return torch.cat(parts, 1)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part if how == "add" else whole * part
    return whole


class Seq2Seq(nn.Module):
    def __init__(self, encoder: Chain, decoder: Chain) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x: Any, target: Any) -> Any:
        return self.decoder(target, self.encoder(x))


class Attention(nn.Module):
    """Self-attention, or attention over the encoder's output (`cross`)."""

    def __init__(self, op: dict[str, Any], width: int, memory_width: int) -> None:
        super().__init__()
        self.heads, self.kv = op["heads"], op.get("kv") or op["heads"]
        self.each = width // self.heads
        self.how, self.causal, self.cross = op.get("how", "sdpa"), op.get("causal", False), op.get("cross", False)
        self.p = op.get("dropout", 0.0)
        style, bias = op.get("style", "split"), op.get("bias", True)
        narrow = self.kv * self.each
        if style == "torch":
            self.whole = nn.MultiheadAttention(width, self.heads, self.p, batch_first=True)
            return
        if style == "fused" and not self.cross:
            self.qkv: nn.Module = nn.Linear(width, width + 2 * narrow, bias=bias)
        elif style == "conv1d" and not self.cross:
            self.qkv = Conv1D(width + 2 * narrow, width)
        else:
            self.q = nn.Linear(width, width, bias=bias)
            self.k = nn.Linear(memory_width if self.cross else width, narrow, bias=bias)
            self.v = nn.Linear(memory_width if self.cross else width, narrow, bias=bias)
        self.out = Conv1D(width, width) if style == "conv1d" else nn.Linear(width, width, bias=bias)
        if self.how == "eager" and op.get("module_dropout"):
            self.drop = nn.Dropout(self.p)

    def forward(self, x: Any, memory: Any = None) -> Any:
        source = memory if self.cross else x
        if hasattr(self, "whole"):
            hidden = _mask(x) if self.causal and not self.cross else None
            return self.whole(x, source, source, need_weights=False, attn_mask=hidden, is_causal=hidden is not None)[0]
        if hasattr(self, "qkv"):
            narrow = self.kv * self.each
            q, k, v = self.qkv(x).split([self.heads * self.each, narrow, narrow], -1)
        else:
            q, k, v = self.q(x), self.k(source), self.v(source)
        q, k, v = self._apart(q, self.heads), self._apart(k, self.kv), self._apart(v, self.kv)
        y = self._sdpa(q, k, v) if self.how == "sdpa" else self._eager(q, k, v)
        return self.out(y.transpose(1, 2).reshape(x.size(0), x.size(1), -1))

    def _apart(self, x: Any, heads: int) -> Any:
        x = x.view(x.size(0), x.size(1), heads, self.each).transpose(1, 2)
        return x.repeat_interleave(self.heads // heads, 1) if heads != self.heads else x

    def _sdpa(self, q: Any, k: Any, v: Any) -> Any:
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal and not self.cross)

    def _eager(self, q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.each)
        if self.causal and not self.cross:
            scores = scores.masked_fill(_mask(q), float("-inf"))
        weights = F.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        weights = self.drop(weights) if hasattr(self, "drop") else F.dropout(weights, self.p, self.training)
        return weights @ v


def _mask(x: Any) -> Any:
    return torch.ones(x.size(-2), x.size(-2), dtype=torch.bool, device=x.device).triu(1)


class Positions(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(length, width)

    def forward(self, x: Any) -> Any:
        return x + self.embedding(torch.arange(x.size(1), device=x.device))


class Builder:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.embedding: nn.Embedding | None = None
        self.memory: Any = None

    def chain(self, program: list[dict[str, Any]], x: Any, block: bool = False) -> tuple[Chain, Any]:
        steps: list[Any] = []
        for op in program:
            for _ in range(op.get("times", 1)):
                step, x = self.step(op, x)
                steps.append(step)
        return (Block(steps, self.config.get("checkpointing", False)) if block else Chain(steps)), x

    def step(self, op: dict[str, Any], x: Any) -> tuple[Any, Any]:
        match op["op"]:
            case "block":
                return self.chain(op["body"], x, block=True)
            case "add" | "cat" | "mul":
                parts = [self.chain(body, x) for body in op["bodies"]]
                return Branches(op["op"], [part for part, _ in parts]), meet(op["op"], [y for _, y in parts])
            case "attention":
                step = Attention(op, x.size(-1), x.size(-1) if self.memory is None else self.memory.size(-1))
                return step, x
            case "seq2seq":
                encoder, self.memory = self.chain(op["encoder"], x)
                decoder, y = self.chain(op["decoder"], torch.empty(2, self.config["target"], dtype=torch.long))
                return Seq2Seq(encoder, decoder), y
        step = self.simple(op, x)
        return step, step(x)

    def simple(self, op: dict[str, Any], x: Any) -> Any:
        width = x.size(1) if x.ndim >= 2 else 1
        last = x.size(-1)
        match op["op"]:
            case "linear":
                return self.linear(op, last)
            case "conv1d":
                return Conv1D(op["out"], last)
            case "conv" | "deconv":
                return convolution(op, width, x.ndim - 2)
            case "norm":
                return norm(op, x)
            case "act":
                return activation(op)
            case "dropout" if op.get("functional"):
                # No module, so it does not know whether the model trains; all runs of the collector train.
                return functools.partial(F.dropout, p=op["p"])
            case "dropout":
                return nn.Dropout(op["p"])
            case "pool":
                return pooling(op, x.ndim - 2)
            case "upsample":
                return nn.Upsample(scale_factor=op["scale"], mode=op.get("f", "nearest"))
            case "flatten":
                return nn.Flatten()
            case "embed" if op.get("tied") and self.embedding is not None:
                return self.embedding
            case "embed":
                made = nn.Embedding(op["vocabulary"], op["out"])
                self.embedding = self.embedding or made
                return made
            case "positions":
                return Positions(op["length"], last)
            case other if other in VIEWS:
                return VIEWS[other]
            case other:
                raise ValueError(f"there is no op {other!r}")

    def linear(self, op: dict[str, Any], width: int) -> nn.Linear:
        made = nn.Linear(width, op["out"], bias=op.get("bias", True))
        if op.get("tied"):
            if self.embedding is None or self.embedding.weight.shape != made.weight.shape:
                raise ValueError("a tied layer needs an embedding of its own size before it")
            made.weight = self.embedding.weight
        return made


def convolution(op: dict[str, Any], width: int, dims: int) -> nn.Module:
    k, s = op.get("k", 3), op.get("s", 1)
    if op["op"] == "deconv":
        return getattr(nn, f"ConvTranspose{dims}d")(width, op["out"], k, s)
    d = op.get("d", 1)
    p = op["p"] if "p" in op else d * (k - 1) // 2
    groups = op.get("groups", 1) or width
    return getattr(nn, f"Conv{dims}d")(width, op.get("out") or width, k, s, p, d, groups, op.get("bias", True))


def norm(op: dict[str, Any], x: Any) -> nn.Module:
    width, dims = (x.size(1), x.ndim - 2) if x.ndim > 1 else (x.size(0), 0)
    match op["f"]:
        case "batch":
            return getattr(nn, f"BatchNorm{max(1, dims)}d")(width)
        case "instance":
            return getattr(nn, f"InstanceNorm{dims}d")(width, affine=True)
        case "group":
            return nn.GroupNorm(math.gcd(op.get("groups", 32), width), width)
        case "rms":
            return nn.RMSNorm(x.size(-1))
        case "layer":
            return nn.LayerNorm(x.size(-1))
        case other:
            raise ValueError(f"there is no norm {other!r}")


def activation(op: dict[str, Any]) -> Any:
    made = ACTIVATIONS[op["f"]](**({"inplace": True} if op.get("inplace") else {}))
    return made.forward if op.get("functional") and op["f"] != "prelu" else made  # `forward` alone calls no hook


def pooling(op: dict[str, Any], dims: int) -> nn.Module:
    if not op["k"]:
        return getattr(nn, f"AdaptiveAvgPool{dims}d")(1)
    return getattr(nn, f"{op['f'].title()}Pool{dims}d")(op["k"], op.get("s", op["k"]), op.get("p", 0))


def build(config: dict[str, Any]) -> nn.Module:
    """Builds the model on the meta device: weights have shapes and no memory. `torch.nn.Module.to_empty` gives them
    some."""
    with torch.device("meta"), torch.no_grad():
        x = torch.empty(2, *config["input"], dtype=torch.long if config.get("vocabulary") else torch.float)
        made, _ = Builder(config).chain(list(config["model"]), x)
    only = made.steps[0] if len(made.steps) == 1 else None
    return only if isinstance(only, Seq2Seq) else made
