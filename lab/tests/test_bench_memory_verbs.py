"""`carma bench memory-truth` and `carma bench estimators`, with stand-ins for interpreters and trial runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from carma.cli import main
from carma.core.model.values import NoEstimate
from carma.core.ports import EstimateRequest
from carma.errors import NoGpus, Refused, Usage
from carma.trial.layers.description import Described
from carma.trial.protocol import Trial
from carma.trial.replay.conv_formulas import NONE
from carma.trial.replay.conv_workspaces import SHIPPED, DecisionTree, LearntChoice, shipped_model
from carma.trial.report import Call
from carma_lab.bench.memory import compare, truth
from carma_lab.bench.memory import comparison_file as written
from carma_lab.bench.memory.queries import ZOO, Folds, chosen_estimators
from carma_lab.bench.memory.truth import Interpreter, find_interpreter
from tests.trials import described, events, report, write_events

MIB = 1 << 20
SAID = {"python": "3.12.3", "torch": "2.11.0", "torchvision": "0.26.0", "transformers": "5.17.0", "gpu": True}
FOUND = Interpreter(path="/usr/bin/python3", **SAID)  # type: ignore[arg-type]


class Trials:
    """Tries everything but what has `fails` among its words."""

    def __init__(self) -> None:
        self.asked: list[EstimateRequest] = []
        self.closed = False

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        self.asked.append(request)
        if "fails" in request.spec.command:
            return NoEstimate(source="trace", reason="it stopped with an error")
        return Trial(report=report(), events=write_events(events()), seconds=500.0)

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:  # noqa: ARG002 (the protocol's name)
        return described()

    def close(self) -> None:
        self.closed = True


def python(tmp_path: Path, text: str) -> str:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def truth_file(tmp_path: Path, *, cases: int = 3) -> str:
    lines: list[dict[str, Any]] = [{"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-16"}]
    for number in range(cases):
        peaks = {"footprint_peak": 900 * MIB, "reserved_peak": 140 * MIB, "allocated_peak": 120 * MIB, "steps": 6}
        argv = ["--model", "fails" if number == 1 else "resnet18"]
        lines.append({"id": f"m.{number}", "family": f"f{number}", "argv": argv, "error": None, **peaks})
    file = tmp_path / "truth.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_every_run_is_tried_once_and_every_estimator_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    options = compare.Options(truth=truth_file(tmp_path), estimators=("trace", "horus"), out=str(out))
    trials = Trials()
    assert compare.run(options, interpreter=FOUND, trials=trials) == 0
    assert trials.closed
    assert len(trials.asked) == 3
    for request in trials.asked:
        assert request.spec.command[:3] == ("/usr/bin/python3", str(ZOO / "case.py"), "--model")
        assert request.spec.directory == str(ZOO)
        assert [gpu.name for gpu in request.gpus] == ["NVIDIA H200"]
    found = written.read(out)
    assert sorted((row.case, row.estimator, row.refused is None) for row in found.rows) == [
        ("m.0", "horus", True), ("m.0", "trace", True), ("m.1", "horus", False),
        ("m.1", "trace", False), ("m.2", "horus", True), ("m.2", "trace", True),
    ]  # fmt: skip
    assert found.whole
    assert (found.measured_on["gpu"], found.versions["torch"], found.seed) == ("NVIDIA H200", "2.11.0", 0)
    assert [summary.name for summary in found.estimators] == ["trace", "horus"]
    printed = capsys.readouterr()
    assert "over-booked" in printed.out
    assert "m.1 refused: it stopped with an error" in printed.err


def test_a_row_has_what_bounds_are_made_of(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = compare.Options(truth=truth_file(tmp_path, cases=1), estimators=("trace",), out=str(out))
    compare.run(options, interpreter=FOUND, trials=Trials())
    (row,) = written.read(out).rows
    assert (row.measured_mib, row.measured_reserved_mib, row.measured_allocated_mib) == (900, 140, 120)
    assert row.reserved_mib is not None
    assert row.replayed_mib is not None
    assert row.replayed_mib > row.reserved_mib
    assert row.group == "plain"
    assert row.bound_mib is not None


def test_a_remembered_trial_counts_with_the_time_that_it_took(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = compare.Options(truth=truth_file(tmp_path, cases=1), estimators=("trace", "horus"), out=str(out))
    compare.run(options, interpreter=FOUND, trials=Trials())
    assert all(row.took_s >= 499.0 for row in written.read(out).rows)


def test_the_published_models_are_asked_for_an_a100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    options = compare.Options(published18=True, estimators=("trace",), out=str(out))
    trials = Trials()
    assert compare.run(options, interpreter=FOUND, trials=trials) == 0
    assert len(trials.asked) == 18
    assert {request.spec.command[1] for request in trials.asked} == {str(ZOO / "published.py")}
    assert {request.gpus[0].name for request in trials.asked} == {"NVIDIA A100-SXM4-40GB"}
    assert {off.name for off in written.read(out).published} == {"ours", "GPUMemNet", "Fake Tensor", "Horus"}
    printed = capsys.readouterr().out
    assert "GPT2-XL, 2" in printed
    assert main(["bench", "estimators", "--redraw", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_a_comparison_without_any_answer_fails(tmp_path: Path) -> None:
    options = compare.Options(truth=truth_file(tmp_path), estimators=("llmem",), out=str(tmp_path / "found.json"))

    class Never(Trials):
        def run(self, request: EstimateRequest) -> NoEstimate:  # noqa: ARG002 (the protocol's name)
            return NoEstimate(source="trace", reason="switched off")

    assert compare.run(options, interpreter=FOUND, trials=Never()) == 1


def test_estimators_are_chosen_by_name() -> None:
    assert chosen_estimators(("horus", "trace", "horus")) == ("horus", "trace")
    everyone = chosen_estimators(("all",))
    assert everyone[0] == "trace"
    assert {"horus", "dnnmem"} <= set(everyone)
    assert not {"declared", "history"} & set(everyone)
    with pytest.raises(Usage, match="nosuch"):
        chosen_estimators(("nosuch",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--published18"),
        (["a.jsonl", "--published18"], "--published18"),
        (["nowhere/truth.jsonl"], "cannot be read"),
        (["--published18", "--gpu", "h2000"], "is not a known GPU model"),
        (["--published18", "--estimators", "nosuch"], "nosuch"),
        (["--published18", "--estimators", ","], "no name"),
        (["--published18", "--out", "nowhere/x.json"], "cannot be written"),
        (["--redraw", "nowhere/x.json"], "no file of a comparison"),
        (["--published18", "--python", "nowhere/python"], "no program"),
    ],
)
def test_invalid_options_are_reported_before_any_run(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "estimators", *words]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_interpreter_is_asked_for_its_versions(tmp_path: Path) -> None:
    program = python(tmp_path, f"echo noise; echo '{json.dumps(SAID)}'")
    found = find_interpreter(program)
    assert (found.path, found.torch, found.gpu) == (program, "2.11.0", True)
    assert found.versions["transformers"] == "5.17.0"


def test_an_interpreter_without_torch_is_an_error(tmp_path: Path) -> None:
    program = python(tmp_path, "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    with pytest.raises(Refused, match="No module named 'torch'"):
        find_interpreter(program)


def test_measuring_wants_a_gpu(tmp_path: Path) -> None:
    program = python(tmp_path, f"echo '{json.dumps(SAID | {'gpu': False})}'")
    with pytest.raises(NoGpus, match="finds no GPU"):
        truth.run(truth.Options(out=str(tmp_path / "out"), python=program))


def test_measuring_writes_the_cases_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring = 'echo "$@" >> "$3/words"; echo \'{"gpu":"x"}\' >> "$3/truth.jsonl"'
    rows = 'echo \'{"id":"a","error":null}\' >> "$3/truth.jsonl"; echo \'{"id":"b","error":"x"}\' >> "$3/truth.jsonl"'
    program = python(tmp_path, f"[ \"$1\" = -c ] && {{ echo '{json.dumps(SAID)}'; exit; }}\n{measuring}; {rows}")
    out = tmp_path / "out"
    words = ["bench", "memory-truth", str(out), "--python", program, "--parallel", "3", "--limit", "2m", "--first", "9"]
    assert main(words) == 0
    assert "1 runs measured, 1 failed" in capsys.readouterr().out
    assert main(words) == 0
    first, second = (out / "words").read_text().splitlines()
    assert first.endswith(f"truth.py {out}/cases.jsonl {out} --parallel 3 --limit-s 120 --seed 0 --first 9")
    assert second == f"{first} --skip {out}/truth.jsonl"
    assert len((out / "cases.jsonl").read_text().splitlines()) == 681


def test_measuring_that_broke_off_is_a_failure(tmp_path: Path) -> None:
    program = python(tmp_path, "echo broken >&2; exit 7")
    interpreter = Interpreter(path=program, **SAID)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="status 7"):
        truth.run(truth.Options(out=str(tmp_path / "out")), interpreter)


CONVOLUTION = Call(
    op="conv_weight_grad",
    dtype="float32",
    sizes=((8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)),
    numbers=(1, 1, 1, 1, 1, 1, 1),
    flags=("tf32",),
)


class ConvTrials(Trials):
    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        found = super().run(request)
        if isinstance(found, NoEstimate):
            return found
        return Trial(report=report(calls=(CONVOLUTION, CONVOLUTION)), events=found.events, seconds=found.seconds)


def folds(tmp_path: Path, families: list[str], forgets: bool = False) -> Path:
    """Models in a folder: the shipped one, or one that takes every convolution to want nothing."""
    folder = tmp_path / "folds"
    folder.mkdir()
    nothing = LearntChoice(
        formulas=(NONE,), choose=(DecisionTree(feature=(-1,), threshold=(0,), right=(0,)),), more=(), other=()
    )
    forgetful = gzip.compress(msgspec.json.encode(replace(shipped_model(), call=nothing)))
    (folder / "0.gz").write_bytes(forgetful if forgets else SHIPPED.read_bytes())
    (folder / "folds.json").write_text(json.dumps({"0.gz": families}))
    return folder


def compared(tmp_path: Path, trials: Trials, folder: Path | None = None) -> written.Comparison:
    out = tmp_path / "found.json"
    options = compare.Options(
        truth=truth_file(tmp_path), estimators=("trace",), out=str(out), folds=None if folder is None else str(folder)
    )
    compare.run(options, interpreter=FOUND, trials=trials)
    return written.read(out)


def test_a_fold_with_the_shipped_model_replays_as_the_estimator_does(tmp_path: Path) -> None:
    """The bench's own replay may not part ways with the estimator's."""
    plain = {row.case: row for row in compared(tmp_path, ConvTrials()).rows}
    again = {row.case: row for row in compared(tmp_path, ConvTrials(), folds(tmp_path, ["f0", "f2"])).rows}
    for name in ("m.0", "m.2"):
        assert again[name].fold == "0.gz"
        assert again[name].replayed_mib == pytest.approx(plain[name].replayed_mib, abs=1.0)  # in whole MiB there


def test_a_fold_judges_by_its_own_model(tmp_path: Path) -> None:
    plain = {row.case: row for row in compared(tmp_path, ConvTrials()).rows}
    again = {row.case: row for row in compared(tmp_path, ConvTrials(), folds(tmp_path, ["f0"], forgets=True)).rows}
    known, new = plain["m.0"].replayed_mib, again["m.0"].replayed_mib
    assert known is not None
    assert new is not None
    assert new < known - 10
    assert again["m.2"].replayed_mib == plain["m.2"].replayed_mib  # its family is in no fold
    assert again["m.2"].fold == ""


def test_training_runs_are_distinguished_from_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(tmp_path, ConvTrials())
    assert "learnt from these very runs" in found.caution
    assert "Beware" in capsys.readouterr().out
    assert compared(tmp_path, Trials()).caution == ""
    half = compared(tmp_path, ConvTrials(), folds(tmp_path, ["f0"]))
    assert "1 of 3 runs" in half.caution
    assert [summary.name for summary in half.estimators] == ["trace, unseen", "trace, learnt from", "trace"]


@pytest.mark.parametrize("index", [None, "[]", '{"nosuch.gz": ["a"]}'])
def test_unusable_folds_are_an_error(tmp_path: Path, index: str | None) -> None:
    if index is not None:
        (tmp_path / "folds.json").write_text(index)
    with pytest.raises(Usage, match=r"folds\.json|nosuch"):
        Folds(tmp_path)
