"""Reads tables of torchsummary (`Conv2d-1 [-1, 64, 112, 112] 9,408`) and of torchinfo (a tree, various columns)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from msgspec.structs import replace

from carma.trial.layers.description import Described, Layer, ReadSummary
from gpumemnet.summaries.module_parameters import (
    has_activation,
    holds_weights,
    is_container,
    is_plain,
    is_recurrent,
    uncounted,
)
from gpumemnet.summaries.sequence_lengths import at_length, words_of
from gpumemnet.summaries.shapes import Shape
from gpumemnet.summaries.text import (
    MOST_LAYERS,
    bad,
    counted,
    cut_off,
    first_names,
    has_inner,
    is_header,
    is_rule,
    read_count,
    read_shape,
    too_many,
)
from gpumemnet.summaries.totals import Figures, check_total, input_of, read_figures, square_image

_FLAT_ROW = re.compile(r"\s*(?P<kind>\w{1,200})-\d+\s+(?P<shape>\[.*\])\s+(?P<count>[\d,]+)\s*", re.ASCII)
_TREE_ROW = re.compile(r"([\s│├└─|+-]*)(\w{1,200})(?: \(([^)]*)\))?(?:: \d+-\d+)?", re.ASCII)
_NAME = re.compile(r"\S+(?: \S+)*")
_NO_COUNT = ("--", "(recursive)", "")
_LINEAR = "Conv1D"  # of Hugging Face, which is no convolution
_CUT_SHARE = 0.01  # of the parameters: a layer of an unknown class mostly has fewer
_UNCALLED_SHARE = 0.05  # of the parameters: class tokens and tables of positions are fewer
_NO_SHAPES = "the table has no shapes: torchinfo.summary(model, input_size=(32, 3, 224, 224), depth=10) prints them"


class _Row(NamedTuple):
    """A line of a table. `depth` 0 is the model; the flat table has no depths and prints a block after its layers."""

    depth: int
    layer: Layer


def read_table(lines: Sequence[str], header: int, batch: int | None, sample: Shape) -> ReadSummary:
    first, end = _body(lines, header)
    figures = read_figures(_below(lines, end))
    # torchinfo without its settings for rows has torchsummary's head, so the first row decides.
    if _FLAT_ROW.fullmatch(next(line for line in lines[first:end] if line.strip())) is None:
        rows = _tree_rows(lines, first, end, _columns(lines[header]))
        leaves = _leaves(rows)
        remarks = check_total(_parameters(leaves), figures.total, header, lines[header])
        taken = next(iter(rows[0].layer.inputs), ())
        return _read(leaves, taken, figures, batch, sample, remarks, _gaps(rows, leaves))
    rows = [_flat_row(lines[number], number) for number in range(first, end) if lines[number].strip()]
    count, total = _parameters(rows), figures.total
    if total is not None and count != total:
        raise bad(header, lines[header], f"the rows below have {count:,} parameters, the total says {total:,}")
    rows, notes = _completed(rows)
    figures = figures._replace(total=_parameters(rows))
    return _read([row for row in rows if not _is_block(row.layer)], (), figures, batch, sample, notes, ())


def _parameters(rows: Sequence[_Row]) -> int:
    return sum(row.layer.parameters for row in rows)


def _completed(rows: list[_Row]) -> tuple[list[_Row], tuple[str, ...]]:
    """torchsummary counts only weights of modules that are called: those of attention are added."""
    added = Counter[str]()
    found: list[_Row] = []
    for depth, layer in rows:
        more = 0 if layer.parameters else uncounted(layer.kind, layer.output)
        added.update({layer.kind: more} if more else {})
        found.append(_Row(depth, replace(layer, parameters=layer.parameters + more)))
    if not added:
        return found, ()
    kinds = ", ".join(added)
    return found, (f"torchsummary leaves out the weights of {kinds}: the {added.total():,} of projections are added",)


def _body(lines: Sequence[str], header: int) -> tuple[int, int]:
    """Range of the rows: between the rule below the header and the next one."""
    rules = [number for number in range(header + 1, len(lines)) if is_rule(lines[number])][:2]
    if len(rules) < 2:
        raise cut_off(header, lines[header], "the table that begins here")
    if not any(line.strip() for line in lines[rules[0] + 1 : rules[1]]):
        raise bad(header, lines[header], "no layers follow the head of the table")
    if rules[1] - rules[0] > MOST_LAYERS:
        raise too_many(header, lines[header])
    return rules[0] + 1, rules[1]


def _below(lines: Sequence[str], end: int) -> Sequence[str]:
    """Up to the next table."""
    following = (number for number in range(end, len(lines)) if is_header(lines[number]))
    return lines[end : next(following, len(lines))]


def _columns(head: str) -> dict[str, tuple[int, int]]:
    """Ranges of the columns of a torchinfo table; header names are at least two spaces apart."""
    names = list(_NAME.finditer(head))
    ends = [following.start() for following in names[1:]] + [10**9]
    return {found[0]: (found.start(), end) for found, end in zip(names, ends, strict=True)}


def _flat_row(line: str, number: int) -> _Row:
    found = _FLAT_ROW.fullmatch(line)
    shape = read_shape(found["shape"]) if found else None
    count = read_count(found["count"]) if found else None
    if found is None or shape is None or count is None:
        raise bad(number, line, "not a row of a torchsummary table (layer, output shape, parameters)")
    _check_sizes(shape, line, number)
    return _Row(1, Layer(name="", kind=found["kind"], output=shape, parameters=count))


def _is_block(layer: Layer) -> bool:
    """A module with modules inside. torchsummary prints it like a layer, so only classes of torch are known."""
    return layer.parameters == 0 and not is_plain(layer.kind) and not is_recurrent(layer.kind)


def _tree_rows(lines: Sequence[str], first: int, end: int, columns: dict[str, tuple[int, int]]) -> list[_Row]:
    """Cells by the start of their column."""
    title = next((name for name in columns if name.startswith("Layer (type")), "")
    rows: list[_Row] = []
    for number in range(first, end):
        line = lines[number]
        if not line.strip():
            continue
        cells = {name: line[begin:stop].strip() for name, (begin, stop) in columns.items()}
        found = _TREE_ROW.fullmatch(cells.get(title, ""))
        if found is None:
            raise bad(number, line, "not a row of a torchsummary or torchinfo table (layer, shapes, parameters)")
        branch, kind, name = found.groups()
        output, taken = (_shape(cells.get(column, ""), line, number) for column in ("Output Shape", "Input Shape"))
        kernel = cells.get("Kernel Shape", "")
        attributes = {"kernel_size": kernel} if kernel not in ("", "--") else {}
        if kind.startswith("Conv") and kind != _LINEAR and len(taken) > 1:
            attributes["in_channels"] = str(taken[1])
        layer = Layer(
            name=name or "",
            kind=kind,
            output=output,
            parameters=_count(cells.get("Param #", ""), line, number),
            inputs=(taken,) if taken else (),
            attributes=attributes,
        )
        rows.append(_Row(_depth(branch), layer))
    return rows


def _shape(text: str, line: str, number: int) -> Shape:
    found = read_shape(text) or ()
    _check_sizes(found, line, number)
    return found


def _check_sizes(shape: Shape, line: str, number: int) -> None:
    """-1 as the first size is an unknown batch."""
    if shape and (min(shape) < -1 or -1 in shape[1:]):
        raise bad(number, line, f"{list(shape)} is not the shape of an output: a size is negative")


def _count(text: str, line: str, number: int) -> int:
    found = 0 if text in _NO_COUNT else read_count(text)
    if found is None:
        raise bad(number, line, f"{text!r} is not a number of parameters")
    return found


@lru_cache(256)
def _depth(branch: str) -> int:
    """`├─` is a child of the model; each `│` before it is one level more. Some terminals have `+` and `|` instead."""
    return 1 + branch.count("│") + branch.count("|") if branch.strip() else 0


def _leaves(rows: Sequence[_Row]) -> list[_Row]:
    """Modules without children, named by their path. Blocks only if they own parameters, without their output, which is
    that of their last layer. A norm with its activation has an output of its own."""
    found: list[_Row] = []
    path: list[str] = []
    is_named = any(row.layer.name for row in rows)
    for (depth, layer), has_rows in zip(rows, _has_inner(rows), strict=True):
        if is_named:
            path[depth:] = [layer.name]
        holds = has_rows and not has_activation(layer.kind)
        if not layer.parameters and (holds or is_container(layer.kind)):
            continue
        name = ".".join(path[1:]) if is_named and all(path[1:]) else ""
        found.append(_Row(depth, replace(layer, name=name, output=() if holds else layer.output)))
    return found


def _has_inner(rows: Sequence[_Row]) -> list[bool]:
    return has_inner([row.depth for row in rows])


def _gaps(rows: Sequence[_Row], leaves: Sequence[_Row]) -> tuple[str, ...]:
    """Blocks without their layers have all their parameters in one row: torchinfo stops at a depth of 3 by default. A
    class that is unknown may be a layer, so only the deepest rows count."""
    found = [] if any(row.layer.output for row in rows) else [_NO_SHAPES]
    deepest = max(row.depth for row in rows)
    weighty = [row for row in leaves if row.layer.parameters and not holds_weights(row.layer.kind)]
    cut = [row for row in weighty if row.depth == deepest or is_container(row.layer.kind)]
    if _parameters(cut) > _CUT_SHARE * _parameters(leaves):
        kinds = first_names(row.layer.kind for row in cut)
        stops = f"the table stops above the layers of {counted(len(cut), 'block')} ({kinds})"
        found.append(f"{stops}: print it with depth=10 (torchinfo.summary(model, ..., depth=10))")
    return (*found, *_uncalled(rows, leaves))


def _uncalled(rows: Sequence[_Row], leaves: Sequence[_Row]) -> tuple[str, ...]:
    """A block owns parameters, or modules that were not called when it was printed: those for training only."""
    blocks = [row for row, has_rows in zip(rows, _has_inner(rows), strict=True) if has_rows and row.layer.parameters]
    own = [row for row in blocks if not holds_weights(row.layer.kind)]
    count = _parameters(own)
    if count <= _UNCALLED_SHARE * _parameters(leaves):
        return ()
    kinds = first_names(row.layer.kind for row in own)
    notes = f"{count:,} parameters of {kinds} are of no layer in the table: their modules may not have been called"
    return (f'{notes}; torchinfo.summary(model, ..., mode="train") shows those of training',)


def _read(
    leaves: Sequence[_Row],
    taken: Shape,
    figures: Figures,
    batch: int | None,
    sample: Shape,
    remarks: tuple[str, ...],
    gaps: tuple[str, ...],
) -> ReadSummary:
    """The shape with the requested batch in place of the table's (-1: unknown), and with the requested length for
    language models."""
    layers = tuple(row.layer for row in leaves)
    firsts = Counter(layer.output[0] for layer in layers if layer.output)
    printed = firsts.most_common(1)[0][0] if firsts else -1
    batch_size = batch or (printed if printed > 0 else None)
    words = words_of(layers)
    if words and sample:
        layers, notes = at_length(layers, printed, words, sample)
        words, given = sample[0], (printed, *sample)
    else:
        given, notes = input_of(taken, sample, max(printed, 1), figures.input_mb)
        first = next((layer for layer in layers if layer.output), None)
        given = given or (square_image(first, max(printed, 1), figures.input_mb) if first else ())
    rebatched = partial(_rebatched, printed, batch_size or 1, words)
    described = Described(
        layers=tuple(
            replace(one, output=rebatched(one.output), inputs=tuple(map(rebatched, one.inputs))) for one in layers
        ),
        batch=batch_size,
        parameters=_parameters(leaves) if figures.total is None else figures.total,
        input=rebatched(given) if taken or not given else (batch_size or 1, *given[1:]),
    )
    return ReadSummary(described=described, remarks=(*remarks, *notes), gaps=gaps, frozen=figures.frozen)


def _rebatched(printed: int, batch: int, length: int | None, shape: Shape) -> Shape:
    """`printed`: the batch of the table. `length`: of a language model's samples."""
    if length and shape and shape[0] == printed * length and printed > 0:
        return (batch * length, *shape[1:])  # all words of the batch concatenated
    return (batch, *shape[1:]) if shape and shape[0] == printed else shape
