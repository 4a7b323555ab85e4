"""Tables of torchsummary (`Conv2d-1   [-1, 64, 112, 112]   9,408`) and of torchinfo (a tree, columns of many kinds)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from carma.core.model import Record
from carma.estimate.described import Described, Layer
from carma.estimate.summaries.kinds import is_container, is_plain
from carma.estimate.summaries.lines import bad, read_count, read_shape

_FLAT_ROW = re.compile(r"\s*(?P<kind>\w+)-\d+\s+(?P<shape>\[.*\])\s+(?P<count>[\d,]+)\s*")
_TREE_ROW = re.compile(r"(?P<branch>[\s│├└─|+-]*)(?P<kind>\w+)(?: \((?P<name>[^)]*)\))?(?:: \d+-\d+)?")
_RULE = re.compile(r"\s*[=\-_]{8,}\s*")
_TOTAL = re.compile(r"\s*Total params:\s*([\d,]+)")


class _Row(Record, frozen=True, kw_only=True):
    """A line of a table. `depth` 0 is the model; the flat table has no depths and prints a block after its layers."""

    kind: str
    depth: int = 1
    name: str = ""
    output: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    parameters: int = 0
    attributes: dict[str, str] = {}


def read_table(lines: Sequence[str], header: int, batch: int | None) -> Described:
    columns = _columns(lines[header])
    first, end = _body(lines, header)
    # torchinfo without its settings for rows has torchsummary's head, so the first row decides.
    nested = _FLAT_ROW.fullmatch(next(line for line in lines[first:end] if line.strip())) is None
    rows = [
        _tree_row(lines[number], number, columns) if nested else _flat_row(lines[number], number)
        for number in range(first, end)
        if lines[number].strip()
    ]
    total = _total(lines[end:])
    if nested:
        return _described(_leaves(rows), rows[0].taken, total, batch)
    counted = sum(row.parameters for row in rows)
    if total is not None and counted != total:
        raise bad(header, lines[header], f"the rows below have {counted:,} parameters, the total says {total:,}")
    return _described([_layer(row) for row in rows if not _is_block(row)], (), total, batch)


def _body(lines: Sequence[str], header: int) -> tuple[int, int]:
    """Where the rows begin and end: between the rule below the head and the next one."""
    rules = [number for number in range(header + 1, len(lines)) if _RULE.fullmatch(lines[number])][:2]
    if len(rules) < 2:
        raise bad(header, lines[header], "the table that begins here is not closed; the text has been cut off")
    if not any(line.strip() for line in lines[rules[0] + 1 : rules[1]]):
        raise bad(header, lines[header], "no layers follow the head of the table")
    return rules[0] + 1, rules[1]


def _columns(head: str) -> dict[str, tuple[int, int]]:
    """Where each column of a torchinfo table begins and ends; names are at least two spaces apart."""
    names = list(re.finditer(r"\S+(?: \S+)*", head))
    ends = [following.start() for following in names[1:]] + [10**9]
    return {found[0]: (found.start(), end) for found, end in zip(names, ends, strict=True)}


def _flat_row(line: str, number: int) -> _Row:
    found = _FLAT_ROW.fullmatch(line)
    shape = read_shape(found["shape"]) if found else None
    count = read_count(found["count"]) if found else None
    if found is None or shape is None or count is None:
        raise bad(number, line, "not a row of a torchsummary table (layer, output shape, parameters)")
    return _Row(kind=found["kind"], output=shape, parameters=count)


def _is_block(row: _Row) -> bool:
    """A module of modules: torchsummary prints it like a layer. Only its class tells; those of torch are known."""
    return row.parameters == 0 and not is_plain(row.kind)


def _tree_row(line: str, number: int, columns: dict[str, tuple[int, int]]) -> _Row:
    cells = {name: line[start:end].strip() for name, (start, end) in columns.items()}
    first = next((text for name, text in cells.items() if name.startswith("Layer (type")), "")
    found = _TREE_ROW.fullmatch(first)
    if found is None:
        raise bad(number, line, "not a row of a torchsummary or torchinfo table (layer, shapes, parameters)")
    count = cells.get("Param #", "--")
    parameters = read_count(count)
    if parameters is None and count not in ("--", "(recursive)", ""):
        raise bad(number, line, f"{count!r} is not a number of parameters")
    taken = read_shape(cells.get("Input Shape", "")) or ()
    attributes = {"kernel_size": cells["Kernel Shape"]} if cells.get("Kernel Shape", "--") != "--" else {}
    if found["kind"].startswith("Conv") and len(taken) > 1:
        attributes["in_channels"] = str(taken[1])
    return _Row(
        kind=found["kind"],
        depth=_depth(found["branch"]),
        name=found["name"] or "",
        output=read_shape(cells.get("Output Shape", "")) or (),
        taken=taken,
        parameters=parameters or 0,
        attributes=attributes,
    )


def _depth(branch: str) -> int:
    """`├─` is a child of the model; each `│` before it one more. Terminals without these signs get `+` and `|`."""
    return 1 + branch.count("│") + branch.count("|") if branch.strip() else 0


def _leaves(rows: Sequence[_Row]) -> list[Layer]:
    """Modules without children, with their path; blocks only where they own parameters, without their output, which
    their last layer made."""
    found: list[Layer] = []
    path: list[str] = []
    for row, below in zip(rows, [*rows[1:], None], strict=True):
        path = [*path[: row.depth], row.name]
        holds = below is not None and below.depth > row.depth
        if holds and not row.parameters:
            continue
        if not holds and is_container(row.kind) and not row.parameters:
            continue
        name = ".".join(path[1:]) if all(path[1:]) else ""
        layer = _layer(row)
        found.append(msgspec.structs.replace(layer, name=name, output=() if holds else layer.output))
    return found


def _layer(row: _Row) -> Layer:
    inputs = (row.taken,) if row.taken else ()
    return Layer(kind=row.kind, output=row.output, parameters=row.parameters, inputs=inputs, attributes=row.attributes)


def _total(lines: Sequence[str]) -> int | None:
    found = next((match for line in lines if (match := _TOTAL.match(line))), None)
    return read_count(found[1]) if found else None


def _described(layers: Sequence[Layer], taken: tuple[int, ...], total: int | None, batch: int | None) -> Described:
    """With the batch asked for in place of the one that the table was printed with (-1: none was told)."""
    firsts = Counter(layer.output[0] for layer in layers if layer.output)
    printed = firsts.most_common(1)[0][0] if firsts else -1
    told = batch or (printed if printed > 0 else None)

    def rebatched(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (told or 1, *shape[1:]) if shape and shape[0] == printed else shape

    return Described(
        layers=tuple(
            msgspec.structs.replace(
                layer, output=rebatched(layer.output), inputs=tuple(rebatched(shape) for shape in layer.inputs)
            )
            for layer in layers
        ),
        batch=told,
        parameters=sum(layer.parameters for layer in layers) if total is None else total,
        input=rebatched(taken),
    )
