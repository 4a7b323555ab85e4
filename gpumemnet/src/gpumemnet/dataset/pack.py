"""Combines configs, measured rows and layers into one Parquet file for each family.

An existing file is extended: a row replaces the row with its id, but keeps its activity if it has none of its own and
the config is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from carma.core.model.values import Record
from carma.errors import Refused, Usage
from gpumemnet import FAMILIES
from gpumemnet.dataset.clean import NO_LAYERS, OTHER, Cleaning, CleaningReport, MeasuredRow, read_digests, read_measured
from gpumemnet.dataset.config import Config, encode, read_configs
from gpumemnet.dataset.layer_lists import Listed, Lister
from gpumemnet.dataset.schema import ACTIVITY, CONFIG_COLUMNS
from gpumemnet.dataset.table import Head, read, read_rows, write
from gpumemnet.directories import make_folder

MOST_BYTES = 8_000_000  # of a file in a repository


class Packed(Record, frozen=True, kw_only=True):
    files: dict[str, int]  # rows of each
    file_bytes: dict[str, int]
    untied: int  # rows measured with separate weights that their configs had tied; their configs were corrected
    report: CleaningReport


def pack(configs_file: Path, rows_files: Sequence[Path], out: Path, lister: Lister) -> Packed:
    configs = {config.id: config for config in read_configs(configs_file)}
    if not configs:
        raise Usage(f"{configs_file} has no configs", "`carma dataset generate` makes some.")
    make_folder(out)
    lines = [line for path in rows_files for line in read_measured(path)]
    rows = [line for line in lines if isinstance(line, MeasuredRow)]
    cleaning = Cleaning()
    kept = cleaning.clean(rows, configs, read_digests(configs_file))
    listed = lister.list(configs[id] for id in kept)
    untied = _correct_ties(configs, kept, listed, lister)
    made = [row for id in list(kept) if (row := _row(configs[id], kept, listed.get(id), cleaning)) is not None]
    heads = [line for line in lines if not isinstance(line, MeasuredRow)]
    files = {
        str(out / f"{family}.parquet"): extend(out / f"{family}.parquet", own, heads)
        for family in FAMILIES
        if (own := [row for row in made if row["family"] == family])
    }
    return Packed(
        files=files,
        file_bytes={name: Path(name).stat().st_size for name in files},
        untied=untied,
        report=cleaning.report(len(rows), list(kept.values())),
    )


def extend(path: Path, rows: Sequence[Mapping[str, object]], heads: Sequence[Head]) -> int:
    """Returns the number of rows. The new file is read and checked before it replaces the old one."""
    old, old_heads = read_rows(path) if path.exists() else ([], [])
    merged: dict[object, Mapping[str, object]] = {row["id"]: row for row in old}
    for row in rows:
        before = merged.get(row["id"], {})
        merged[row["id"]] = row
        if row["step_ms"] is None and row["config"] == before.get("config"):
            merged[row["id"]] = {**row, **{column.name: before[column.name] for column in ACTIVITY}}
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


def _correct_ties(
    configs: dict[str, Config], kept: Mapping[str, MeasuredRow], listed: dict[str, Listed], lister: Lister
) -> int:
    """Some collectors separated tied weights of an embedding and the output layer when they moved a model to the GPU.

    Such a run is valid for the config without the tie, if that config has exactly as many parameters as were measured.
    """
    wanted = {
        id: untie(configs[id])
        for id, row in kept.items()
        if row.parameters is not None and id in listed and row.parameters > listed[id].parameters
    }
    changed = [config for id, config in wanted.items() if config != configs[id]]
    if not changed:
        return 0
    file = lister.layers_file
    again = lister._replace(layers_file=file.with_name(f"{file.stem}-untied{file.suffix}")).list(changed)
    true = [config for config in changed if again[config.id].parameters == kept[config.id].parameters]
    for config in true:
        configs[config.id], listed[config.id] = config, again[config.id]
    return len(true)


def untie(config: Config) -> Config:
    """Separates the weights of output layers. A tied embedding stays: it is one module that is called twice."""
    return msgspec.structs.replace(config, model=tuple(map(_untied_part, config.model)))


def _untied_part(part: Any) -> Any:
    if isinstance(part, list | tuple):
        return [_untied_part(each) for each in part]
    if not isinstance(part, dict):
        return part
    is_tied_output = part.get("op") == "linear"
    return {name: _untied_part(field) for name, field in part.items() if name != "tied" or not is_tied_output}


def _row(
    config: Config, kept: dict[str, MeasuredRow], layers: Listed | None, cleaning: Cleaning
) -> dict[str, object] | None:
    measured = kept[config.id]
    if layers is None or layers.error or not layers.layers:
        cleaning.drop(NO_LAYERS, config.id)
    elif measured.parameters not in (None, layers.parameters):
        cleaning.drop(OTHER, config.id)
    else:
        settings = {name: getattr(config, name) for name in CONFIG_COLUMNS}
        return {**settings, "config": encode(config).decode(), **layers.columns, **measured.columns}
    del kept[config.id]
    return None
