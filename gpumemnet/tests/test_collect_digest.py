"""A row names the config that it was measured from and counts for that config only, because ids are reused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_collect_program import Place

from gpumemnet.dataset import clean
from gpumemnet.dataset.clean import Cleaning, MeasuredRow, read_digests, read_measured
from gpumemnet.dataset.collect import CollectOptions, collect
from gpumemnet.dataset.config import encode
from gpumemnet.dataset.inside.rows import digest
from gpumemnet.dataset.layer_lists import Lister
from gpumemnet.dataset.pack import Packed, extend, pack
from gpumemnet.dataset.table import read
from gpumemnet_fixtures.dataset_rows import ACTIVE, config, row, run_lister, write_configs, write_rows
from gpumemnet_fixtures.dataset_rows import quick_listing as quick_listing


def packed(folder: Path, *rows: dict[str, Any]) -> Packed:
    file = write_rows(folder / "rows.jsonl", *rows)
    return pack(folder / "configs.jsonl", [file], folder / "out", Lister(sys.executable, folder / "layers.jsonl", 1))


def test_what_was_measured_from_another_line_is_left_out(tmp_path: Path) -> None:
    a, b, c = config("a"), config("b", batch=8), config("c", batch=16)
    write_configs(tmp_path / "configs.jsonl", a, b, c)
    rows = [row("a", of=digest(encode(a))), row("b", of=digest(encode(config("b", batch=9)))), row("c")]
    said = packed(tmp_path, *rows)
    assert (said.report.kept, said.report.dropped, said.report.examples) == (
        2,
        {clean.CHANGED: 1},
        {clean.CHANGED: "b"},
    )
    assert [each.id for each in read(tmp_path / "out" / "mlp.parquet").configs] == ["a", "c"]


def test_a_run_of_another_config_does_not_contradict(tmp_path: Path) -> None:
    """Without digests both would go."""
    a = config("a")
    lines = write_rows(tmp_path / "r.jsonl", row("a", 100, of="other"), row("a", 900, of=digest(encode(a))))
    rows = [one for one in read_measured(lines) if isinstance(one, MeasuredRow)]
    kept = Cleaning().clean(rows, {"a": a}, {"a": digest(encode(a))})
    assert kept["a"].of == digest(encode(a))
    assert not Cleaning().clean(rows, {"a": a})


def test_the_digest_is_that_of_the_line_in_the_file(tmp_path: Path) -> None:
    """Spaces count: who measured had nothing but the line."""
    file = tmp_path / "configs.jsonl"
    spaced = json.dumps(json.loads(encode(config("a")))).encode()
    file.write_bytes(spaced + b"\n\n" + encode(config("b")) + b"\n")
    assert read_digests(file) == {"a": digest(spaced), "b": digest(encode(config("b")))}
    assert digest(spaced) != digest(encode(config("a")))


def test_collector_lister_and_packing_agree(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "configs.jsonl"
    line = json.dumps(json.loads(encode(config("a")))).encode()
    file.write_bytes(line + b"\n")
    run_lister(file, tmp_path / "layers.jsonl")
    tally = collect(CollectOptions(configs=file, out=tmp_path / "out", device="cpu"), sys.executable)
    assert (tally.measured, tally.left) == (1, 0)
    measured = [json.loads(each) for each in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()][1]
    listed = json.loads((tmp_path / "layers.jsonl").read_text())
    assert measured["of"] == listed["of"] == read_digests(file)["a"]


def test_another_config_with_the_same_id_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    monkeypatch.setattr("gpumemnet.dataset.collect.MAIN", place.driver)
    monkeypatch.setenv("MARKS", str(place.marks))
    file, out = tmp_path / "configs.jsonl", tmp_path / "out"
    options = CollectOptions(configs=file, out=out, device="cpu")
    write_configs(file, config("a"))
    collect(options, sys.executable)
    write_configs(file, config("a", batch=8))
    tally = collect(options, sys.executable)
    assert (tally.measured, tally.left) == (1, 0)
    ids = [json.loads(line).get("id") for line in (out / "rows.jsonl").read_text().splitlines()]
    assert ids == [None, "a", None, "a"]


def test_activity_of_another_config_is_not_taken_over(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_configs(tmp_path / "configs.jsonl", config("a"), config("b", batch=8))
    packed(tmp_path, row("a", **ACTIVE), row("b", **ACTIVE))
    write_configs(tmp_path / "configs.jsonl", config("a"), config("b", batch=9))
    packed(tmp_path, row("a"), row("b"))
    table = read(tmp_path / "out" / "mlp.parquet")
    assert [each is not None and each == each for each in table["step_ms"].tolist()] == [True, False]
    assert extend(tmp_path / "out" / "mlp.parquet", [], []) == 2
