"""A printed module as layers.

Parameters come from the printed attributes (`Linear(in_features=…)`). Not shown, hence not counted, are parameters that
a block owns beside its modules (a class token), unless counts are added; weights that two modules share are counted
twice unless the model's own count stands at its end. Outputs are not shown either: walk.py finds them from an input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from carma.estimate.described import Described, Layer
from carma.estimate.summaries.blocks import modules
from carma.estimate.summaries.kinds import count_parameters, is_container
from carma.estimate.summaries.lines import bad
from carma.estimate.summaries.read import Read
from carma.estimate.summaries.shapes import Shape
from carma.estimate.summaries.tree import MOST_LAYERS, Node, parse_tree
from carma.estimate.summaries.walk import Walk

_ADAPTER = re.compile(r"(?:^|\.)(?:lora_\w+|modules_to_save)(?:\.|$)")
_NAMED = {"Conv": ("in_channels", "out_channels"), "Embedding": ("num_embeddings", "embedding_dim")}


def read_tree(lines: Sequence[str], start: int, batch: int | None, sample: Shape) -> Read:
    """With an input (of one sample, without the batch) the outputs are found, too."""
    root = parse_tree(lines, start)
    _count(root)
    if modules(root) > MOST_LAYERS:
        raise bad(root.line, root.text, f"more than {MOST_LAYERS:,} layers")
    walk = Walk(root, sample) if sample else None
    layers: list[Layer] = []
    _add_layers(layers, root, "", iter(walk.outputs()) if walk else None, batch or 1)
    described = Described(
        layers=tuple(layers),
        batch=batch,
        parameters=sum(layer.parameters for layer in layers) if root.count is None else root.count,
        input=(batch or 1, *sample) if sample else (),
    )
    remarks = (*(walk.remarks() if walk else ()), *_tied(root, layers))
    has_adapters = any("lora_" in line for line in lines)
    return Read(described=described, remarks=remarks, frozen=_frozen(layers) if has_adapters else 0)


def _frozen(layers: Sequence[Layer]) -> int:
    """What is frozen is not printed. Where adapters are (LoRA), all but them is."""
    trained = [layer.parameters for layer in layers if _ADAPTER.search(layer.name)]
    return sum(layer.parameters for layer in layers) - sum(trained) if trained else 0


def _tied(root: Node, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Language models mostly share the words' weight with their head, which the text does not show."""
    tables = {
        (layer.attributes.get("embedding_dim"), layer.attributes.get("num_embeddings"))
        for layer in layers
        if layer.kind == "Embedding"
    }
    for layer in layers if root.count is None and tables else ():
        told = layer.attributes
        if layer.kind == "Linear" and (told.get("in_features"), told.get("out_features")) in tables:
            return (
                f"{layer.name} may share its {layer.parameters:,} weights with an embedding; they are counted twice",
            )
    return ()


def _count(node: Node) -> None:
    """Fills in `own` and `whole`, from the leaves up."""
    below = 0
    for child in node.children:
        _count(child)
        below += child.whole * len(child.names)
    node.own = _own(node, below)
    node.whole = node.own + below if node.count is None else node.count


def _own(node: Node, below: int) -> int:
    """Parameters that the module owns itself."""
    if node.count is not None:
        return max(node.count - below, 0)
    if node.children:
        return _attention(node) if node.kind == "MultiheadAttention" else 0
    own = count_parameters(node.kind, node.printed)
    if own is None:
        raise bad(node.line, node.text, "what is printed of this module does not tell how many parameters it has")
    return own


def _attention(node: Node) -> int:
    """The projections of query, key and value are not printed; they are as wide as the one of the output."""
    out = node.children[0].printed
    width = int(out["in_features"]) if out.get("in_features", "").isdecimal() else 0
    return 3 * width * width + (3 * width if out.get("bias") == "True" else 0)


def _add_layers(found: list[Layer], node: Node, path: str, outputs: Iterator[Shape | None] | None, batch: int) -> None:
    """In the order of the text; `outputs` has one for each module in that order, None where it makes none itself."""
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
    """As printed, with names for what stands by place where torch has some."""
    names = next((names for start, names in _NAMED.items() if node.kind.startswith(start)), None)
    if names is None:
        return node.printed
    places = {str(place): name for place, name in enumerate(names)}
    return {places.get(key, key): value for key, value in node.printed.items()}
