"""Reads models from summaries: tables of torchsummary, torchinfo and Keras, `print(model)`, ONNX files.

`read_summary` is the extension `model-summary` of `carma estimate --summary`.

The published workloads come with such texts (their `.model` files). A table contains parameters and outputs. A printed
module contains parameters only, so its outputs are inferred if the shape of an input is given. Text that cannot be read
is an error with its line.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from msgspec.structs import replace

from carma.errors import Usage
from carma.trial.layers.description import ReadSummary, TrainingOptions
from gpumemnet.summaries.keras_summary import is_keras, read_keras
from gpumemnet.summaries.module_tree import opens_tree, starts_tree
from gpumemnet.summaries.onnx_file import is_onnx, read_onnx, read_onnx_bytes
from gpumemnet.summaries.printed import read_tree
from gpumemnet.summaries.shapes import Shape
from gpumemnet.summaries.text import HINT, counted, is_header
from gpumemnet.summaries.torch_tables import read_table
from gpumemnet.summaries.training_options import completed

_MOST_BYTES = 64 << 20
_START = 4096
_ARCHIVE = b"PK\x03\x04"  # also what torch.save writes, and Keras' own format
_PRINT = "Load the model and save what torchinfo.summary(model, ...), print(model) or model.summary() shows."
_MOST_ELEMENTS = 1 << 50  # of all outputs: a million times a GPU


def read_summary(
    source: Path | bytes, options: TrainingOptions, *, batch: int | None, sample: tuple[int, ...]
) -> ReadSummary:
    """Implements `carma.trial.layers.description.SummaryReader`."""
    if isinstance(source, bytes):
        return completed(read_bytes(source, batch=batch, sample=sample), options)
    return completed(read_file(source, batch=batch, sample=sample), options)


def read_file(file: Path, *, batch: int | None = None, sample: Shape = ()) -> ReadSummary:
    """A summary's text or an ONNX file, recognised by name or by content. Raises OSError if it cannot be opened."""
    _check_batch(batch)
    if file.suffix.lower() == ".onnx":
        return _checked(read_onnx(file, batch, sample))
    with file.open("rb") as opened:
        start = opened.read(_START)
        if is_onnx(start):  # continue reading: it may be a pipe
            return read_bytes(start + opened.read(), batch=batch, sample=sample)
        return read_bytes(start + opened.read(_MOST_BYTES), batch=batch, sample=sample)


def read_bytes(raw: bytes, *, batch: int | None = None, sample: Shape = ()) -> ReadSummary:
    """The content of a file or a pipe. Consoles of Windows write two bytes for each character."""
    if is_onnx(raw[:_START]):
        _check_batch(batch)
        return _checked(read_onnx_bytes(raw, batch, sample))
    if not raw.strip():
        raise Usage("it is empty", HINT)
    if raw.startswith(_ARCHIVE):
        raise Usage("it is an archive, such as a file of weights, which does not contain the layers", _PRINT)
    wide = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not wide and b"\0" in raw:
        raise Usage("it is no text, and does not begin like an ONNX file", HINT)
    text = raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")
    return read_text(text, batch=batch, sample=sample)


def _check_batch(batch: int | None) -> None:
    if batch is not None and batch < 1:
        raise Usage(f"a batch of {batch} cannot be trained with", "Give a batch of 1 or more.")


def read_text(text: str, *, batch: int | None = None, sample: Shape = ()) -> ReadSummary:
    """Raises Usage for other text. `batch` replaces the batch of a table. `sample` is the shape of one input without
    the batch, for summaries without outputs."""
    _check_batch(batch)
    if len(text) > _MOST_BYTES:
        raise Usage("the model summary is larger than 64 MiB", HINT)
    lines = text.splitlines()
    tables = [number for number, line in enumerate(lines) if "Layer (type" in line and is_header(line)]
    if tables:
        read = read_keras if is_keras(lines, tables[0]) else read_table
        return _checked(_among(read(lines, tables[0], batch, sample), "table", tables))
    trees = [number for number, line in enumerate(lines) if starts_tree(line)]
    if not trees:
        raise Usage("the text is not a model summary: it has neither a table of layers nor a printed module", HINT)
    blocks = [number for number in trees if opens_tree(lines, number)] or trees[:1]
    return _checked(_among(read_tree(lines, blocks[0], batch, sample), "printed model", blocks))


def _among(read: ReadSummary, what: str, starts: list[int]) -> ReadSummary:
    """Reads the first model, also if a task trains several networks."""
    if len(starts) < 2:
        return read
    remark = f"the text has {counted(len(starts), what)}: only the first, from line {starts[0] + 1} on, is read"
    return replace(read, remarks=(*read.remarks, remark))


def _checked(read: ReadSummary) -> ReadSummary:
    """Refuses numbers that no memory holds, because arithmetic with them would overflow."""
    elements = sum(prod(layer.output) for layer in read.described.layers)
    if elements < _MOST_ELEMENTS:
        return read
    of_batch = f"with a batch of {read.described.batch:,} " if read.described.batch else ""
    raise Usage(f"{of_batch}the outputs of the model have {elements:.1e} elements: no GPU has room for that", HINT)
