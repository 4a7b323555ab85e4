"""`carma dataset describe`: figures that are those of the rows, and pictures that show something."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from carma.errors import Refused, Usage
from gpumemnet.cli.describe import command
from gpumemnet.dataset import plots, schema
from gpumemnet.dataset.config import encode
from gpumemnet.dataset.describe import classes, coloured, describe, figure, sizes
from gpumemnet.dataset.plots import MIN_CORRELATED, densest, rank_correlation
from gpumemnet.dataset.schema import ACTIVITY, CONFIG_COLUMNS
from gpumemnet.dataset.table import Table, read, write
from gpumemnet.directories import PROBE
from gpumemnet_fixtures.dataset_rows import ACTIVE, HEAD, config

COUNT = 80


def _row(number: int) -> dict[str, Any]:
    """A model of two layers; the batch grows, and memory with it in steps of 2 MiB."""
    batch, optimizer = 8 * (number + 1), ("adam", "sgd")[number % 4 == 0]
    made = config(f"mlp-{number:03}", batch=batch, optimizer=optimizer, model=[{"op": "linear", "out": 30}])
    reserved_mib, footprint_mib = 20.0 + 2.0 * (number // 4), 1190.0 + 200.0 * (number // 4)
    active = {name: value * (1 + number) / COUNT for name, value in ACTIVE.items()} if number % 2 else {}
    return {
        **{name: getattr(made, name) for name in CONFIG_COLUMNS},
        "config": encode(made).decode(), "parameters": 960, "tied_parameters": 0, "inside_parameters": 0,
        "layer_kind": ["Linear", "ReLU"], "layer_output": [[batch, 30], [batch, 30]], "layer_input": [[batch, 20], []],
        "layer_parameters": [960, 0], "layer_attributes": ["{}", "{}"], "layer_inplace": [False, True],
        "edge_from": [0], "edge_to": [1], "allocated_mib": reserved_mib - 2, "requested_mib": 5.0 * number + 3,
        "reserved_mib": reserved_mib, "footprint_mib": footprint_mib, "context_mib": 500.0, "steps": 4,
        "retries": 0, "oom": False, "alone": False, **{column.name: active.get(column.name) for column in ACTIVITY},
    }  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("describe") / "mlp.parquet"
    rows = [_row(number) for number in range(COUNT)]
    for one in rows:
        one["requested_mib"] = min(one["requested_mib"], one["allocated_mib"])
    lost = {**rows[-1], "oom": True, "footprint_mib": None, "reserved_mib": None}
    write(path, [*rows[:-1], lost], [HEAD, {**HEAD, "date": "2026-01-03T00:00:00Z"}])
    return path


@pytest.fixture(scope="module")
def table(file: Path) -> Table:
    return read(file)


def test_figures_are_those_of_the_rows(table: Table) -> None:
    said = describe(table)
    assert (said.family, said.rows, said.oom, said.active) == ("mlp", 80, 1, 40)
    assert said.dates == ("2026-01-02", "2026-01-03")
    assert said.measured_on == ({"gpu": "NVIDIA H200", "driver": "1.2", "torch": "2.13.0"},)
    ranges = {one.name: one for one in said.ranges}
    assert (ranges["batch"].least, ranges["batch"].median, ranges["batch"].most) == (8, 324, 640)
    assert ranges["activations"].most == 60  # of one sample, in both layers
    assert ranges["footprint_mib"].least == 1190.0
    assert ranges["sm_active"].most == 0.5
    assert said.shares["optimizer"] == {"adam": 0.75, "sgd": 0.25}
    assert said.kinds == {"Linear": 1.0, "ReLU": 1.0}


def test_a_class_holds_its_lower_edge_and_not_its_upper(table: Table) -> None:
    edges = np.array([0.0, 999.9, 1000.0, 1999.9, 2000.0])
    assert coloured("mlp", edges)[0].tolist() == [0, 0, 1, 1, 2]
    assert coloured("cnn", np.array([7999.0, 8000.0]))[0].tolist() == [0, 1]
    counted = describe(table).classes["1 GB"]
    assert sum(counted) == 79  # without the one that did not fit
    assert counted[0] == 0
    assert counted[1] == (classes(table, 1) == 1).sum() > 0


def test_colours_above_the_last_are_one() -> None:
    found, labels = coloured("cnn", np.array([1000.0, 500_000.0]))
    assert found.tolist() == [0, 9]
    assert (labels[0], labels[-1]) == ("0 to 8 GB", "72 GB and more")


def test_sizes_are_of_each_row(table: Table) -> None:
    found = sizes(table)
    assert found["layers"].tolist() == [2.0] * COUNT
    assert found["activations_batch"][:2].tolist() == [480.0, 960.0]


def test_correlation_is_of_ranks_and_unknown_where_nothing_changes() -> None:
    rising = np.append(np.arange(1.0, MIN_CORRELATED + 1), np.nan)
    assert rank_correlation(rising, rising**3) == pytest.approx(1.0)
    assert rank_correlation(rising, -rising) == pytest.approx(-1.0)
    assert np.isnan(rank_correlation(rising, np.ones(len(rising))))
    assert np.isnan(rank_correlation(rising[1:], rising[1:])), "one run fewer says too little"


def test_the_staircase_is_looked_at_where_most_runs_are() -> None:
    far, near = np.arange(0.0, 4000.0, 80.0), np.repeat(np.arange(1002.0, 1040.0, 2.0), 2)
    assert densest(np.append(far, near)) == 1002.0
    assert densest(far) is None
    assert densest(np.array([])) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [(1443.0, "1,443"), (0.03125, "0.0312"), (12_400_000.0, "12.4M"), (2.5e9, "2.5G"), (7.0, "7"), (0.0, "0")],
)
def test_figures_are_short(value: float, said: str) -> None:
    assert figure(value) == said


def test_the_verb_prints_and_draws(file: Path, tmp_path: Path) -> None:
    import matplotlib.image

    result = CliRunner().invoke(command, [str(file), "--out", str(tmp_path / "pictures")])
    assert result.exit_code == 0, result.exception
    assert "mlp: 80 runs, 1 out of memory, 40 with activity" in result.output
    assert "measured on gpu NVIDIA H200, driver 1.2, torch 2.13.0" in result.output
    assert "optimizer: adam 75 %, sgd 25 %" in result.output
    made = {path.name for path in (tmp_path / "pictures").iterdir()}
    names = ("mlp-coverage", "mlp-map", "staircase", "activity")
    assert made == {f"{name}{suffix}" for name in names for suffix in (".png", ".svg")}
    for name in names:
        pixels = matplotlib.image.imread(tmp_path / "pictures" / f"{name}.png")
        assert pixels.shape[0] > 400
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50  # not an empty frame


def test_json_is_the_same_figures(file: Path, table: Table) -> None:
    result = CliRunner().invoke(command, [str(file), "--json"])
    said = json.loads(result.output)[0]
    assert said["rows"] == 80
    assert tuple(said["classes"]["2 GB"]) == describe(table).classes["2 GB"]


def test_what_was_not_measured_is_not_drawn(file: Path, tmp_path: Path) -> None:
    from gpumemnet.dataset.table import read_rows

    rows, heads = read_rows(file)
    few = [{**row, **{column.name: None for column in ACTIVITY}} for row in rows[:3]]
    write(tmp_path / "mlp.parquet", few, heads)
    result = CliRunner().invoke(command, [str(tmp_path / "mlp.parquet"), "--out", str(tmp_path / "p")])
    assert result.exit_code == 0, result.exception
    assert {path.stem for path in (tmp_path / "p").iterdir()} == {"mlp-coverage", "mlp-map"}


def test_an_unwritable_directory_is_the_first_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = CliRunner().invoke(command, [str(file), "--out", str(tmp_path / "taken")])
    assert isinstance(result.exception, Usage)
    assert "cannot be written to: Not a directory" in str(result.exception)
    assert result.output == ""


def test_a_full_disk_leaves_no_half_of_a_picture(file: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: larger than what is tried first, smaller than a picture."""
    ended = subprocess.run(
        [sys.executable, "-m", "carma", "dataset", "describe", str(file), "--out", str(tmp_path / "out")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (len(PROBE), len(PROBE))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "mlp-coverage.png cannot be written: File too large" in ended.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("missing", ["pyarrow", "matplotlib"])
def test_the_hint_names_the_package_itself(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra of `carma` would be another project's on the public index."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(Refused, match="is not installed") as caught:
        schema.pyarrow() if missing == "pyarrow" else plots._pyplot()
    assert caught.value.hint.startswith(f"pip install {missing}")
