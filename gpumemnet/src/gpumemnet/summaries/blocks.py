"""Rules about blocks for `shape_inference`: where branches begin and end, and what known blocks return.

The names are those of torchvision, timm and Hugging Face; other blocks are treated as printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isqrt, prod

from gpumemnet.summaries.module_parameters import integers, named
from gpumemnet.summaries.module_tree import Node
from gpumemnet.summaries.shapes import (
    Shape,
    changes_shape,
    is_convolution,
    is_whole_pool,
    keeps_channels,
    places_of,
    taken,
)

TRANSPARENT = ("ModuleList", "ModuleDict")  # never called themselves: their modules belong to the surrounding block
OF_HEADS = ("pool_q", "pool_k", "pool_v")  # queries, keys and values of each head
Wanted = tuple[int | None, int | None]  # channels, features; None if any fit
is_embedding = named(r"\w*Embedding")
is_branch = named(r"branch\w*|downsample\w*|shortcut\w*|skip\w*|conv_(1x1|kxk|scale)|pool_[qkv]|sr")
is_attention = named(r"\w*(Attention|Attn)\w*")
# Their output is not used by the next module.
_is_unused = named(r"\w*Rotary\w*Embedding|\w*Loss|\w*Rel(ative)?Pos\w*|\w*Pos\w*(Rel|Bias)\w*")
_is_scale = named(r"SqueezeExcit\w*|(Effective)?SE(Module|Layer|Block|Unit)?")
_is_attention_dropout = named(r"attn_drop\w*|attention_dropout")
_is_dense_of_t5 = named(r"\w*T5Dense(Gated)?ActDense")
_GATES = ("Sigmoid", "Hardsigmoid")
_SELECTS = "SelectiveKernelAttn"
_SIDE_HEAD = "InceptionAux"  # of torchvision: it takes an earlier block's output, and is trained beside the last one
_DISTANCES = "relative_attention_bias"
_QUERIES = 4  # of Hiera, two by two, become one
_CANNOT = (KeyError, ValueError, IndexError)


@dataclass(slots=True)
class OpenBlock:
    """A module that is being called: its input, the outputs of its modules so far, and where its branches ended."""

    kind: str
    entered: Shape
    made: list[Shape] = field(default_factory=list)
    ends: list[Shape] = field(default_factory=list)
    is_split: bool = False  # some of its modules take a part of the channels
    is_last: bool = False  # its input has channels last
    queries: Shape = ()  # of attention, if they are fewer than its input
    width: int = 0  # of attention's output


def begins_branch(node: Node) -> bool:
    return is_branch(node.names[0]) or node.kind.endswith(_SIDE_HEAD)


def is_bypass(node: Node, before: Shape, made: Shape, wanted: int | None) -> bool:
    """Whether the branch is printed before the layers that it bypasses, which take its input. An auxiliary head has no
    successor."""
    name = node.names[0]
    if name.startswith("shortcut") or node.kind.endswith(_SIDE_HEAD):
        return True
    return name.startswith("downsample") and wanted == before[0] != made[0] and len(before) == len(made)


def is_aside(node: Node, block: OpenBlock) -> bool:
    """Whether its output is not used: a table of positions, or the dropout of attention weights, which fused attention
    does not have."""
    name = node.names[0]
    if not node.is_called or (is_embedding(node.kind) and name == _DISTANCES):
        return True
    if node.kind == "Dropout":
        # The attention of T5 is inside a `...LayerSelfAttention`, whose dropout is that of the output.
        is_inside = name == "dropout" and block.kind.endswith("SelfAttention")
        is_inside = is_inside and not block.kind.endswith("LayerSelfAttention")
        return is_inside or _is_attention_dropout(name)
    return _is_unused(node.kind)


def inner_activation(name: str, block: OpenBlock, now: Shape) -> Shape | None:
    """Transformers print the activation of two linear layers after both and call it in between, as T5 its dropout."""
    is_inner = name.startswith("act") or (name == "dropout" and _is_dense_of_t5(block.kind))
    if not is_inner or len(now) != 2 or block.kind == "Sequential":
        return None
    wider = [shape for shape in block.made if shape[:-1] == now[:-1] and shape[-1] > now[-1]]
    return wider[-1] if wider else None


def last_of_maps(node: Node) -> int:
    """The line of the last module that takes images; later modules may take rows. -1 if there is none."""
    for child in reversed(node.children):
        found = last_of_maps(child)
        if found >= 0:
            return found if len(child.names) == 1 else _last_line(child)
    is_map = places_of(node.kind) == 2 or is_whole_pool(node.kind) or node.kind.endswith(("PatchMerging", "Unfold"))
    return node.line if is_map else -1


def _last_line(node: Node) -> int:
    while node.children:
        node = node.children[-1]
    return node.line


def input_of(node: Node, now: Shape) -> Shape:
    """The input after functions at the beginning of some blocks that are no modules."""
    kind = node.kind
    if kind.endswith("Pooler") and len(now) == 2:
        return now[1:]  # of a language model: it takes only the first word
    if kind.endswith(_SIDE_HEAD) and len(now) == 3:
        return _pooled_aside(node, now)
    if kind.endswith("PatchMerging") and len(now) == 3:
        return (-(-now[0] // 2), -(-now[1] // 2), 4 * now[2])  # four neighbours become one
    return (now[0], *(1 for _ in now[1:])) if _takes_means(node, now) else now


def _pooled_aside(node: Node, now: Shape) -> Shape:
    """Output of the pooling of an auxiliary head: in torchvision's GoogLeNet, means over as many places as its first
    linear layer takes; in Inception v3, over five by five places in steps of three."""
    inside = {child.names[0]: child for child in node.children}
    if "conv0" in inside:
        return (now[0], *(max(1, (size - 5) // 3 + 1) for size in now[1:]))
    products = [leaf.printed.get("1", "") for leaf in leaves(node) if is_convolution(leaf.kind)]
    taken = inside["fc1"].printed.get("in_features", "") if "fc1" in inside else ""
    if not (products and products[-1].isdecimal() and taken.isdecimal()):
        return now
    side = isqrt(int(taken) // int(products[-1]))
    return (now[0], side, side)


def _takes_means(node: Node, now: Shape) -> bool:
    """Whether it is squeeze and excitation without a pooling module: its gate returns as many channels as it takes."""
    if len(now) > 2 and node.kind == _SELECTS:
        return True
    if len(now) < 3 or node.kind == "Sequential" or node.children[-1].kind not in _GATES:
        return False
    inside = list(leaves(node))
    if any(changes_shape(leaf.kind) and leaf.kind != "Conv2d" for leaf in inside):
        return False
    products = [leaf.printed for leaf in inside if leaf.kind == "Conv2d"]
    if not products or any(integers(one.get("kernel_size", "")) != [1, 1] for one in products):
        return False
    ends, channels = (products[0].get("0"), products[-1].get("1")), str(now[0])
    is_squeezed = products[0].get("1") != channels
    return ends == (channels, channels) and (is_squeezed or _is_scale(node.kind))


def side_by_side(node: Node, now: Shape, wanted: int | None) -> bool:
    """Whether all its modules take its input: the next layer takes exactly their channels together."""
    if wanted is None or len(now) < 3 or wanted <= now[0] or node.kind == "Sequential" or len(node.children) < 2:
        return False
    total = 0
    for child in node.children:
        products = [leaf.printed for leaf in leaves(child) if is_convolution(leaf.kind)]
        if (products and products[0].get("0") != str(now[0])) or (not products and not keeps_channels(child.kind)):
            return False
        made = products[-1].get("1", "") if products else str(now[0])
        total += int(made) if made.isdecimal() else 0
    return total == wanted


def output_of(node: Node, block: OpenBlock, now: Shape) -> Shape:
    """The output of known blocks that is not that of their last printed module."""
    if node.kind.endswith("PatchMerging") and block.made and node.children[-1].kind.endswith("Norm"):
        return block.made[0]  # its norm is printed last and called first
    if node.kind == "Pooling" and block.made and node.children[-1].kind == "Linear":
        return block.made[0]  # the linear layer is for the class token
    if node.kind.endswith("MaskUnitAttention") and len(now) == 2 and _widens(node):
        return (max(1, now[0] // _QUERIES), now[1])
    if node.names[0] == "global_block" or node.kind == _SELECTS:
        return block.entered  # later blocks take its output by another path
    if block.is_last and len(now) == len(block.entered) > 2 and block.width and is_attention(node.kind):
        return (*(block.queries or block.entered)[:-1], block.width)
    return block.entered if _is_gate(node, block.entered, now) else now


def _widens(node: Node) -> bool:
    """Whether queries, keys and values are wider than the input: a new stage begins, with fewer queries."""
    first = node.children[0].printed
    return integers(first.get("out_features", "")) != [3 * one for one in integers(first.get("in_features", ""))]


def _is_gate(node: Node, entered: Shape, made: Shape) -> bool:
    """Whether it scales its input with one number for each channel (squeeze and excitation)."""
    if len(made) < 2 or made[0] != entered[0] or prod(made[1:]) != 1 or prod(entered[1:]) == 1:
        return False
    return _is_scale(node.kind) or (node.kind != "Sequential" and node.children[-1].kind in _GATES)


def joined(block: OpenBlock, now: Shape, after: Wanted) -> Shape | None:
    """The output of a block whose branches are concatenated for the next layer; its input may be one of them. Of two
    sizes the first may be a length, so only the wanted channels decide."""
    if not block.ends or len(now) < 2:
        return None
    wanted = after if len(now) > 2 else after[:1]
    channels = sum(shape[0] for shape in block.ends if shape[1:] == now[1:]) + now[0]
    for whole in (channels, channels + block.entered[0]):
        if whole in wanted and whole != now[0]:
            return (whole, *now[1:])
    return None


def made_channels(shapes: Iterable[Shape | None], sizes: int) -> Counter[Shape]:
    """Channels made so far for each size of images or signals: the maximum that can be concatenated."""
    made: Counter[Shape] = Counter()
    for shape in shapes:
        if shape and len(shape) == sizes:
            made[shape[1:]] += shape[0]
    return made


def is_shortcut(open_blocks: Sequence[OpenBlock], found: Shape) -> bool:
    """Whether the last output was made of this shape by a single module, which is a shortcut."""
    made = 0
    for block in reversed(open_blocks):
        made += len(block.made)
        if block.entered is found and block.kind != "Sequential":
            return made < 2
    return False


def next_part(open_blocks: Sequence[OpenBlock], channels: int, sizes: int) -> Shape | None:
    """The other half of a block's input that was split."""
    for block in reversed(open_blocks):
        if block.is_split and block.made and len(block.entered) == sizes and block.entered[0] == 2 * channels:
            return (channels, *block.entered[1:])
    return None


def wanted_by(nodes: Sequence[Node]) -> Wanted:
    """Channels and features that the first of these with a requirement takes."""
    for node in nodes:
        for leaf in leaves(node):
            try:
                channels, features = taken(leaf.kind, leaf.printed)
            except _CANNOT:
                return (None, None)
            if channels is not None or features:
                return (channels, prod(features) if features else None)
    return (None, None)


def wanted_behind(children: Sequence[Node], after: Wanted) -> list[Wanted]:
    """Requirement of the next block that has one, or of what follows all, for each block."""
    found: list[Wanted] = []
    for child in reversed(children):
        found.append(after)
        own = wanted_by((child,)) if not child.kind.endswith(_SIDE_HEAD) else (None, None)  # it takes an earlier output
        after = own if own != (None, None) else after
    return found[::-1]


def is_layer_itself(node: Node) -> bool:
    """Whether it is a layer although it contains modules: a norm with its activation."""
    return bool(node.own and node.printed)


def leaves(node: Node) -> Iterator[Node]:
    if not node.children or is_layer_itself(node):
        yield node
    for child in node.children:
        yield from leaves(child)


def modules(node: Node) -> int:
    """The number of modules that it stands for, with itself and its names."""
    return len(node.names) * (1 + sum(modules(child) for child in node.children))
