"""`carma bench gpumemnet`: what it measures and writes down. How long things take is no test."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from carma.cli import main
from carma_lab.bench import gpumemnet as bench
from gpumemnet import FAMILIES
from gpumemnet.serving.features import features
from gpumemnet.summaries import read_text
from gpumemnet_fixtures import gpumemnet_models as tiny


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for family in FAMILIES:
        for kind in bench.KINDS:
            tiny.save(tmp_path / "models", tiny.facts(family, kind))
    return tmp_path / "models"


def test_each_part_is_timed_for_each_model(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert main(["bench", "gpumemnet", "--out", str(out), "--runs", "2", "--models", str(models)]) == 0
    report = msgspec.json.decode(out.read_bytes(), type=bench.Report)
    parts = [(timing.part, timing.of) for timing in report.timings]
    assert parts[:3] == [("parser", name) for name in bench.PARSED]
    kinds = ("mlp-based", "transformer-based")
    assert parts[3:] == [
        (part, f"{family}, {kind}") for family in FAMILIES for kind in kinds for part in ("inference", "session")
    ]
    assert all(0 < timing.median_ms <= timing.p95_ms for timing in report.timings)
    assert report.skipped == ()
    assert report.command == "carma bench gpumemnet --runs 2 --models models"
    assert report.machine.cpu
    assert set(report.versions) == {"onnxruntime", "numpy"}
    shown = capsys.readouterr().out
    assert "parser, gpt2-xl.torchinfo.txt" in shown
    assert "10.6–10.7 ms" in shown


def test_a_model_that_is_not_there_is_said(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "cnn-mlp.json").unlink()
    assert main(["bench", "gpumemnet", "--out", "-", "--runs", "1", "--models", str(models)]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["skipped"] == [f"cnn-mlp: there is no such model in {models}"]
    assert not any(timing["of"] == "cnn, mlp-based" for timing in written["timings"])
    assert any(timing["of"] == "cnn, transformer-based" for timing in written["timings"])


def test_the_texts_are_what_they_are_said_to_be() -> None:
    resnet = read_text((bench.TEXTS / "resnet50.torchinfo.txt").read_text()).described
    assert resnet.parameters == 25_557_032
    assert resnet.batch == 32
    assert features(resnet).family == "cnn"
    table = read_text((bench.TEXTS / "gpt2-xl.torchinfo.txt").read_text()).described
    printed = read_text((bench.TEXTS / "gpt2-xl.print.txt").read_text(), batch=2).described
    assert table.parameters == printed.parameters == 1_638_022_400
    assert features(table).family == "transformer"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_asked_about_a_network_of_its_family(family: str) -> None:
    assert features(bench._asked(family)).family == family  # type: ignore[arg-type]


def test_a_place_that_cannot_be_written_is_said_first(models: Path) -> None:
    nowhere = str(models / "none" / "speed.json")
    assert main(["bench", "gpumemnet", "--out", nowhere, "--models", str(models)]) == 2


def test_a_place_without_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name, said in (("none", "none is no directory of models"), ("empty", "there is no model in")):
        assert main(["bench", "gpumemnet", "--runs", "1", "--models", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_an_option_that_is_not_given_is_not_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpumemnet", "--out", "-", "--runs", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "carma bench gpumemnet --out - --runs 1"


def test_a_directory_is_no_file_for_figures(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpumemnet", "--out", str(models), "--models", str(models)]) == 2
    said = capsys.readouterr()
    assert ("it is a directory" in said.err, said.out) == (True, "")
