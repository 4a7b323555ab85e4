"""Models from what describes them: tables of torchsummary, torchinfo and Keras, `print(model)`, ONNX files.

The published workloads come with such texts (their `.model` files). A table tells parameters and outputs; a printed
module tells parameters only, so its outputs are worked out where the shape of an input is given. Text that cannot be
read is an error with its line.
"""

from __future__ import annotations

from pathlib import Path

from carma.errors import Usage
from carma.estimate.described import Described
from carma.estimate.summaries.keras_summary import is_keras, read_keras
from carma.estimate.summaries.lines import HINT, is_header
from carma.estimate.summaries.onnx_file import read_onnx
from carma.estimate.summaries.printed import read_tree
from carma.estimate.summaries.read import Read
from carma.estimate.summaries.shapes import Shape
from carma.estimate.summaries.table import read_table
from carma.estimate.summaries.tree import starts_tree

_MOST_CHARACTERS = 64 << 20


def read_summary(text: str, batch: int | None = None) -> Described:
    """The model alone; `read_text` also tells what is to be said of it."""
    return read_text(text, batch=batch).described


def read_file(file: Path, *, batch: int | None = None, sample: Shape = ()) -> Read:
    """A summary's text, or an ONNX file (by its name, or because it is no text)."""
    _check_batch(batch)
    if file.suffix.lower() == ".onnx" or _is_binary(file):
        return read_onnx(file, batch, sample)
    return read_text(file.read_text(encoding="utf-8", errors="replace"), batch=batch, sample=sample)


def _is_binary(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" in opened.read(4096)


def _check_batch(batch: int | None) -> None:
    if batch is not None and batch < 1:
        raise Usage(f"a batch of {batch} cannot be trained with", "Give a batch of 1 or more.")


def read_text(text: str, *, batch: int | None = None, sample: Shape = ()) -> Read:
    """Raises Usage for text that is no summary. `batch` overrules the one that a table was printed with,
    `sample` is the shape of one input without the batch, for what does not tell the outputs."""
    _check_batch(batch)
    if len(text) > _MOST_CHARACTERS:
        raise Usage("the model summary is larger than 64 MiB", HINT)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if is_header(line):
            return _of_table(lines, number, batch, sample)
    for number, line in enumerate(lines):
        if starts_tree(line):
            return read_tree(lines, number, batch, sample)
    raise Usage("the text is not a model summary: it has neither a table of layers nor a printed module", HINT)


def _of_table(lines: list[str], header: int, batch: int | None, sample: Shape) -> Read:
    if is_keras(lines, header):
        return read_keras(lines, header, batch, sample)
    if sample:
        raise Usage("the table tells the shapes of the outputs: --input has no meaning beside it", HINT)
    return Read(described=read_table(lines, header, batch))
