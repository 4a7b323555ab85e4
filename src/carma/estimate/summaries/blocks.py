"""What the walk over a printed model knows of blocks: where branches begin and end, and what some are known to do.

The names are those of torchvision, timm and Hugging Face; a block that is called otherwise is walked as it is printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from carma.estimate.summaries.kinds import KINDS_KEPT
from carma.estimate.summaries.shapes import Shape, channels_taken, features_taken
from carma.estimate.summaries.tree import Node

TRANSPARENT = ("ModuleList", "ModuleDict")  # never called themselves: their modules belong to the block around
Wanted = tuple[int | None, int | None]  # channels, features; None where any will do
_ASIDE = re.compile(
    r"\w*Rotary\w*Embedding|\w*Loss|\w*Rel(ative)?Pos\w*|\w*Pos\w*(Rel|Bias)\w*"
)  # what they make is not handed on
_WORDS = re.compile(r"\w*Embedding")
_GATES = ("Sigmoid", "Hardsigmoid")
_SCALES = re.compile(r"SqueezeExcit\w*|SE(Module|Layer|Block|Unit)?")
_BRANCH = re.compile(r"branch\w*|downsample\w*|shortcut\w*|skip\w*")
_ATTENTION_DROPOUT = re.compile(r"attn_drop\w*|attention_dropout")
_CANNOT = (KeyError, ValueError, IndexError)


@dataclass(slots=True)
class Block:
    """A module that is being called: with what, what its modules have made so far, and where its branches ended."""

    kind: str
    entered: Shape
    made: list[Shape] = field(default_factory=list)
    ends: list[Shape] = field(default_factory=list)


def is_branch(name: str) -> bool:
    return _BRANCH.fullmatch(name) is not None


@lru_cache(KINDS_KEPT)
def looks_up(kind: str) -> bool:
    return _WORDS.fullmatch(kind) is not None


def is_aside(node: Node, block: Block) -> bool:
    """It makes nothing that is kept: a table of places, or the dropout of attention weights, which fused attention does
    without."""
    if node.kind == "Dropout":
        name = node.names[0]
        is_inside = name == "dropout" and block.kind.endswith("SelfAttention")
        return is_inside or _ATTENTION_DROPOUT.fullmatch(name) is not None
    return _hands_nothing_on(node.kind)


@lru_cache(KINDS_KEPT)
def _hands_nothing_on(kind: str) -> bool:
    return _ASIDE.fullmatch(kind) is not None


def inner_activation(name: str, block: Block, now: Shape) -> Shape | None:
    """Transformers print the activation of two linear layers behind both; it is called between them."""
    if not name.startswith("act") or len(now) != 2 or block.kind == "Sequential":
        return None
    wider = [shape for shape in block.made if shape[:-1] == now[:-1] and shape[-1] > now[-1]]
    return wider[-1] if wider else None


def entering(kind: str, now: Shape) -> Shape:
    """Some blocks begin with something that is no module."""
    if kind.endswith("Pooler") and len(now) == 2:
        return now[1:]  # of a language model: it takes the first word only
    if kind.endswith("PatchMerging") and len(now) == 3:
        return (-(-now[0] // 2), -(-now[1] // 2), 4 * now[2])  # four neighbours become one
    return now


def leaving(node: Node, block: Block, now: Shape) -> Shape:
    """What a block is known to hand on where that is not what its last printed module made."""
    if node.kind.endswith("PatchMerging") and block.made:
        return block.made[0]  # its norm is printed last and called first
    return block.entered if _is_gate(node, block.entered, now) else now


def _is_gate(node: Node, entered: Shape, made: Shape) -> bool:
    """It makes one number a channel and scales its input with them (squeeze and excitation)."""
    if len(made) < 2 or made[0] != entered[0] or prod(made[1:]) != 1 or prod(entered[1:]) == 1:
        return False
    return bool(_SCALES.fullmatch(node.kind)) or (node.kind != "Sequential" and node.children[-1].kind in _GATES)


def joined(block: Block, now: Shape, after: Wanted) -> Shape | None:
    """What the block hands on where the next layer takes its branches side by side; its input may be one of them. Of
    two places the first may be a length, which features say nothing of: only who wants channels tells."""
    if not block.ends or len(now) < 2:
        return None
    wanted = after if len(now) > 2 else after[:1]
    channels = sum(shape[0] for shape in block.ends if shape[1:] == now[1:]) + now[0]
    for whole in (channels, channels + block.entered[0]):
        if whole in wanted and whole != now[0]:
            return (whole, *now[1:])
    return None


def wanted_by(nodes: Sequence[Node]) -> Wanted:
    """By the first of these that wants something."""
    for node in nodes:
        for leaf in leaves(node):
            try:
                channels, features = channels_taken(leaf.kind, leaf.printed), features_taken(leaf.kind, leaf.printed)
            except _CANNOT:
                return (None, None)
            if channels is not None or features:
                return (channels, prod(features) if features else None)
    return (None, None)


def wanted_behind(children: Sequence[Node], after: Wanted) -> list[Wanted]:
    """What is wanted behind each of them: by the next that wants something, or behind all."""
    found: list[Wanted] = []
    for child in reversed(children):
        found.append(after)
        own = wanted_by((child,))
        after = own if own != (None, None) else after
    return found[::-1]


def is_layer_itself(node: Node) -> bool:
    """Beside the modules inside it: a norm that holds its activation."""
    return bool(node.own and node.printed)


def leaves(node: Node) -> Iterator[Node]:
    if not node.children or is_layer_itself(node):
        yield node
    for child in node.children:
        yield from leaves(child)


def modules(node: Node) -> int:
    """As many as it stands for, itself and its names counted."""
    return len(node.names) * (1 + sum(modules(child) for child in node.children))
