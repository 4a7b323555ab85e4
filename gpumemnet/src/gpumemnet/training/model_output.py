"""Puts a learned model where it is asked for: both of its files, or the old ones as they were."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from msgspec.structs import replace

from carma.errors import PluginError
from gpumemnet.directories import cannot_write, sync_folder, write_whole
from gpumemnet.serving.model_facts import Facts, encode_facts, read_facts
from gpumemnet.serving.model_files import GRAPH, NEXT, digest


def write_pair(facts: Facts, graph: bytes, file: Path) -> None:
    """`file` is that of the facts. In the order that `pair` tells: killed at any moment, one of the models holds."""
    new, its_place = file.with_suffix(NEXT), file.with_suffix(GRAPH)
    try:
        _finish(file)
        write_whole(new, graph)
        try:
            write_whole(file, encode_facts(replace(facts, graph_sha256=digest(graph))))
        finally:
            if not _finish(file):
                new.unlink(missing_ok=True)
        sync_folder(file.parent)
    except OSError as error:
        raise cannot_write(its_place, error) from error


def _finish(file: Path) -> bool:
    """Whether the facts name the graph that waits, which is then put in its place: now, or where it was cut short."""
    new = file.with_suffix(NEXT)
    with contextlib.suppress(FileNotFoundError, PluginError):
        if digest(new.read_bytes()) == read_facts(file).graph_sha256:
            os.replace(new, file.with_suffix(GRAPH))
            return True
    return False
