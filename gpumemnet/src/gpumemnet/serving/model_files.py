"""A model's two files as one: whoever reads it never meets the facts of one model beside the graph of another.

The facts name the graph by its digest. A new graph is first laid beside the old one, under the name NEXT; then the
facts are replaced, which is the moment at which the new model holds; then the graph takes its place. However that is
cut short, the graph that the facts name is under one of the two names. `carma train` writes so
(gpumemnet/training/model_output.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from carma.errors import PluginError
from gpumemnet.serving.model_facts import Facts, read_facts

GRAPH, NEXT = ".onnx", ".onnx.new"
LOOKS = 2  # between reading the facts and the graph both may have been replaced


def digest(graph: bytes) -> str:
    return hashlib.sha256(graph).hexdigest()


def read_pair(file: Path) -> tuple[Facts, bytes]:
    """The facts in `file`, and the graph that belongs to them."""
    for _ in range(LOOKS):
        facts = read_facts(file)
        for name in (GRAPH, NEXT) if facts.graph_sha256 else (GRAPH,):
            graph = _bytes(file.with_suffix(name))
            if graph is not None and facts.graph_sha256 in ("", digest(graph)):
                return facts, graph
    raise PluginError(
        f"{file.with_suffix(GRAPH)} is missing, or is not the graph that {file.name} was written with",
        "Copy both files of a model, or make it again with carma train.",
    )


def _bytes(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PluginError(
            f"{file} cannot be read: {error.strerror}", "Make it readable, or run carma train."
        ) from error
