"""Puts configs, what was measured and their layers together: one Parquet file a family.

Where a file is there already, it is extended: a row whose id is there replaces it, but a row without activity does not
take the activity of an earlier one away.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model import Record
from carma.dataset.clean import NO_LAYERS, OTHER, Cleaning, Measured, Report, read_measured
from carma.dataset.config import FAMILIES, Config, encode, read_configs, write_configs
from carma.dataset.schema import ACTIVITY, CONFIG_COLUMNS
from carma.dataset.table import Head, read, read_rows, write
from carma.errors import Refused, Usage

LISTER = Path(__file__).parent / "inside" / "layers.py"
MOST_BYTES = 8_000_000  # of a file that is to be kept in a repository
_HINT = "--python names one that has torch; a CPU build will do."


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
            "layer_attributes": [_attributes(layer["attributes"]) for layer in self.layers],
            "layer_inplace": [layer["inplace"] for layer in self.layers],
            "edge_from": [source for source, _ in self.edges],
            "edge_to": [target for _, target in self.edges],
        }


class Packed(Record, frozen=True, kw_only=True):
    files: dict[str, int]  # rows of each
    file_bytes: dict[str, int]
    report: Report


def pack(
    configs_file: Path, rows_files: Sequence[Path], layers_file: Path, out: Path, python: str, processes: int = 2
) -> Packed:
    configs = {config.id: config for config in read_configs(configs_file)}
    lines = [line for path in rows_files for line in read_measured(path)]
    rows = [line for line in lines if isinstance(line, Measured)]
    heads = [line for line in lines if not isinstance(line, Measured)]
    cleaning = Cleaning()
    kept = cleaning.clean(rows, configs)
    list_layers([configs[id] for id in kept], layers_file, python, processes)
    listed = read_layers(layers_file, kept)
    made = [row for id in list(kept) if (row := _row(configs[id], kept, listed, cleaning)) is not None]
    files = {
        str(out / f"{family}.parquet"): extend(out / f"{family}.parquet", own, heads)
        for family in FAMILIES
        if (own := [row for row in made if row["family"] == family])
    }
    return Packed(
        files=files,
        file_bytes={name: Path(name).stat().st_size for name in files},
        report=cleaning.report(len(rows), list(kept.values())),
    )


def extend(path: Path, rows: Sequence[Mapping[str, object]], heads: Sequence[Head]) -> int:
    """How many rows it then has. What was written is read again, so that no file is left that cannot be."""
    old, old_heads = read_rows(path) if path.exists() else ([], [])
    merged: dict[object, Mapping[str, object]] = {row["id"]: row for row in old}
    for row in rows:
        merged[row["id"]] = _over(merged.get(row["id"]), row)
    all_heads = {json.dumps(head, sort_keys=True): head for head in (*old_heads, *heads)}
    unchecked = path.with_name(path.name + ".unchecked")
    write(unchecked, list(merged.values()), list(all_heads.values()))
    try:
        read(unchecked)
        size = unchecked.stat().st_size
        if size > MOST_BYTES:
            raise Refused(f"{path} would have {size:,} bytes, more than {MOST_BYTES:,}", "Pack fewer rows.")
        unchecked.replace(path)
    finally:
        unchecked.unlink(missing_ok=True)
    return len(merged)


def _over(old: Mapping[str, object] | None, new: Mapping[str, object]) -> Mapping[str, object]:
    if old is None or new["step_ms"] is not None:
        return new
    return {**new, **{column.name: old[column.name] for column in ACTIVITY}}


def _row(
    config: Config, kept: dict[str, Measured], listed: Mapping[str, Listed], cleaning: Cleaning
) -> dict[str, object] | None:
    measured, layers = kept[config.id], listed.get(config.id)
    why = None
    if layers is None or layers.error or not layers.layers:
        why = NO_LAYERS
    elif measured.parameters not in (None, layers.parameters):
        why = OTHER
    if why is not None or layers is None:
        cleaning.drop(why or NO_LAYERS, config.id)
        del kept[config.id]
        return None
    settings = {name: getattr(config, name) for name in CONFIG_COLUMNS}
    return {**settings, "config": encode(config).decode(), **layers.columns, **measured.columns}


def list_layers(configs: Iterable[Config], layers_file: Path, python: str, processes: int) -> None:
    """Runs the lister in the interpreter that has torch; it keeps the lines that are there."""
    layers_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="carma-layers-") as folder:
        wanted = Path(folder) / "configs.jsonl"
        write_configs(configs, wanted)
        _run([python, str(LISTER), str(wanted), str(layers_file), "--processes", str(processes)])


def _run(command: Sequence[str], call: Callable[..., Any] = subprocess.run) -> None:
    try:
        done = call(command, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise Usage(f"{command[0]} cannot be run: {error.strerror}", _HINT) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refused(f"{command[0]} cannot list layers: {last}", _HINT)


def read_layers(path: Path, wanted: Mapping[str, object]) -> dict[str, Listed]:
    decoder = msgspec.json.Decoder(Listed)
    found: dict[str, Listed] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                said = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise Usage(f"{path}, line {number}: {error}", "Delete it: it is made again.") from error
            if said.id in wanted:
                found[said.id] = said
    return found


def _attributes(attributes: dict[str, str]) -> str:
    return json.dumps(attributes, separators=(",", ":"), sort_keys=True)
