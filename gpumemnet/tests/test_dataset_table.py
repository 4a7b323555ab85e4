"""A data-set file: what is packed comes back as it was, and a file that cannot be true is refused by row and column."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carma.errors import Usage
from gpumemnet.dataset import schema as columns
from gpumemnet.dataset.config import Config, encode
from gpumemnet.dataset.layer_lists import Lister
from gpumemnet.dataset.pack import Packed, extend, pack
from gpumemnet.dataset.table import Table, read, read_rows, write
from gpumemnet_fixtures.dataset_rows import ACTIVE, HEAD, MIB, config, row, write_configs, write_rows
from gpumemnet_fixtures.dataset_rows import quick_listing as quick_listing

CONFIGS = (
    config("mlp-1", optimizer="momentum"),
    config("mlp-2", batch=8, optimizer="sgd"),
    config("cnn-1", "cnn", channels_last=True, optimizer="adagrad"),
    config("transformer-1", "transformer"),
    config("transformer-2", "seq2seq", precision="bf16"),
)
ROWS = (
    row("mlp-1", 1.5, **ACTIVE),
    row("mlp-2", 2.0, alone=True, oom=True, footprint=None),
    row("cnn-1"),
    row("transformer-1"),
    row("transformer-2"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("table")
    pack_into(made)
    return made


def pack_into(folder: Path, configs: tuple[Config, ...] = CONFIGS, rows: tuple[dict[str, Any], ...] = ROWS) -> Packed:
    files = write_configs(folder / "configs.jsonl", *configs), write_rows(folder / "rows.jsonl", *rows)
    return pack(files[0], [files[1]], folder, Lister(sys.executable, folder / "layers.jsonl", 1))


@pytest.fixture(scope="module")
def mlp(folder: Path) -> Table:
    return read(folder / "mlp.parquet")


def test_figures_come_back_to_the_byte(mlp: Table) -> None:
    assert mlp.family == "mlp"
    assert mlp.ids == ("mlp-1", "mlp-2")
    assert mlp.configs == CONFIGS[:2]
    assert mlp["allocated_mib"][0] * MIB == 1.5 * MIB
    assert mlp["requested_mib"][0] * MIB == 1.5 * MIB - 100
    assert mlp["footprint_mib"][0] == 525.5
    assert mlp["oom"].tolist() == [0, 1]
    assert mlp["sm_active"][0] == 0.5
    assert np.isnan(mlp["footprint_mib"][1])  # absent is no zero
    assert np.isnan(mlp["power_w"][1])
    assert mlp.heads == (HEAD,)


def test_a_row_is_described_as_a_trial_run_would(folder: Path) -> None:
    described = read(folder / "mlp.parquet").described(0)
    assert (described.batch, described.input, described.parameters) == (4, (4, 20), 2058)
    assert (described.optimizer, described.optimizer_slots) == ("SGD", 1)
    assert [layer.kind for layer in described.layers] == ["Linear", "Linear", "ReLU", "Linear"]
    assert described.layers[0].output == (4, 32)
    assert described.layers[0].inputs == ((4, 20),)
    assert described.layers[0].attributes == {"in_features": "20", "out_features": "32"}
    assert [layer.inplace for layer in described.layers] == [False, False, True, False]


def test_each_row_has_its_own_layers_and_settings(folder: Path) -> None:
    table = read(folder / "transformer.parquet")
    mixed, half = table.described(0), table.described(1)
    assert (mixed.dtype, mixed.autocast) == ("float32", "bfloat16")
    assert (half.dtype, half.autocast) == ("bfloat16", "")
    assert mixed.layers[-1].output == (4, 12, 50)
    assert [layer.kind for layer in half.layers][:2] == ["Embedding", "MultiheadAttention"]
    assert half.layers[-1].output == (4, 6, 50)
    assert read(folder / "cnn.parquet").described(0).channels_last
    assert read(folder / "cnn.parquet").described(0).checkpointing
    first, second = (table.edges.offsets[place + 1] - table.edges.offsets[place] for place in (0, 1))
    assert (first, second) == (len(_listed(folder, "transformer-1")["edges"]), 8)


def _listed(folder: Path, id: str) -> dict[str, Any]:
    lines = map(json.loads, (folder / "layers.jsonl").read_text().splitlines())
    return next(line for line in lines if line["id"] == id)


def test_elements_are_those_of_the_shapes(folder: Path) -> None:
    table = read(folder / "transformer.parquet")
    shapes = [layer.output for row in range(len(table)) for layer in table.described(row).layers]
    assert table.layers.output.elements.tolist() == [float(np.prod(shape)) for shape in shapes]


Change = Callable[[dict[str, Any]], None]


def _set(**fields: Any) -> Change:
    return lambda made: made.update(fields)


@pytest.mark.parametrize(
    ("change", "column", "why"),
    [
        (_set(footprint_mib=1.0), "footprint_mib", "less than reserved_mib"),
        (_set(reserved_mib=1.0), "reserved_mib", "less than allocated_mib"),
        (_set(allocated_mib=0.0), "allocated_mib", "not above 0"),
        (_set(requested_mib=9.0), "requested_mib", "more than allocated_mib"),
        (_set(context_mib=None), "context_mib", "the value is missing"),
        (_set(footprint_mib=float("inf")), "footprint_mib", "inf is not a size in MiB"),
        (_set(footprint_mib=551026688.0), "footprint_mib", "not a size in MiB"),  # bytes
        (_set(sm_active=50.0), "sm_active", "50.0 is not between 0 and 1"),
        (_set(step_ms=-1.0), "step_ms", "-1.0 is not possible"),
        (_set(batch=5), "batch", "5.0 differs from the config, which has 4"),
        (_set(optimizer="adam"), "optimizer", "adam differs from the config, which has momentum"),
        (_set(input=[21]), "input", "differs from the config"),
        (_set(id="mlp-2"), "id", "another row has the same id"),
        (_set(id="mlp-3"), "id", "mlp-3 differs from the config, which has mlp-1"),
        (_set(config="{}"), "config", "missing required field"),
        (_set(parameters=2059), "layer_parameters", "the sum is not parameters + tied_parameters"),
        (_set(tied_parameters=1), "layer_parameters", "the sum is not parameters + tied_parameters"),
        (_set(edge_to=[1, 2, 3, 4]), "edge_to", "an edge from 2 to 4 is not possible with 4 layers"),
        (_set(edge_from=[1, 1, 0, 2]), "edge_to", "an edge from 1 to 1 is not possible"),
        (_set(layer_kind=[], layer_output=[], layer_input=[], layer_parameters=[], layer_attributes=[],
              layer_inplace=[], edge_from=[], edge_to=[]), "layer_kind", "the run has no layers"),
    ],
)  # fmt: skip
def test_a_file_with_impossible_values_is_refused(
    folder: Path, tmp_path: Path, change: Change, column: str, why: str
) -> None:
    rows, heads = read_rows(folder / "mlp.parquet")
    change(rows[0])
    write(tmp_path / "bad.parquet", rows, heads)
    with pytest.raises(Usage) as refused:
        read(tmp_path / "bad.parquet")
    assert f"column {column}: " in str(refused.value)
    assert f"row {rows[0]['id']}" in str(refused.value)
    assert why in str(refused.value)


def test_columns_of_layers_are_equally_long(folder: Path, tmp_path: Path) -> None:
    rows, heads = read_rows(folder / "mlp.parquet")
    rows[0]["layer_inplace"] = [False]
    write(tmp_path / "bad.parquet", rows, heads)
    with pytest.raises(Usage, match="column layer_inplace has"):
        read(tmp_path / "bad.parquet")


def test_what_is_no_such_file_is_refused(folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    with pytest.raises(Usage, match=r"nowhere\.parquet"):
        read(tmp_path / "nowhere.parquet")
    (tmp_path / "text.parquet").write_text("no Parquet at all, but long enough to be looked at")
    with pytest.raises(Usage, match="is no Parquet file"):
        read(tmp_path / "text.parquet")
    whole = pyarrow.parquet.read_table(folder / "mlp.parquet")
    pyarrow.parquet.write_table(whole.drop_columns(["batch"]), tmp_path / "less.parquet")
    with pytest.raises(Usage, match="column batch"):
        read(tmp_path / "less.parquet")
    pyarrow.parquet.write_table(whole.replace_schema_metadata({}), tmp_path / "other.parquet")
    with pytest.raises(Usage, match="no data set of format 1"):
        read(tmp_path / "other.parquet")


def test_two_families_are_no_file(folder: Path, tmp_path: Path) -> None:
    rows = [*read_rows(folder / "mlp.parquet")[0], *read_rows(folder / "cnn.parquet")[0]]
    write(tmp_path / "both.parquet", rows, [])
    with pytest.raises(Usage, match="cnn, mlp"):
        read(tmp_path / "both.parquet")


def test_equal_data_is_an_equal_file(folder: Path, tmp_path: Path) -> None:
    rows, heads = read_rows(folder / "transformer.parquet")
    write(tmp_path / "again.parquet", rows[::-1], heads)
    assert (tmp_path / "again.parquet").read_bytes() == (folder / "transformer.parquet").read_bytes()


def test_a_file_is_extended_and_ids_take_the_place_of_their_own(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mlp.parquet"
    rows, heads = read_rows(folder / "mlp.parquet")
    extend(path, rows[:1], heads)
    later = {**rows[0], "footprint_mib": 600.0, **{column.name: None for column in columns.ACTIVITY}}
    assert extend(path, [later, rows[1]], [*heads, {"gpu": "another"}]) == 2
    table = read(path)
    assert table["footprint_mib"][0] == 600.0
    assert table["step_ms"][0] == 3.5  # is not lost by a run without it
    assert [head.get("gpu") for head in table.heads] == ["NVIDIA H200", "another"]


def test_a_file_is_left_as_it_was_where_the_new_one_would_be_wrong(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mlp.parquet"
    rows, heads = read_rows(folder / "mlp.parquet")
    extend(path, rows, heads)
    before = path.read_bytes()
    with pytest.raises(Usage, match="less than reserved_mib"):
        extend(path, [{**rows[0], "footprint_mib": 1.0}], heads)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["mlp.parquet"]


def test_the_config_line_is_the_generators(folder: Path) -> None:
    rows, _ = read_rows(folder / "cnn.parquet")
    assert rows[0]["config"] == encode(CONFIGS[2]).decode()
