"""The shapes of the outputs of a printed model, which print(model) does not show, from the shape of one input.

The modules are taken to be called in the order of the text. Where what a module wants does not fit what came last, it
is fed by what its surrounding blocks have at hand: what they were called with, or what their modules before it made. So
the shortcut of a residual block gets the block's input. What lies inside a block that is closed is out of sight. Where
nothing has as many channels as a module wants, branches were joined that the text does not show: then it is fed with as
many, at the size of what came last, if that many have been made. Where nothing fits, that is an error.

Rows of words are (length, width). A length may be any number, also one that is a width or a half of one, so nothing is
concluded from it: what is found for one length is found for all.

What cannot be known from the text: a module that is called several times, or never, counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from carma.errors import Usage
from carma.estimate.summaries import blocks
from carma.estimate.summaries.blocks import Block
from carma.estimate.summaries.lines import bad, counted
from carma.estimate.summaries.shapes import (
    Shape,
    changes_shape,
    channels_taken,
    features_taken,
    keeps_channels,
    made_of,
    places_of,
    show,
)
from carma.estimate.summaries.tree import Node

_LARGEST = 1 << 60
_CANNOT = (KeyError, ValueError, IndexError, ArithmeticError)


class Walk:
    """One walk over the modules; `sample` is the input of one sample, without the batch."""

    def __init__(self, root: Node, sample: Shape) -> None:
        self._root = root
        self._sample = sample
        self._now = sample
        self._blocks: list[Block] = [Block("", sample)]
        self._outputs: list[Shape | None] = []
        self._joined = 0
        self._channels_last = False  # an image's, moved there for norms and linear layers
        self._in_rows = False  # of words

    def outputs(self) -> list[Shape | None]:
        """Of each module in the order of the text; None of those that only hold others."""
        self._visit(self._root, (None, None))
        return self._outputs

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
        """`after` is what the next module behind it wants."""
        if len(node.names) > 1:
            self._visit_again(node, after)
            return
        output = len(self._outputs)
        self._outputs.append(None)
        if node.kind == "MultiheadAttention":
            self._attend(node, output)
        elif node.children:
            if blocks.is_layer_itself(node):
                self._outputs[output] = self._call_leaf(node)
            self._call_block(node, after)
        elif node.kind not in blocks.TRANSPARENT:
            self._outputs[output] = self._call_leaf(node)

    def _visit_again(self, node: Node, after: blocks.Wanted) -> None:
        """`(0-47): 48 x`: one after the other; what was fed like the one before it makes the same."""
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

    def _visit_children(self, node: Node, after: blocks.Wanted) -> None:
        wants = blocks.wanted_behind(node.children, after)
        for child, behind in zip(node.children, wants, strict=True):
            self._visit(child, behind)

    def _call_block(self, node: Node, after: blocks.Wanted) -> None:
        if node.kind in blocks.TRANSPARENT:
            self._visit_children(node, after)
            return
        branches = blocks.is_branch(node.names[0])
        if branches or node.kind == "Sequential":
            self._feed(self._begin_chain(node, branches))
        self._now = blocks.entering(node.kind, self._now)
        block = Block(node.kind, self._now)
        self._blocks.append(block)
        self._visit_children(node, after)
        self._blocks.pop()
        self._now = blocks.leaving(node, block, self._now)
        has_channels_first = not self._channels_last and not (self._in_rows and len(self._now) == 2)
        if has_channels_first and (joined := blocks.joined(block, self._now, after)):
            self._now = joined
            self._joined += 1
        self._blocks[-1].made.append(self._now)

    def _begin_chain(self, node: Node, branches: bool) -> Shape:
        """What the first layer with a wish takes, also where a pool or a dropout comes before that."""
        pooled = False
        for leaf in blocks.leaves(node):
            try:
                channels = channels_taken(leaf.kind, leaf.printed)
                features = features_taken(leaf.kind, leaf.printed)
            except _CANNOT:
                break
            if channels is not None:
                places = places_of(leaf.kind)
                fitting = (shape for shape in self._at_hand(branches) if _has_channels(shape, channels, places))
                return next(fitting, self._now)
            if features:
                return (not pooled and self._find_features(leaf, features)) or self._now
            if changes_shape(leaf.kind):
                if not keeps_channels(leaf.kind):
                    break
                pooled = True
        return self._now

    def _feed(self, shape: Shape) -> Shape:
        """Where that is not what came last, a branch ended with what came last."""
        if shape is not self._now:
            self._blocks[-1].ends.append(self._now)
            self._now = shape
        return shape

    def _call_leaf(self, node: Node) -> Shape | None:
        if blocks.is_aside(node, self._blocks[-1]):
            return None
        if inner := blocks.inner_activation(node.names[0], self._blocks[-1], self._now):
            return inner
        try:
            out = self._words(node) if blocks.looks_up(node.kind) else made_of(node.kind, node.printed, self._fed(node))
        except _CANNOT:
            raise bad(node.line, node.text, "what is printed of this module does not tell what it makes") from None
        if not (out and min(out) > 0 and prod(out) < _LARGEST):
            raise bad(node.line, node.text, f"it makes nothing of {show(self._now)}; give another --input")
        self._channels_last = self._channels_last and not places_of(node.kind)
        self._now = out
        self._blocks[-1].made.append(out)
        return out

    def _words(self, node: Node) -> Shape:
        """Every table of words or places is looked up with the input itself."""
        if len(self._sample) != 1:
            raise self._misfit(node, "it looks up words: for such a model --input is the number of words, like 128")
        self._in_rows = True
        return (*self._sample, int(node.printed["1"]))

    def _attend(self, node: Node, output: int) -> None:
        """Its projections are called inside it; what is printed below it is never called."""
        width = (node.children[0].printed if node.children else node.printed).get("in_features", "")
        shape = self._find_features(node, (int(width),)) if width.isdecimal() else None
        if shape is None:
            raise self._misfit(node, f"it takes {width or 'an unknown number of'} features")
        self._now = self._outputs[output] = shape
        self._blocks[-1].made.append(shape)
        self._outputs += [None] * sum(blocks.modules(child) for child in node.children)

    def _fed(self, node: Node) -> Shape:
        """What the module is called with."""
        channels = channels_taken(node.kind, node.printed)
        if channels is not None:
            return self._feed(self._with_channels(node, channels))
        features = features_taken(node.kind, node.printed)
        if features:
            return self._feed(self._with_features(node, features))
        places = places_of(node.kind)
        if places is not None and len(self._now) != places + 1:
            raise self._misfit(node, f"it takes channels and {places} sizes")
        return self._now

    def _with_channels(self, node: Node, channels: int) -> Shape:
        places = places_of(node.kind)
        now = self._now
        for shape in self._at_hand():
            if _has_channels(shape, channels, places):
                return shape
        for shape in (now,) if places != 1 else self._at_hand():
            if places == len(shape) - 1 and shape[-1] == channels:
                self._channels_last = self._in_rows = False
                return (channels, *shape[:-1])
        if (
            1 < len(now) == (len(now) if places is None else places + 1)
            and now[0] < channels <= self._made_channels().total()
        ):
            return self._join((channels, *now[1:]))
        raise self._misfit(node, f"it takes {channels} channels")

    def _made_channels(self) -> Counter[Shape]:
        """By all modules so far, for each size of the images or signals: no more can be joined."""
        made: Counter[Shape] = Counter()
        for shape in (self._sample, *self._outputs):
            if shape and len(shape) == len(self._now):
                made[shape[1:]] += shape[0]
        return made

    def _with_features(self, node: Node, features: Shape) -> Shape:
        found = self._find_features(node, features)
        can_join = found is None and len(self._now) > 2 and node.kind == "Linear"
        if can_join and self._now[0] < features[0] <= max(self._made_channels().values(), default=0):
            return self._join(features)  # one number a channel
        if found is None:
            raise self._misfit(node, f"it takes {show(features)} features")
        return found

    def _join(self, shape: Shape) -> Shape:
        """Blocks that have just begun were called with what was joined."""
        self._joined += 1
        self._now = shape
        for block in reversed(self._blocks):
            if block.made:
                break
            block.entered = shape
        return shape

    def _find_features(self, node: Node, features: Shape) -> Shape | None:
        """Rows are flattened only where nothing else has as many: their length may be any number."""
        count = len(features)
        for shape in self._at_hand():
            is_image = len(shape) > 2 and shape[:1] == features and not self._channels_last
            if shape[-count:] == features and not is_image:
                return shape
            if count == 1 and len(shape) > 2 and (fitted := self._as_features(shape, features[0], node.kind)):
                self._channels_last = self._channels_last or len(fitted) > 2
                return fitted
        rows = (shape for shape in self._at_hand() if len(shape) == 2)
        return features if any((prod(shape),) == features for shape in rows) else None

    def _as_features(self, shape: Shape, features: int, kind: str) -> Shape | None:
        """Of an image: flattened; or, where it has as many channels, one number a channel. Norms and attention want the
        channels at the end."""
        if prod(shape) == features:
            return (features,)
        if shape[0] != features or (self._channels_last and shape is self._now):
            return None
        if kind.endswith(("Norm", "Attention")):
            return (*shape[1:], features)
        return None if shape is self._sample else (features,)

    def _at_hand(self, branches: bool = False) -> Iterator[Shape]:
        """What came last; then of each block, from the innermost on, its input and what its modules made, the latest
        first. A branch begins with the input of its block."""
        words = self._sample if self._in_rows else None  # are numbers of words: only tables take them
        if branches and self._blocks[-1].entered is not words:
            yield self._blocks[-1].entered
        if self._now is not words:
            yield self._now
        for block in reversed(self._blocks):
            if block.entered is not words:
                yield block.entered
            yield from reversed(block.made)

    def _misfit(self, node: Node, why: str) -> Usage:
        return bad(node.line, node.text, f"nothing before it fits, the last output is {show(self._now)}: {why}")


def _has_channels(shape: Shape, channels: int, places: int | None) -> bool:
    return shape[0] == channels and (places is None or len(shape) == places + 1)
