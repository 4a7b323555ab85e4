"""Parses `print(model)` into a tree of modules, also with the counts in the published transformer summaries
(`…, 590,592 params`). printed.py interprets the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from gpumemnet.summaries.text import CACHED, MOST_LAYERS, bad, cut_off, read_count, too_many

_MODULE = re.compile(
    r"\s*(?:\((?P<name>[^()]*)\): )?(?:(?P<times>\d{1,9}) x )?(?P<kind>[A-Za-z_][\w.]{0,200})"
    r"(?(name) ?)\((?P<rest>.*)",
    re.DOTALL | re.ASCII,
)
_CLOSE = re.compile(r"\s*\)(?:, (?P<count>[\d,]+) params)?\s*")
_COUNTED = re.compile(r"(?P<rest>.*\)), (?P<count>[\d,]+) params\s*", re.DOTALL)
_NAMED_LINE = re.compile(r"\s*\([^()]*\):")
_SPAN = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)
_DEEPEST = 200


@dataclass(slots=True)
class Node:
    """A module as printed; `line` counts from 0."""

    kind: str
    line: int
    text: str
    names: tuple[str, ...] = ("",)  # one for each of `(0-11): 12 x`
    printed: dict[str, str] = field(default_factory=dict)
    count: int | None = None  # of the whole module, if the text has it
    children: list[Node] = field(default_factory=list)
    own: int = 0  # parameters of its own, without its children's
    whole: int = 0  # with them, of one of its names
    is_called: bool = True  # itself; its weight may be called under another name


def starts_tree(line: str) -> bool:
    if not line[:1].strip(" \t)"):
        return False
    found = _MODULE.fullmatch(line)
    return found is not None and found["name"] is None and found["kind"][0].isupper()


def opens_tree(lines: Sequence[str], number: int) -> bool:
    """Whether it contains modules, unlike other objects that are printed with brackets (`Namespace(lr=0.1)`)."""
    below = next((line for line in lines[number + 1 : number + 4] if line.strip()), "")
    return lines[number].rstrip().endswith("(") and _NAMED_LINE.match(below) is not None


def parse_tree(lines: Sequence[str], start: int) -> Node:
    open_nodes: list[Node] = []
    modules = 0
    for number in range(start, len(lines)):
        line = lines[number]
        text = line.strip()
        if not text:
            continue
        if text[0] == ")" and (closed := _CLOSE.fullmatch(line)):
            node = open_nodes.pop()
            node.count = read_count(closed["count"]) if closed["count"] else None
            if not open_nodes:
                return node
            continue
        child = _node(line, number, not open_nodes)
        if child is None:
            if not open_nodes[-1].children and "=" in text:
                open_nodes[-1].printed = _printed(text)  # of a layer with modules inside
            continue  # a line of the block's own description
        node, opens = child
        modules += len(node.names)
        if modules > MOST_LAYERS:
            raise too_many(start, lines[start])  # before they are processed
        if open_nodes:
            open_nodes[-1].children.append(node)
        if opens and len(open_nodes) == _DEEPEST:
            raise bad(number, line, f"modules lie more than {_DEEPEST} deep in one another")
        if opens:
            open_nodes.append(node)
        elif not open_nodes:
            return node
    node = open_nodes[-1]
    raise cut_off(node.line, node.text, "this module")


def _node(line: str, number: int, is_root: bool) -> tuple[Node, bool] | None:
    found = _MODULE.fullmatch(line)
    if found is None or (found["name"] is None and not is_root):
        if _NAMED_LINE.match(line):
            raise bad(number, line, "not a module as print(model) shows it")
        return None
    name, times, kind, rest = found.groups()
    rest, count = rest.rstrip(), None
    if rest.endswith("params") and (counted := _COUNTED.fullmatch(rest)):
        rest, count = counted["rest"], read_count(counted["count"])
    names = (name or "",) if times is None else _names(name or "", int(times), line, number)
    node = Node(kind.rpartition(".")[2], number, line, names, count=count)
    if not rest:
        return node, True
    if not rest.endswith(")") or rest.count("(") + 1 != rest.count(")"):
        raise bad(number, line, "the brackets of this module do not match")
    node.printed = _printed(rest[:-1])
    return node, False


def _names(name: str, times: int, line: str, number: int) -> tuple[str, ...]:
    if times == 1:
        return (name,)
    if times > MOST_LAYERS:
        raise too_many(number, line)
    span = _SPAN.fullmatch(name)
    if span is None or int(span[2]) - int(span[1]) + 1 != times:
        raise bad(number, line, f"({name}) does not name {times} modules")
    return tuple(str(place) for place in range(int(span[1]), int(span[2]) + 1))


@lru_cache(CACHED)
def _printed(text: str) -> dict[str, str]:
    """`3, 64, kernel_size=(7, 7)`: by name, or by position without one."""
    found: dict[str, str] = {}
    for part in _split(text):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            found[name] = value.strip()
        elif part:
            found[str(len(found))] = part
    return found


def _split(text: str) -> Iterator[str]:
    """Splits at commas outside of brackets."""
    depth, open_parts = 0, ""
    for part in text.split(","):
        depth += sum(map(part.count, "([{")) - sum(map(part.count, ")]}"))
        whole = open_parts + part
        if depth > 0:
            open_parts = whole + ","
        else:
            yield whole.strip()
            open_parts = ""
    if open_parts:
        yield open_parts.strip()
