"""What `print(model)` shows, also with the counts that the published transformer summaries add (`…, 590,592 params`).

Parameters come from the printed attributes (`Linear(in_features=…)`). Not shown, hence not counted, are parameters that
a block owns beside its modules (a class token), unless counts are added; weights that two modules share are counted
twice unless the model's own count stands at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from carma.estimate.described import Described, Layer
from carma.estimate.summaries.kinds import count_parameters, is_container
from carma.estimate.summaries.lines import bad, read_count

_MODULE = re.compile(
    r"\s*(?:\((?P<name>[^()]*)\): )?(?:(?P<times>\d{1,9}) x )?(?P<kind>[A-Za-z_][\w.]*)\((?P<rest>.*)", re.DOTALL
)
_CLOSE = re.compile(r"\s*\)(?:, (?P<count>[\d,]+) params)?\s*")
_COUNTED = re.compile(r"(?P<rest>.*\)), (?P<count>[\d,]+) params\s*", re.DOTALL)
_SPAN = re.compile(r"(\d{1,9})-(\d{1,9})")
_MOST_LAYERS = 1_000_000
_DEEPEST = 200
_NAMED = {"Conv": ("in_channels", "out_channels"), "Embedding": ("num_embeddings", "embedding_dim")}


@dataclass
class _Node:
    """A module as printed; `line` counts from 0."""

    kind: str
    line: int
    text: str
    names: tuple[str, ...] = ("",)  # one for each of `(0-11): 12 x`
    printed: dict[str, str] = field(default_factory=dict)
    count: int | None = None  # of the whole module, where the text tells
    children: list[_Node] = field(default_factory=list)


def starts_tree(line: str) -> bool:
    found = _MODULE.fullmatch(line)
    return found is not None and found["name"] is None and line[:1].strip() != "" and found["kind"][0].isupper()


def read_tree(lines: Sequence[str], start: int, batch: int | None) -> Described:
    root = _parse(lines, start)
    layers: list[Layer] = []
    for layer in _layers(root, ""):
        layers.append(layer)
        if len(layers) > _MOST_LAYERS:
            raise bad(root.line, root.text, f"more than {_MOST_LAYERS:,} layers")
    total = sum(layer.parameters for layer in layers) if root.count is None else root.count
    return Described(layers=tuple(layers), batch=batch, parameters=total)


def _parse(lines: Sequence[str], start: int) -> _Node:
    open_nodes: list[_Node] = []
    for number in range(start, len(lines)):
        line = lines[number]
        if not line.strip():
            continue
        if closed := _CLOSE.fullmatch(line):
            node = open_nodes.pop()
            node.count = read_count(closed["count"]) if closed["count"] else None
            if not open_nodes:
                return node
            continue
        child = _node(line, number, is_root=not open_nodes)
        if child is None:
            continue  # a line of the block's own description
        node, opens = child
        if open_nodes:
            open_nodes[-1].children.append(node)
        if opens and len(open_nodes) == _DEEPEST:
            raise bad(number, line, f"modules lie more than {_DEEPEST} deep in one another")
        if opens:
            open_nodes.append(node)
        elif not open_nodes:
            return node
    node = open_nodes[-1]
    raise bad(node.line, node.text, "this module is not closed; the text has been cut off")


def _node(line: str, number: int, *, is_root: bool) -> tuple[_Node, bool] | None:
    found = _MODULE.fullmatch(line)
    if found is None or (found["name"] is None and not is_root):
        if re.match(r"\s*\([^()]*\):", line):
            raise bad(number, line, "not a module as print(model) shows it")
        return None
    rest, count = found["rest"].rstrip(), None
    if counted := _COUNTED.fullmatch(rest):
        rest, count = counted["rest"], read_count(counted["count"])
    kind = found["kind"].rpartition(".")[2]
    names = _names(found["name"] or "", int(found["times"] or 1), line, number)
    node = _Node(kind=kind, line=number, text=line, names=names, count=count)
    if not rest:
        return node, True
    if not rest.endswith(")") or rest.count("(") + 1 != rest.count(")"):
        raise bad(number, line, "the brackets of this module do not match")
    node.printed = _printed(rest[:-1])
    return node, False


def _names(name: str, times: int, line: str, number: int) -> tuple[str, ...]:
    if times == 1:
        return (name,)
    span = _SPAN.fullmatch(name)
    if span is None or int(span[2]) - int(span[1]) + 1 != times or times > _MOST_LAYERS:
        raise bad(number, line, f"({name}) does not name {times} modules")
    return tuple(str(place) for place in range(int(span[1]), int(span[2]) + 1))


def _printed(text: str) -> dict[str, str]:
    """`3, 64, kernel_size=(7, 7)`: by name, and by place where there is none."""
    found: dict[str, str] = {}
    for part in _split(text):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            found[name] = value.strip()
        elif part:
            found[str(len(found))] = part
    return found


def _split(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    yield text[begin:].strip()


def _layers(node: _Node, path: str) -> Iterator[Layer]:
    for name in node.names:
        whole = f"{path}.{name}" if path else name
        own = _own(node)
        if own or (not node.children and not is_container(node.kind)):
            yield Layer(
                name=whole,
                kind=node.kind,
                parameters=own,
                attributes=_attributes(node),
                inplace=node.printed.get("inplace") == "True" or "inplace" in node.printed.values(),
            )
        for child in node.children:
            yield from _layers(child, whole)


def _own(node: _Node) -> int:
    """Parameters that the module owns itself."""
    if node.count is not None:
        return max(node.count - sum(_whole(child) for child in node.children), 0)
    if node.children:
        return _attention(node) if node.kind == "MultiheadAttention" else 0
    own = count_parameters(node.kind, node.printed)
    if own is None:
        raise bad(node.line, node.text, "what is printed of this module does not tell how many parameters it has")
    return own


def _whole(node: _Node) -> int:
    each = node.count if node.count is not None else _own(node) + sum(_whole(child) for child in node.children)
    return each * len(node.names)


def _attention(node: _Node) -> int:
    """The projections of query, key and value are not printed; they are as wide as the one of the output."""
    out = node.children[0].printed
    width = int(out.get("in_features", "0"))
    return 3 * width * width + (3 * width if out.get("bias") == "True" else 0)


def _attributes(node: _Node) -> dict[str, str]:
    """As printed, with names for what stands by place where torch has some."""
    names = next((names for start, names in _NAMED.items() if node.kind.startswith(start)), ())
    places = {str(place): name for place, name in enumerate(names)}
    return {places.get(key, key): value for key, value in node.printed.items()}
