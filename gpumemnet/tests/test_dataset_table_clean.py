"""Which measured rows are left out, and that each is counted by its reason; `carma dataset pack` as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from carma.errors import Refused, Usage
from gpumemnet.cli.pack import command
from gpumemnet.dataset import clean, layer_lists
from gpumemnet.dataset.clean import Cleaning, MeasuredRow, read_measured
from gpumemnet.dataset.config import Config
from gpumemnet.dataset.pack import untie
from gpumemnet.dataset.table import read
from gpumemnet_fixtures.dataset_rows import ACTIVE, MIB, config, row, write_configs, write_rows
from gpumemnet_fixtures.dataset_rows import quick_listing as quick_listing

RUN = layer_lists._run


def _cleaned(
    tmp_path: Path, *rows: dict[str, Any], configs: tuple[Config, ...] = ()
) -> tuple[dict[str, Any], Cleaning]:
    known = {one.id: one for one in configs or (config("a"), config("b", batch=8))}
    read_rows = [one for one in read_measured(write_rows(tmp_path / "r.jsonl", *rows)) if isinstance(one, MeasuredRow)]
    cleaning = Cleaning()
    return cleaning.clean(read_rows, known), cleaning


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"error": "RuntimeError: no engine"}, clean.FAILED),
        ({"id": "z"}, clean.UNKNOWN),
        ({"footprint": None}, clean.MISSING),
        ({"footprint": float("nan")}, clean.MISSING),
        ({"reserved_peak": float("inf")}, clean.MISSING),
        ({"step_ms": float("nan")}, clean.MISSING),
        ({"steps": 1}, clean.SHORT),
        ({"stepped": 1}, clean.SHORT),
        ({"retries": 2}, clean.CROWDED),
        ({"oom": True}, clean.CROWDED),
    ],
)
def test_a_useless_row_is_left_out_with_its_reason(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    kept, cleaning = _cleaned(tmp_path, {**row("a"), **fields}, row("b"))
    assert list(kept) == ["b"]
    assert cleaning.report(2, list(kept.values())).dropped == {why: 1}


@pytest.mark.parametrize("fields", [{"retries": 2}, {"oom": True, "steps": 0, "footprint": None, "context": None}])
def test_alone_on_the_card_the_same_is_a_measurement(tmp_path: Path, fields: dict[str, Any]) -> None:
    kept, cleaning = _cleaned(tmp_path, row("a", alone=True, **fields))
    assert list(kept) == ["a"]
    assert cleaning.report(1, list(kept.values())).oom == int("oom" in fields)


def test_runs_that_contradict_one_another_are_both_left_out(tmp_path: Path) -> None:
    kept, cleaning = _cleaned(tmp_path, row("a", 1000), row("a", 1200), row("b", 1000), row("b", 1100))
    assert list(kept) == ["b"]
    assert cleaning.report(4, list(kept.values())).dropped == {clean.AGAIN: 2}
    kept, _ = _cleaned(tmp_path, row("a", alone=True), row("a", alone=True, oom=True))
    assert not kept


def test_a_second_run_adds_its_activity(tmp_path: Path) -> None:
    kept, _ = _cleaned(tmp_path, row("a", 1000, error="stopped"), row("a", 1000), row("a", 1010, **ACTIVE))
    assert kept["a"].allocated_peak == 1000 * MIB
    assert kept["a"].sm_active == 0.5


def test_one_config_under_two_ids_counts_once(tmp_path: Path) -> None:
    twins = (config("a"), config("b", guess_mib=3), config("c", batch=5))
    kept, cleaning = _cleaned(tmp_path, row("a"), row("b"), row("c"), configs=twins)
    assert list(kept) == ["a", "c"]
    assert cleaning.dropped == {clean.TWIN: ["b"]}


def test_a_line_that_was_cut_off_is_no_line_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row("a"))
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[1][:30])
    assert len(list(read_measured(path))) == 2
    path.write_text(whole + "nonsense\n")
    with pytest.raises(Usage, match=r"rows\.jsonl, line 3"):
        list(read_measured(path))
    with pytest.raises(Usage, match="cannot be read"):
        list(read_measured(tmp_path / "none.jsonl"))


def _pack(folder: Path, *more: str) -> Any:
    words = ["configs.jsonl", "rows.jsonl", "--layers", "layers.jsonl", "--out", "out"]
    files = [str(folder / word) if not word.startswith("--") else word for word in words]
    return CliRunner().invoke(command, [*files, "--python", sys.executable, "--parallel", "1", *more])


def test_packing_reports_files_and_rows_left_out(tmp_path: Path) -> None:
    tied, broken = config("t", "transformer"), config("x", model=[{"op": "nothing"}])
    write_configs(tmp_path / "configs.jsonl", config("a"), config("b", batch=8), tied, broken)
    measured = (row("a", parameters=7), row("b", parameters=2058), row("t", parameters=4016), row("x"))
    write_rows(tmp_path / "rows.jsonl", *measured, row("b", error="stopped"))
    result = _pack(tmp_path)
    assert result.exit_code == 0, result.output
    said = result.output.splitlines()
    assert said[0] == "5 rows measured, 2 configs kept, 0 of them out of memory"
    assert f"  1 left out: {clean.OTHER} (as a)" in said
    assert f"  1 left out: {clean.NO_LAYERS} (as x)" in said
    assert f"  1 left out: {clean.FAILED} (as b)" in said
    assert any(line.startswith("  1 were measured with separate weights") for line in said)
    assert said[-2].startswith(f"{tmp_path / 'out' / 'mlp.parquet'}: 1 rows, ")
    table = read(tmp_path / "out" / "transformer.parquet")
    assert table.configs == (untie(tied),)
    assert table["parameters"].tolist() == [4016]
    packed = json.loads(_pack(tmp_path, "--json").output)
    assert packed["report"]["kept"] == 2
    assert list(packed["files"].values()) == [1, 1]


def test_a_tie_that_was_measured_stays(tmp_path: Path) -> None:
    tied = config("t", "transformer")
    write_configs(tmp_path / "configs.jsonl", tied)
    write_rows(tmp_path / "rows.jsonl", row("t", parameters=3216))
    assert _pack(tmp_path).exit_code == 0
    table = read(tmp_path / "out" / "transformer.parquet")
    assert table.configs == (tied,)
    assert table["tied_parameters"].tolist() == [800]


def test_an_interpreter_without_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_lists, "_run", RUN)
    write_configs(tmp_path / "configs.jsonl", config("a"))
    write_rows(tmp_path / "rows.jsonl", row("a"))
    result = _pack(tmp_path, "--python", "/bin/false")
    assert isinstance(result.exception, Refused)
    assert "/bin/false cannot list layers" in str(result.exception)
    result = _pack(tmp_path, "--python", str(tmp_path / "none"))
    assert isinstance(result.exception, Usage)


def test_where_nothing_could_be_packed_there_is_no_success(tmp_path: Path) -> None:
    write_configs(tmp_path / "configs.jsonl", config("a"))
    write_rows(tmp_path / "rows.jsonl", row("a", error="stopped"), row("other"))
    result = _pack(tmp_path)
    assert f"  1 left out: {clean.FAILED} (as a)" in result.output
    assert isinstance(result.exception, Refused)
    assert "nothing was packed: none of 2 measured rows can be used" in str(result.exception)
    (tmp_path / "rows.jsonl").write_text("")
    assert "nothing was packed: no rows" in str(_pack(tmp_path).exception)
    (tmp_path / "configs.jsonl").write_text("\n")
    assert "has no configs" in str(_pack(tmp_path).exception)


def test_an_unwritable_directory_is_an_error_before_layers_are_listed(tmp_path: Path) -> None:
    write_configs(tmp_path / "configs.jsonl", config("a"))
    write_rows(tmp_path / "rows.jsonl", row("a"))
    (tmp_path / "out").write_text("a file")
    result = _pack(tmp_path)
    assert isinstance(result.exception, Usage)
    assert "cannot be made" in str(result.exception)
    assert not (tmp_path / "layers.jsonl").exists()
