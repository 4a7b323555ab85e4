"""Models from text: tables of torchsummary and torchinfo, and what `print(model)` shows.

The published workloads come with such texts (their `.model` files). A table tells parameters and outputs; a printed
module tells parameters only, so what needs activations refuses it. Text that cannot be read is an error with its line.
"""

from __future__ import annotations

from carma.errors import Usage
from carma.estimate.described import Described
from carma.estimate.summaries.lines import HINT, is_header
from carma.estimate.summaries.table import read_table
from carma.estimate.summaries.tree import read_tree, starts_tree

_MOST_CHARACTERS = 64 << 20


def read_summary(text: str, batch: int | None = None) -> Described:
    """Raises Usage for text that is none of the three. `batch` overrules the one that a table was printed with."""
    if batch is not None and batch < 1:
        raise Usage(f"a batch of {batch} cannot be trained with", "Give a batch of 1 or more.")
    if len(text) > _MOST_CHARACTERS:
        raise Usage("the model summary is larger than 64 MiB", HINT)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if is_header(line):
            return read_table(lines, number, batch)
    for number, line in enumerate(lines):
        if starts_tree(line):
            return read_tree(lines, number, batch)
    raise Usage("the text is not a model summary: it has neither a table of layers nor a printed module", HINT)
