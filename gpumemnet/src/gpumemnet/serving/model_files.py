"""A model's two files as one: a reader never gets the facts of one model with the graph of another.

The facts contain the digest of the graph. A new graph is first written beside the old one, with the suffix NEXT; then
the facts are replaced, which makes the new model valid; then the graph is renamed. Whenever this is interrupted, the
graph of the facts is in one of the two files. `carma train` writes in this order (gpumemnet/training/model_output.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from carma.errors import PluginError
from gpumemnet.serving.model_facts import Facts, read_facts

GRAPH, NEXT = ".onnx", ".onnx.new"
LOOKS = 2  # both files may be replaced between reading the facts and the graph


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
