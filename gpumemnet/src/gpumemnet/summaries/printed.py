"""Turns a printed module into layers.

Parameters come from the printed attributes (`Linear(in_features=…)`). Parameters that a block owns beside its modules
(a class token) are not shown and not counted, unless the text contains counts. Weights that two modules share count
twice, unless the text ends with the model's own count. Outputs are not shown; `shape_inference` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from carma.trial.layers.description import Described, Layer, ReadSummary
from gpumemnet.summaries.blocks import is_embedding, modules
from gpumemnet.summaries.module_parameters import (
    count_parameters,
    impossible,
    is_bare_norm,
    is_container,
    may_be_small,
    scales,
    width_made,
)
from gpumemnet.summaries.module_tree import Node, parse_tree
from gpumemnet.summaries.shape_inference import ShapeInference
from gpumemnet.summaries.shapes import Shape
from gpumemnet.summaries.text import MOST_LAYERS, bad, counted, first_names, too_many

_ADAPTER = re.compile(r"(?:^|\.)(?:lora_\w+|modules_to_save)(?:\.|$)")
_UNCOUNTED = "what is printed of this module does not tell how many parameters it has"
_COUNTS = "A table of torchinfo counts them: torchinfo.summary(model, input_size=..., depth=10)."
_SHARED_TABLE, _OWN_TABLE = "shared", "embed_tokens"  # in T5, BART and similar models
_FEW = 2  # minimum of known layers for each unknown one
_NAMED = {"Conv": ("in_channels", "out_channels"), "Embedding": ("num_embeddings", "embedding_dim")}


def read_tree(lines: Sequence[str], start: int, batch: int | None, sample: Shape) -> ReadSummary:
    """Reads a printed tree. The outputs are inferred if there is an input (of one sample, without the batch)."""
    root = parse_tree(lines, start)
    counting = _Counting()
    counting.count(root)
    uncounted = counting.remarks()
    if modules(root) > MOST_LAYERS:
        raise too_many(root.line, root.text)
    inference = ShapeInference(root, sample) if sample else None
    layers: list[Layer] = []
    _add_layers(layers, root, "", iter(inference.outputs()) if inference else None, batch or 1)
    described = Described(
        layers=tuple(layers),
        batch=batch,
        parameters=sum(layer.parameters for layer in layers) if root.count is None else root.count,
        input=(batch or 1, *sample) if sample else (),
    )
    remarks = (*(inference.remarks() if inference else ()), *uncounted, *_tied(root, layers))
    has_adapters = any("lora_" in line for line in lines)
    return ReadSummary(described=described, remarks=remarks, frozen=_frozen(layers) if has_adapters else 0)


def _frozen(layers: Sequence[Layer]) -> int:
    """Frozen parameters are not printed. With adapters (LoRA), all others are frozen."""
    trained = [layer.parameters for layer in layers if _ADAPTER.search(layer.name)]
    return sum(layer.parameters for layer in layers) - sum(trained) if trained else 0


def _tied(root: Node, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Language models mostly share the embedding's weight with their head, which the text does not show."""
    tables = {
        (layer.attributes.get("embedding_dim"), layer.attributes.get("num_embeddings"))
        for layer in layers
        if layer.kind == "Embedding"
    }
    for layer in layers if root.count is None and tables else ():
        attributes = layer.attributes
        if layer.kind == "Linear" and (attributes.get("in_features"), attributes.get("out_features")) in tables:
            return (
                f"{layer.name} may share its {layer.parameters:,} weights with an embedding; they are counted twice",
            )
    return ()


@dataclass
class _Counting:
    """Parameters of all modules, from the leaves up."""

    weighty: list[Node] = field(default_factory=list)  # layers with weights, so far
    uncounted: list[Node] = field(default_factory=list)

    def count(self, node: Node) -> None:
        """Fills in `own` and `whole`."""
        below = 0
        for child in node.children:
            self.count(child)
            below += child.whole * len(child.names)
        node.own = self._own(node, below)
        node.whole = node.own + below if node.count is None else node.count
        if node.own:
            self.weighty.append(node)

    def _own(self, node: Node, below: int) -> int:
        """Parameters that the module owns itself."""
        if why := impossible(node.kind, node.printed):
            raise bad(node.line, node.text, why)
        if node.count is not None:
            return max(node.count - below, 0)
        if node.children and node.kind == "MultiheadAttention":
            return _attention(node)
        if node.children:
            return (count_parameters(node.kind, node.printed) or 0) if node.printed else 0
        if is_bare_norm(node.kind, node.printed) and (width := self._width()):
            node.printed = {"0": f"({width},)"}
        if self._is_shared(node):
            return 0
        own = count_parameters(node.kind, node.printed)
        if own is None and (each := scales(node.kind)):
            own = each * self._width()
        if own is not None:
            return own
        if not may_be_small(node.kind):
            raise bad(node.line, node.text, _UNCOUNTED, _COUNTS)
        self.uncounted.append(node)
        return 0

    def _is_shared(self, node: Node) -> bool:
        """Whether it is the embedding of encoder or decoder that is printed again: they call it, but the shared one has
        the weights."""
        if node.names[0] != _OWN_TABLE:
            return False
        for one in self.weighty:
            if one.names[0] == _SHARED_TABLE and one.printed == node.printed:
                one.is_called = False
                return True
        return False

    def _width(self) -> int:
        """Output width of the last layer; a table of distances may be in between."""
        layers = [layer for layer in reversed(self.weighty) if not scales(layer.kind)]
        layers.sort(key=lambda layer: is_embedding(layer.kind))  # tables come last
        return next(filter(None, (width_made(layer.printed) for layer in layers)), 0)

    def remarks(self) -> tuple[str, ...]:
        """A few unknown modules are a remark; many may be most of the model, which is an error."""
        if not self.uncounted:
            return ()
        if _FEW * len(self.uncounted) > len(self.weighty):
            raise bad(self.uncounted[0].line, self.uncounted[0].text, _UNCOUNTED, _COUNTS)
        kinds = first_names(node.kind for node in self.uncounted)
        few = counted(sum(len(node.names) for node in self.uncounted), "module")
        return (f"what is printed of {few} ({kinds}) does not tell how many parameters they have: none are counted",)


def _attention(node: Node) -> int:
    """The projections of query, key and value, which are not printed, are as wide as that of the output."""
    out = node.children[0].printed
    width = int(out["in_features"]) if out.get("in_features", "").isdecimal() else 0
    return 3 * width * width + (3 * width if out.get("bias") == "True" else 0)


def _add_layers(found: list[Layer], node: Node, path: str, outputs: Iterator[Shape | None] | None, batch: int) -> None:
    """Adds the layers in the order of the text; `outputs` has one entry for each module, None if it has no output
    itself."""
    kind, own, children = node.kind, node.own, node.children
    is_layer = bool(own) or (not children and not is_container(kind))
    attributes = _attributes(node) if is_layer else {}
    inplace = attributes.get("inplace") == "True" or "inplace" in attributes.values()
    for name in node.names:
        whole = f"{path}.{name}" if path else name
        output = None if outputs is None else next(outputs)
        if is_layer:
            shape = () if output is None else (batch, *output)
            found.append(
                Layer(name=whole, kind=kind, output=shape, parameters=own, attributes=attributes, inplace=inplace)
            )
        for child in children:
            _add_layers(found, child, whole, outputs, batch)


def _attributes(node: Node) -> dict[str, str]:
    """The printed attributes, with torch's names for positional ones."""
    names = next((names for start, names in _NAMED.items() if node.kind.startswith(start)), None)
    if names is None:
        return node.printed
    places = {str(place): name for place, name in enumerate(names)}
    return {places.get(key, key): value for key, value in node.printed.items()}
