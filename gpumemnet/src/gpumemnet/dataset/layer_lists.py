"""Lists the layers of configs' models with inside/layers.py, in an interpreter that has torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from carma.errors import Refused, Usage
from gpumemnet.dataset.config import Config, encode
from gpumemnet.dataset.torch_interpreter import environment
from gpumemnet.directories import make_folder

LISTER = Path(__file__).parent / "inside" / "layers.py"
UNWRITTEN = 3  # as in inside/layers.py
FILE_HINT = "--layers names the file; its lines are kept, and the same command continues."
_HINT = "--python sets an interpreter with torch; a CPU build suffices."


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of inside/layers.py."""

    id: str
    error: str | None = None
    parameters: int = 0
    tied: int = 0
    inside: int = 0
    layers: tuple[dict[str, Any], ...] = ()
    edges: tuple[tuple[int, int], ...] = ()

    @property
    def columns(self) -> dict[str, object]:
        return {
            "parameters": self.parameters,
            "tied_parameters": self.tied,
            "inside_parameters": self.inside,
            "layer_kind": [layer["kind"] for layer in self.layers],
            "layer_output": [layer["output"] for layer in self.layers],
            "layer_input": [layer["inputs"][0] if layer["inputs"] else [] for layer in self.layers],
            "layer_parameters": [layer["parameters"] for layer in self.layers],
            "layer_attributes": [
                json.dumps(layer["attributes"], separators=(",", ":"), sort_keys=True) for layer in self.layers
            ],
            "layer_inplace": [layer["inplace"] for layer in self.layers],
            "edge_from": [source for source, _ in self.edges],
            "edge_to": [target for _, target in self.edges],
        }


class Lister(NamedTuple):
    """The interpreter, and the file of its lines: listing thousands of models takes minutes."""

    python: str
    layers_file: Path
    processes: int = 2

    def list(self, configs: Iterable[Config]) -> dict[str, Listed]:
        wanted = {config.id: config for config in configs}
        make_folder(self.layers_file.parent, FILE_HINT)
        with tempfile.TemporaryDirectory(prefix="carma-layers-") as folder:
            file = Path(folder) / "configs.jsonl"
            file.write_bytes(b"\n".join(map(encode, wanted.values())))
            command = [self.python, str(LISTER), str(file), str(self.layers_file), "--processes", str(self.processes)]
            _run([*command, "--parent", str(os.getpid())])
        return _read(self.layers_file, wanted)


def _run(command: Sequence[str]) -> None:
    """If it fails, its last line is the reason."""
    try:
        process = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise Usage(f"{command[0]} cannot be run: {error.strerror}", _HINT) from error
    last = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if process.returncode == UNWRITTEN:
        raise Refused(last, FILE_HINT)
    if process.returncode:
        raise Refused(f"{command[0]} cannot list layers: {last}", _HINT)


def _read(path: Path, wanted: Mapping[str, object]) -> dict[str, Listed]:
    """The lines by id. The last of two lines with one id counts, because the config has changed."""
    decoder = msgspec.json.Decoder(Listed)
    found: dict[str, Listed] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                answer = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise Usage(f"{path}, line {number}: {error}", "Delete the file; it will be written again.") from error
            if answer.id in wanted:
                found[answer.id] = answer
    return found
