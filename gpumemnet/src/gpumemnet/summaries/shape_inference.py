"""Infers the outputs of a printed model, which print(model) does not show, from the shape of one input.

The modules are assumed to be called in the order of the text. If the last output does not fit to a module, it takes
what its surrounding blocks have: their inputs, or the outputs of their modules before it. So the shortcut of a residual
block gets the block's input. Modules inside a closed block are not considered. If nothing has as many channels as a
module takes, branches were concatenated that the text does not show: then it gets these channels at the size of the
last output, if that many channels have been made. If nothing fits, that is an error.

Sequences are (length, width). A length may be any number, also equal to a width or half of one, so nothing is inferred
from it: the result for one length is valid for all.

The text cannot show modules that are called several times, or never: each counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, prod

from carma.errors import Usage
from gpumemnet.summaries import blocks
from gpumemnet.summaries.blocks import OpenBlock
from gpumemnet.summaries.module_tree import Node
from gpumemnet.summaries.shapes import (
    Last,
    Shape,
    changes_shape,
    has_channels,
    is_pool,
    keeps_channels,
    made_of,
    places_of,
    show,
    steps_of,
    taken,
    turned_first,
)
from gpumemnet.summaries.text import SHAPES, bad, counted

_LARGEST = 1 << 60
_CANNOT = (KeyError, ValueError, IndexError, ArithmeticError)


class ShapeInference:
    """One pass over the modules; `sample` is the input of one sample, without the batch."""

    def __init__(self, root: Node, sample: Shape) -> None:
        self._root = root
        self._sample = sample
        self._now = sample
        self._blocks: list[OpenBlock] = [OpenBlock("", sample)]
        self._outputs: list[Shape | None] = []
        self._joined = 0
        self._channels_last = False  # of an image, moved there for norms and linear layers
        self._in_rows = False  # of words, or of the positions of an image
        self._places = 0  # of an image whose positions are rows
        self._last_of_maps = blocks.last_of_maps(root)

    def outputs(self) -> list[Shape | None]:
        """The output of each module in the order of the text; None for containers. Images with channels last are rows,
        one for each position, as linear layers take them."""
        self._visit(self._root, (None, None))
        return [(prod(made[:-1]), made[-1]) if type(made) is Last else made for made in self._outputs]

    def remarks(self) -> tuple[str, ...]:
        found = [
            "the shapes of the outputs were worked out: each printed module is taken to be called once, in their order"
        ]
        if self._joined:
            found.append(
                f"branches are joined in {counted(self._joined, 'place')} that the text does not show; "
                "the sizes there are what the next layer takes"
            )
        return tuple(found)

    def _visit(self, node: Node, after: blocks.Wanted) -> None:
        """`after` is the requirement of the next module."""
        if len(node.names) > 1:
            self._visit_repeated(node, after)
            return
        output = len(self._outputs)
        self._outputs.append(None)
        if node.kind == "MultiheadAttention":
            self._call_attention(node, output)
        elif node.children:
            if blocks.is_layer_itself(node):
                self._outputs[output] = self._call_leaf(node)
            self._call_block(node, after)
        elif node.kind not in blocks.TRANSPARENT:
            self._outputs[output] = self._call_leaf(node, after[0])

    def _visit_repeated(self, node: Node, after: blocks.Wanted) -> None:
        """`(0-47): 48 x`: one after the other; equal inputs give equal outputs."""
        each = blocks.wanted_by((node,))
        before: tuple[Shape, blocks.Wanted] | None = None
        made: list[Shape | None] = []
        joined = 0
        for name in node.names:
            now = (self._now, after if name is node.names[-1] else each)
            if now == before and node.children and node.kind not in blocks.TRANSPARENT:
                self._outputs += made
                self._joined += joined
                self._now = self._blocks[-1].made[-1]
                self._blocks[-1].made.append(self._now)
                continue
            start, joined = len(self._outputs), -self._joined
            self._visit(replace(node, names=(name,)), now[1])
            before, made, joined = now, self._outputs[start:], joined + self._joined

    def _visit_children(self, node: Node, after: blocks.Wanted, branches: bool = False) -> None:
        wants = blocks.wanted_behind(node.children, after)
        for child, behind in zip(node.children, wants, strict=True):
            if branches and child.children:
                self._feed(self._begin_chain(child, branches))
            self._visit(child, behind)

    def _call_block(self, node: Node, after: blocks.Wanted) -> None:
        branches, before = blocks.begins_branch(node), self._now
        if node.kind in blocks.TRANSPARENT:
            self._visit_children(node, after, branches)
            return
        if branches or node.kind == "Sequential":
            self._feed(self._begin_chain(node, branches))
        given, self._now = self._now, self._marked(blocks.input_of(node, self._now))
        is_mean = len(given) > 2 and prod(self._now[1:]) == 1
        block = OpenBlock(node.kind, given if is_mean else self._now, is_last=self._channels_last)
        self._blocks.append(block)
        if not self._channels_last and blocks.side_by_side(node, self._now, after[0]):
            for child in node.children:
                self._feed(block.entered)
                self._visit(child, (None, None))
        else:
            self._visit_children(node, after)
        self._blocks.pop()
        self._now = self._marked(blocks.output_of(node, block, self._now))
        has_channels_first = not self._channels_last and not (self._in_rows and len(self._now) == 2)
        if has_channels_first and (joined := blocks.joined(block, self._now, after)):
            self._now = joined
            self._joined += 1
        self._blocks[-1].made.append(self._now)
        if branches and blocks.is_bypass(node, before, self._now, after[0]):
            self._now, self._channels_last = before, block.is_last

    def _begin_chain(self, node: Node, branches: bool) -> Shape:
        """The input of the first layer with a requirement, also after a pool or a dropout."""
        pooled = False
        for leaf in blocks.leaves(node):
            try:
                channels, features = taken(leaf.kind, leaf.printed)
            except _CANNOT:
                break
            if channels is not None:
                places = places_of(leaf.kind)
                available = self._available(branches)
                fitting = (shape for shape in available if has_channels(turned_first(shape), channels, places))
                found = next(fitting, self._now)
                return self._now if not branches and self._is_part(found, channels, leaf) else found
            if features:
                return (not pooled and self._find_features(leaf, features)) or self._now
            if changes_shape(leaf.kind):
                if not keeps_channels(leaf.kind):
                    break
                pooled = True
        return self._now

    def _feed(self, shape: Shape) -> Shape:
        """If that is not the last output, a branch ended there."""
        if shape is not self._now:
            self._blocks[-1].ends.append(self._now)
            self._now = shape
            self._channels_last = type(shape) is Last if len(shape) > 2 else self._channels_last
        return shape

    def _call_leaf(self, node: Node, wanted: int | None = None) -> Shape | None:
        """`wanted` are the channels that the next module takes."""
        block = self._blocks[-1]
        if blocks.is_aside(node, block):
            return None
        before, was_last = self._now, self._channels_last
        is_shortcut = node.names[0].startswith("shortcut")
        if blocks.is_branch(node.names[0]) and changes_shape(node.kind) and len(block.entered) > 1:
            self._feed(block.entered)
            self._channels_last = block.is_last
        if inner := blocks.inner_activation(node.names[0], self._blocks[-1], self._now):
            return inner
        try:
            out = self._words(node) if blocks.is_embedding(node.kind) else self._made(node, wanted)
        except _CANNOT:
            raise bad(node.line, node.text, "what is printed of it does not tell what it makes", SHAPES) from None
        if not (out and min(out) > 0 and prod(out) < _LARGEST):
            raise bad(node.line, node.text, f"it makes nothing of {show(self._now)}; give another --input", SHAPES)
        self._channels_last = self._channels_last and not places_of(node.kind)
        self._now = out = self._marked(out)
        block.made.append(out)
        if block.is_last and blocks.is_attention(block.kind):
            block.queries = (*out[1:], out[0]) if node.names[0] == "pool_q" else block.queries
            block.width = out[-1] if node.names[0] == "proj" else block.width
        if is_shortcut:
            self._now, self._channels_last = before, was_last
        return out

    def _marked(self, shape: Shape) -> Shape:
        return Last(shape) if self._channels_last and len(shape) > 2 else shape

    def _made(self, node: Node, wanted: int | None) -> Shape:
        if node.kind == "SpaceToDepth":
            times = isqrt((wanted or 0) // self._now[0])  # it does not print its side
            return (self._now[0] * times**2, *(size // times for size in self._now[1:]))
        if self._channels_last and len(self._now) > 2 and is_pool(node.kind):
            self._now = (self._now[-1], *self._now[:-1])
            self._channels_last = False
        return made_of(node.kind, node.printed, self._fed(node))

    def _words(self, node: Node) -> Shape:
        """Every embedding takes the input itself."""
        if len(self._sample) != 1:
            raise self._no_fit(node, "it looks up words: for such a model --input is the number of words, like 128")
        self._in_rows = True
        return (*self._sample, int(node.printed["1"]))

    def _call_attention(self, node: Node, output: int) -> None:
        """Calls attention. Its projections are called inside it; modules printed below it are never called."""
        width = (node.children[0].printed if node.children else node.printed).get("in_features", "")
        shape = self._find_features(node, (int(width),)) if width.isdecimal() else None
        if shape is None:
            raise self._no_fit(node, f"it takes {width or 'an unknown number of'} features")
        self._now = self._outputs[output] = shape
        self._blocks[-1].made.append(shape)
        self._outputs += [None] * sum(blocks.modules(child) for child in node.children)

    def _fed(self, node: Node) -> Shape:
        """The input of the module."""
        channels, features = taken(node.kind, node.printed)
        if channels is not None:
            return self._feed(self._with_channels(node, channels))
        if features:
            return self._feed(self._with_features(node, features))
        places = places_of(node.kind)
        if places is not None and len(self._now) != places + 1:
            raise self._no_fit(node, f"it takes channels and {places} sizes")
        return self._now

    def _with_channels(self, node: Node, channels: int) -> Shape:
        places = places_of(node.kind)
        if self._channels_last and places == len(self._now) - 1:
            self._now = (self._now[-1], *self._now[:-1])
            self._channels_last = self._in_rows = False
        now = self._now
        if node.names[0] in blocks.OF_HEADS and now[0] % channels == 0:
            return (channels, *now[1:])
        if now[0] != channels and (part := blocks.next_part(self._blocks, channels, len(now))):
            return part
        for shape in self._available():
            if has_channels(shape, channels, places):
                return self._part(channels) if self._is_part(shape, channels, node) else shape
        for shape in self._available():
            is_last = places == 1 or type(shape) is Last
            if is_last and places == len(shape) - 1 and shape[-1] == channels:
                self._channels_last = self._in_rows = False
                return (channels, *shape[:-1])
        if self._fits(places) and now[0] < channels <= self._made_channels().total():
            return self._join((channels, *now[1:]))
        if self._may_split(places) and now[0] > channels == -(-now[0] // round(now[0] / channels)):
            return self._part(channels)
        raise self._no_fit(node, f"it takes {channels} channels")

    def _fits(self, places: int | None) -> bool:
        """Whether the output has channels and this number of sizes."""
        return 1 < len(self._now) == (len(self._now) if places is None else places + 1)

    def _may_split(self, places: int | None) -> bool:
        """Whether the output may be split: not in a Sequential, and not between the model's own blocks."""
        return self._fits(places) and len(self._blocks) > 2 and self._blocks[-1].kind != "Sequential"

    def _part(self, channels: int) -> Shape:
        """The last output was split and this is one of the parts, or the parts are concatenated again."""
        if channels > self._now[0]:
            self._joined += 1
        for block in reversed(self._blocks):
            block.is_split = True
            if block.made:
                break
        return (channels, *self._now[1:])

    def _is_part(self, found: Shape, channels: int, node: Node) -> bool:
        """Whether it is half of the last output, or its parts, rather than the larger shape that was found."""
        now, steps = self._now, steps_of(node.printed)
        if found is now or len(found) != len(now) or len(now) < 3 or self._channels_last:
            return False
        if prod(found[1:]) <= prod(now[1:]):
            return False
        if now[0] == 2 * channels:
            just_begun = not any(block.made for block in self._blocks[-2:])
            return (just_begun or steps == 1) and not blocks.is_shortcut(self._blocks, found)
        if steps > 1:
            return False
        return self._blocks[-1].is_split and now[0] < channels <= self._made_channels()[now[1:]]

    def _made_channels(self) -> Counter[Shape]:
        return blocks.made_channels((self._sample, *self._outputs), len(self._now))

    def _with_features(self, node: Node, features: Shape) -> Shape:
        found = self._find_features(node, features)
        can_join = found is None and len(self._now) > 2 and node.kind == "Linear"
        if can_join and self._now[0] < features[0] <= max(self._made_channels().values(), default=0):
            return self._join(features)  # one number a channel
        if found is None and self._may_split(None) and self._has_part(features):
            heads = node.names[0] in ("proj_l", "proj_w") and len(self._now) == 2  # they mix the scores of heads
            return (*self._now[:-1], *self._now[: int(heads)], *features)
        if found is None:
            raise self._no_fit(node, f"it takes {show(features)} features")
        return found

    def _has_part(self, features: Shape) -> bool:
        """Whether rows have parts: halves that are multiplied, or queries, keys and values of different widths."""
        is_rows = self._channels_last or (self._in_rows and len(self._now) == 2)
        if not is_rows or len(features) != 1:
            return False
        return self._now[-1] == 2 * features[0] or (
            blocks.is_attention(self._blocks[-1].kind) and features[0] < self._now[-1]
        )

    def _join(self, shape: Shape) -> Shape:
        """Blocks that have just begun take the concatenation."""
        self._joined += 1
        self._now = shape
        for block in reversed(self._blocks):
            if block.made:
                break
            block.entered = shape
        return shape

    def _find_features(self, node: Node, features: Shape) -> Shape | None:
        """Rows are flattened only if nothing else fits, because their length may be any number."""
        count = len(features)
        for shape in self._available():
            if count == 1 and len(shape) == 2 and shape == (features[0], self._places):
                return shape[::-1]
            is_image = len(shape) > 2 and shape[:1] == features and not self._channels_last
            if shape[-count:] == features and not is_image:
                return shape
            if count == 1 and len(shape) > 2 and (fitted := self._as_features(shape, features[0], node)):
                self._channels_last = self._channels_last or len(fitted) > 2
                return self._marked(fitted)
        if count == 1 and len(self._blocks) > 2 and (turned := self._transposed_rows(features[0])):
            return turned
        rows = (shape for shape in self._available() if len(shape) == 2)
        return features if any((prod(shape),) == features for shape in rows) else None

    def _transposed_rows(self, places: int) -> Shape | None:
        """Transposed rows, for layers that mix the positions of an image."""
        for shape in self._available():
            if len(shape) == 2 and shape[0] == self._places == places:
                return shape[::-1]
            if len(shape) == 3 and self._channels_last and prod(shape[:-1]) == places:
                return (shape[-1], places)
            if len(shape) == 3 and not self._channels_last and prod(shape[1:]) == places:
                self._in_rows, self._places = True, places
                return (shape[0], places)
        return None

    def _as_features(self, shape: Shape, features: int, node: Node) -> Shape | None:
        """The image as features: flattened, or one number for each channel. Norms and attention take channels last."""
        block = self._blocks[-1]
        if prod(shape) == features:
            return (features,)
        if shape[0] != features or (self._channels_last and shape is self._now):
            return None
        is_mixed = self._places == prod(shape[1:])
        if is_mixed or node.kind.endswith(("Norm", "Attention")) or blocks.is_attention(block.kind) or block.is_last:
            if node.line < self._last_of_maps:
                return (*shape[1:], features)
            self._in_rows, self._places = True, prod(shape[1:])
            return (self._places, features)
        return None if shape is self._sample else (features,)

    def _available(self, branches: bool = False) -> Iterator[Shape]:
        """The last output; then for each block, from the innermost, its input and the outputs of its modules, the
        latest first. A branch begins with the input of its block."""
        words = self._sample if self._in_rows else None  # numbers of words: only embeddings take them
        if branches and self._blocks[-1].entered is not words:
            yield self._blocks[-1].entered
        if self._now is not words:
            yield self._now
        for block in reversed(self._blocks):
            if block.entered is not words:
                yield block.entered
            yield from reversed(block.made)

    def _no_fit(self, node: Node, why: str) -> Usage:
        return bad(node.line, node.text, f"nothing before it fits, the last output is {show(self._now)}: {why}", SHAPES)
