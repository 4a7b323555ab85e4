"""A data-set file, as Parquet on disk and as typed columns in memory. Files are checked when they are read (check.py).

A row gives the same `Described` as a trial run or a summary, so that training and serving compute features from the
same object. The layers of all rows are concatenated, because there are hundreds of thousands of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from carma.errors import Usage
from carma.trial.layers.description import Described, Layer
from gpumemnet.dataset.config import Config, Op, ops_of
from gpumemnet.dataset.schema import (
    COLUMNS,
    CONFIG_COLUMNS,
    DELTAS,
    DICTIONARIES,
    FORMAT,
    LICENCE,
    PLAIN,
    Column,
    pyarrow,
    schema,
)
from gpumemnet.directories import write_whole
from gpumemnet.summaries.training_options import OPTIMIZERS, TYPES

Wholes = NDArray[np.int64]
Numbers = NDArray[np.float64]
Head = Mapping[str, object]
HINT = "`carma dataset pack` writes such files."
# Kinds of columns that are encoded with a dictionary, and the ends of their names in the file.
LEAVES = {"word": "", "whole": "", "words": ".list.element", "shapes": ".list.element.list.element"}


@dataclass(frozen=True)
class Shapes:
    """One shape for each layer: that of layer k is `values[offsets[k]:offsets[k + 1]]`."""

    offsets: Wholes
    values: Wholes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def elements(self) -> Numbers:
        """Number of elements of each; 0 for an empty shape."""
        counted = np.multiply.reduceat(np.append(self.values, 1).astype(np.float64), self.offsets[:-1])
        counted[self.offsets[1:] == self.offsets[:-1]] = 0.0
        return counted


@dataclass(frozen=True)
class Layers:
    """The layers of row r are the places `offsets[r]` to `offsets[r + 1]` of every column."""

    offsets: Wholes
    kinds: tuple[str, ...]
    kind: Wholes  # indices in `kinds`
    output: Shapes
    input: Shapes
    parameters: Wholes
    known_attributes: tuple[dict[str, str], ...]
    attributes: Wholes  # indices in `known_attributes`
    inplace: NDArray[np.bool_]


@dataclass(frozen=True)
class Edges:
    offsets: Wholes
    source: Wholes  # indices in the row's own list of layers
    target: Wholes


@dataclass(frozen=True)
class Table:
    family: str
    heads: tuple[Head, ...]  # of the measurements: GPU, driver, versions, date, command
    ids: tuple[str, ...]
    configs: tuple[Config, ...]
    columns: Mapping[str, Numbers]  # columns of numbers; switches are 0 and 1, missing values NaN
    settings: Mapping[str, tuple[object, ...]]  # columns that are no numbers: shape, input, loss, optimizer, precision
    layers: Layers
    edges: Edges

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, column: str) -> Numbers:
        return self.columns[column]

    def described(self, row: int) -> Described:
        """The row's model as a trial run would describe it."""
        config = self.configs[row]
        optimizer, slots = OPTIMIZERS[config.optimizer]
        dtype, autocast = TYPES[config.precision]
        attention = next((op for op in ops_of(config.model) if op["op"] == "attention"), None)
        return Described(
            layers=tuple(self.layers_of(row)),
            batch=config.batch,
            parameters=int(self.columns["parameters"][row]),
            input=(config.batch, *config.input),
            dtype=dtype,
            autocast=autocast,
            optimizer=optimizer,
            optimizer_slots=slots,
            checkpointing=config.checkpointing,
            channels_last=config.channels_last,
            attention=_attention(attention) if attention else "",
            heads=int(str(attention["heads"])) if attention else None,
        )

    def layers_of(self, row: int) -> Iterator[Layer]:
        layers = self.layers
        span = slice(layers.offsets[row], layers.offsets[row + 1])
        columns = (layers.kind, layers.parameters, layers.attributes, layers.inplace)
        cut = [column[span].tolist() for column in columns]
        shapes = (_cut(layers.output, span), _cut(layers.input, span))
        for kind, parameters, attributes, inplace, output, taken in zip(*cut, *shapes, strict=True):
            yield Layer(
                kind=layers.kinds[kind],
                output=output,
                parameters=parameters,
                inputs=(taken,) if taken else (),
                attributes=layers.known_attributes[attributes],
                inplace=inplace,
            )


def _attention(op: Op) -> str:
    """torch's own module calls the fused function, whatever the config says."""
    return "sdpa" if op.get("style") == "torch" else str(op.get("how", "sdpa"))


def _cut(shapes: Shapes, span: slice) -> Iterator[tuple[int, ...]]:
    bounds = shapes.offsets[span.start : span.stop + 1].tolist()
    for begin, end in itertools.pairwise(bounds):
        yield tuple(shapes.values[begin:end].tolist())


def write(path: Path, rows: Sequence[Mapping[str, object]], heads: Sequence[Head]) -> None:
    """Replaces the file atomically. Rows are sorted by id, so that equal data is an equal file."""
    arrow = pyarrow()
    ordered = sorted(rows, key=lambda row: str(row["id"]))
    made = arrow.Table.from_pylist(ordered, schema=schema())
    metadata = {
        "carma.format": FORMAT,
        "carma.licence": LICENCE,
        "carma.heads": json.dumps(list(heads), sort_keys=True),
    }
    drawn_up = arrow.BufferOutputStream()
    # Delta encoding excludes a dictionary, so these columns are listed.
    arrow.parquet.write_table(
        made.replace_schema_metadata(metadata),
        drawn_up,
        compression="zstd",
        compression_level=19,
        use_dictionary=[column.name + LEAVES[column.kind] for column in COLUMNS if _is_coded(column)],
        column_encoding=dict.fromkeys(DELTAS, "DELTA_BINARY_PACKED"),
        dictionary_pagesize_limit=1 << 24,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, drawn_up.getvalue().to_pybytes())


def _is_coded(column: Column) -> bool:
    return column.kind in LEAVES and column.name not in ("id", "config")


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[Head]]:
    """Rows for `write`, to extend a file."""
    table = _arrow(path)
    return table.to_pylist(), _heads(table)


def read(path: Path) -> Table:
    """Refuses a file with impossible values, and names the row and the column."""
    from gpumemnet.dataset.check import check

    table = _typed(_arrow(path, DICTIONARIES), path)
    check(table, path)
    return table


def _arrow(path: Path, dictionaries: Sequence[str] = ()) -> Any:
    arrow = pyarrow()
    try:
        found = arrow.parquet.read_schema(path)
        if (found.metadata or {}).get(b"carma.format") != FORMAT.encode():
            raise Usage(f"{path} is no data set of format {FORMAT}", HINT)
        for field in schema():
            if found.get_field_index(field.name) < 0 or found.field(field.name).type != field.type:
                raise Usage(f"{path}: the column {field.name} is missing, or is no {field.type}", HINT)
        return arrow.parquet.read_table(path, read_dictionary=list(dictionaries))
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror or error}", HINT) from error
    except arrow.ArrowInvalid as error:
        raise Usage(f"{path} is no Parquet file: {error}", HINT) from error


def _heads(table: Any) -> list[Head]:
    return list(json.loads(table.schema.metadata[b"carma.heads"]))


def _typed(table: Any, path: Path) -> Table:
    ids = tuple(table.column("id").to_pylist())
    families = sorted(set(table.column("family").to_pylist()))
    if len(families) != 1:
        raise Usage(f"{path}: the column family holds {', '.join(families) or 'nothing'}, not one family", HINT)
    numbers = [column.name for column in COLUMNS if column.kind in PLAIN]
    edges, source = _flat(table, "edge_from")
    return Table(
        family=families[0],
        heads=tuple(_heads(table)),
        ids=ids,
        configs=tuple(
            _config(line, row, path) for row, line in zip(ids, table.column("config").to_pylist(), strict=True)
        ),
        columns={name: _numbers(table, name) for name in numbers},
        settings={name: _settings(table, name) for name in CONFIG_COLUMNS if name not in numbers},
        layers=_layers(table),
        edges=Edges(edges, source, _flat(table, "edge_to")[1]),
    )


def _settings(table: Any, name: str) -> tuple[object, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in table.column(name).to_pylist())


def _config(line: str, row: str, path: Path) -> Config:
    try:
        return msgspec.json.decode(line, type=Config)
    except msgspec.MsgspecError as error:
        raise Usage(f"{path}: row {row}, column config: {error}", HINT) from error


def _numbers(table: Any, name: str) -> Numbers:
    column = table.column(name).combine_chunks()
    made: Numbers = column.cast(pyarrow().float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    return made


def _whole(table: Any, name: str) -> tuple[Wholes, Any]:
    """The offsets of each row in the flat array, and that array."""
    column = table.column(name).combine_chunks()
    offsets = np.asarray(column.offsets, dtype=np.int64)
    return offsets - offsets[0], column.flatten()


def _flat(table: Any, name: str) -> tuple[Wholes, Wholes]:
    offsets, flat = _whole(table, name)
    return offsets, flat.to_numpy(zero_copy_only=False).astype(np.int64)


def _shapes(table: Any, name: str) -> Shapes:
    inner = _whole(table, name)[1]
    offsets = np.asarray(inner.offsets, dtype=np.int64)
    return Shapes(offsets - offsets[0], inner.flatten().to_numpy(zero_copy_only=False).astype(np.int64))


def _coded(table: Any, name: str) -> tuple[Wholes, list[str]]:
    coded = _whole(table, name)[1]
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary.to_pylist()


def _layers(table: Any) -> Layers:
    kind, kinds = _coded(table, "layer_kind")
    attributes, known = _coded(table, "layer_attributes")
    offsets, parameters = _flat(table, "layer_parameters")
    return Layers(
        offsets=offsets,
        kinds=tuple(kinds),
        kind=kind,
        output=_shapes(table, "layer_output"),
        input=_shapes(table, "layer_input"),
        parameters=parameters,
        known_attributes=tuple(json.loads(text) for text in known),
        attributes=attributes,
        inplace=_whole(table, "layer_inplace")[1].to_numpy(zero_copy_only=False),
    )
