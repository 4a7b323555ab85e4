"""`carma estimate --summary`: who reads it, and what is said of a run that no summary tells."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_summaries_figures import CUT, SHAPELESS

from carma.cli import estimate
from carma.cli import estimate_request as estimating
from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.trial.layers import description
from carma.trial.layers.description import Described
from carma.trial.protocol import Context
from gpumemnet.summaries import training_options as told
from tests.unit.cli import estimate_world
from tests.unit.cli.estimate_world import World, complained, figures, printed

TREE = "Net(\n  (fc): Linear(in_features=10, out_features=5, bias=True)\n)\n"
ADAM = "taken to be Adam"
world = estimate_world.world


@pytest.fixture
def seen(world: World, tmp_path: Path) -> list[Described]:
    """What the default reader was given."""
    found: list[Described] = []

    def by_model(context: Context, request: EstimateRequest) -> Estimate:
        described = context.trials.describe(request)
        assert isinstance(described, Described)
        found.append(described)
        return Estimate(footprint_mib=900, upper_mib=900, source=estimating.READER, warnings=("its own",))

    (tmp_path / "net.txt").write_text(TREE)
    world.says[estimating.READER] = by_model
    return found


def test_the_default_reader(seen: list[Described], capsys: pytest.CaptureFixture[str]) -> None:
    row = figures(capsys, "--gpu", "h200", "--summary", "net.txt", "--batch", "4")
    assert row["estimator"] == "gpumemnet"
    assert (seen[0].parameters, seen[0].batch, seen[0].layers[0].output) == (55, 4, ())


def test_without_a_summary_a_command_is_required(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.txt").write_text(TREE)
    assert estimating.READER not in world.says
    assert "--estimator" in complained(capsys, 2, "--gpu", "h200", "--summary", "net.txt")


@pytest.mark.usefixtures("world")
def test_unknown_options_get_their_usual_value_with_a_remark(
    seen: list[Described], capsys: pytest.CaptureFixture[str]
) -> None:
    row = figures(capsys, "--gpu", "h200", "--summary", "net.txt")
    (model,) = seen
    assert (model.optimizer, model.optimizer_slots, model.dtype, model.autocast) == ("Adam", 2, "float32", "")
    assert not model.checkpointing
    assert row["warnings"][0] == "its own"
    assert ADAM in row["warnings"][1]
    assert ADAM in " ".join(printed(capsys, "--gpu", "h200", "--summary", "net.txt").split())


@pytest.mark.parametrize(
    ("name", "optimizer", "slots"),
    [
        ("sgd", "SGD", 0),
        ("Momentum", "SGD", 1),
        ("adamw", "AdamW", 2),
        ("rmsprop", "RMSprop", 1),
        ("adagrad", "Adagrad", 1),
    ],
)
def test_the_optimizer_is_named(
    seen: list[Described], capsys: pytest.CaptureFixture[str], name: str, optimizer: str, slots: int
) -> None:
    row = figures(capsys, "--gpu", "h200", "--summary", "net.txt", "--optimizer", name)
    assert (seen[0].optimizer, seen[0].optimizer_slots) == (optimizer, slots)
    assert row["warnings"] == ["its own"]


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("fp32", "float32", ""),
        ("tf32", "float32", ""),
        ("bf16-amp", "float32", "bfloat16"),
        ("fp16-amp", "float32", "float16"),
        ("bf16", "bfloat16", ""),
    ],
)
def test_precision_and_checkpointing(
    seen: list[Described], capsys: pytest.CaptureFixture[str], precision: str, dtype: str, autocast: str
) -> None:
    figures(capsys, "--gpu", "h200", "--summary", "net.txt", "--precision", precision, "--checkpointing")
    assert (seen[0].dtype, seen[0].autocast, seen[0].checkpointing) == (dtype, autocast, True)


def test_attention_heads_and_the_memory_format(seen: list[Described], capsys: pytest.CaptureFixture[str]) -> None:
    figures(capsys, "--gpu", "h200", "--summary", "net.txt")
    assert (seen[0].attention, seen[0].heads, seen[0].channels_last) == ("", None, False)
    words = ("--attention", "eager", "--heads", "6", "--channels-last")
    figures(capsys, "--gpu", "h200", "--summary", "net.txt", *words)
    assert (seen[1].attention, seen[1].heads, seen[1].channels_last) == ("eager", 6, True)


@pytest.mark.parametrize("shape", ["7x10", "7,10", "7×10"])
def test_an_input_determines_the_outputs(seen: list[Described], capsys: pytest.CaptureFixture[str], shape: str) -> None:
    row = figures(capsys, "--gpu", "h200", "--summary", "net.txt", "--batch", "4", "--input", shape)
    assert seen[0].layers[0].output == (4, 7, 5)
    assert seen[0].input == (4, 7, 10)
    assert any("worked out" in warning for warning in row["warnings"])


@pytest.mark.parametrize("flag", [("--steps", "5"), ("--limit", "90s")])
def test_flags_that_belong_to_a_trial_run(
    seen: list[Described], capsys: pytest.CaptureFixture[str], flag: tuple[str, str]
) -> None:
    said = complained(capsys, 2, "--gpu", "h200", "--summary", "net.txt", "--batch", "4", *flag)
    assert f"{flag[0]} needs a command" in said
    assert not seen


@pytest.mark.parametrize(
    "flag",
    [
        ("--input", "3"),
        ("--optimizer", "sgd"),
        ("--precision", "bf16"),
        ("--checkpointing",),
        ("--channels-last",),
        ("--attention", "sdpa"),
        ("--heads", "4"),
    ],
)
def test_flags_that_belong_to_a_summary(
    world: World, capsys: pytest.CaptureFixture[str], flag: tuple[str, ...]
) -> None:
    assert f"{flag[0]} needs --summary" in complained(capsys, 2, "--gpu", "h200", *flag, "--", "sh")
    assert world.trials.runs == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--input", "3x-1"), "is not a shape"),
        (("--input", "3x0"), "is not a shape"),
        (("--input", "big"), "is not a shape"),
        (("--input", ""), "is not a shape"),
        (("--input", "11"), "net.txt: line 2 of the model summary: nothing before it fits"),
        (("--optimizer", "lion"), "lion"),
        (("--precision", "int8"), "int8"),
        (("--attention", "flash"), "flash"),
        (("--heads", "0"), "--heads"),
        (("--batch", "1000000000000"), "between 1 and 1,000,000,000"),
        (("--batch", "1000000000", "--input", "1000000x10"), "with a batch of 1,000,000,000 the outputs"),
    ],
)
def test_mistakes(seen: list[Described], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert said in complained(capsys, 2, "--gpu", "h200", "--summary", "net.txt", *words)
    assert seen == []


def test_estimators_that_do_not_read_the_summary_have_none_of_its_remarks(
    world: World, seen: list[Described], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = figures(capsys, "--gpu", "h200", "--compare", "--summary", "net.txt", "--", "sh")
    assert len(seen) == 1
    warnings = {row["estimator"]: row["warnings"] for row in rows}
    assert ADAM not in " ".join(warnings["trace"])
    assert ADAM in " ".join(warnings["gpumemnet"])
    assert world.requests


@pytest.mark.parametrize(
    ("reason", "flag"),
    [
        ("the summary does not tell the shapes of the layers' outputs", "--input 3x224x224"),
        ("the batch size is not known", "--batch N"),
    ],
)
def test_a_refusal_for_want_of_a_flag_names_it(
    world: World, seen: list[Described], capsys: pytest.CaptureFixture[str], reason: str, flag: str
) -> None:
    world.says[estimating.READER] = lambda _c, _r: NoEstimate(source=estimating.READER, reason=reason)
    assert flag in complained(capsys, 1, "--gpu", "h200", "--summary", "net.txt")
    assert seen == []


def test_where_no_flag_helps_none_is_named(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table without shapes has none with --input either: it says how to print them."""

    def refuse(context: Context, request: EstimateRequest) -> NoEstimate:
        context.trials.describe(request)
        reason = "the summary does not tell the shapes of the layers' outputs; a torchinfo table does"
        return NoEstimate(source=estimating.READER, reason=reason)

    (tmp_path / "net.txt").write_text(SHAPELESS)
    world.says[estimating.READER] = refuse
    said = " ".join(complained(capsys, 1, "--gpu", "h200", "--summary", "net.txt").split())
    assert "the table has no shapes: torchinfo.summary(" in said
    assert "--input" not in said
    assert "a torchinfo table does" not in said


def test_gaps_of_a_summary_are_printed_with_a_refusal_and_an_estimate(
    world: World, seen: list[Described], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.txt").write_text(CUT)
    row = figures(capsys, "--gpu", "h200", "--summary", "cut.txt", "--optimizer", "sgd")
    assert any("depth=10" in warning for warning in row["warnings"])

    def refuse(context: Context, request: EstimateRequest) -> NoEstimate:
        context.trials.describe(request)
        return NoEstimate(source=estimating.READER, reason="it was too much")

    world.says[estimating.READER] = refuse
    said = complained(capsys, 1, "--gpu", "h200", "--summary", "cut.txt")
    assert "depth=10 (torchinfo.summary(model, ..., depth=10)); it was too much" in " ".join(said.split())
    assert len(seen) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_summary_from_a_pipe(
    seen: list[Described], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TREE.encode(encoding))))
    figures(capsys, "--gpu", "h200", "--summary", "-", "--batch", "4")
    assert (seen[0].parameters, seen[0].batch) == (55, 4)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    assert "stdin: it is empty" in complained(capsys, 2, "--gpu", "h200", "--summary", "-")


@pytest.mark.parametrize("raw", [b"\x93NUMPY\x01\x00" * 900, b"\x08\x00\x00"])
def test_bytes_are_no_summary_and_no_onnx_file(
    seen: list[Described], tmp_path: Path, capsys: pytest.CaptureFixture[str], raw: bytes
) -> None:
    (tmp_path / "model.pt").write_bytes(raw)
    said = complained(capsys, 2, "--gpu", "h200", "--summary", "model.pt")
    assert "no text, and does not begin like an ONNX file" in said
    assert "torchinfo, torchsummary, print(model)" in said
    assert seen == []


@pytest.mark.parametrize(("shape", "attention"), [("10", ""), ("7x10", "eager")])
def test_attention_where_there_is_none(
    seen: list[Described], capsys: pytest.CaptureFixture[str], shape: str, attention: str
) -> None:
    """A chain of vectors is certain; rows of vectors may attend to one another in a function that is not printed."""
    words = ("--summary", "net.txt", "--batch", "4", "--input", shape, "--attention", "eager", "--heads", "2")
    row = figures(capsys, "--gpu", "h200", *words)
    assert seen[0].attention == attention
    assert any("change nothing" in warning for warning in row["warnings"]) == (not attention)


def test_the_choices_of_the_flags_are_those_that_are_known() -> None:
    assert tuple(told.OPTIMIZERS) == description.OPTIMIZERS == estimate.OPTIMIZERS
    assert description.PRECISIONS == estimate.PRECISIONS
    assert description.ATTENTIONS == estimate.ATTENTIONS


def test_a_graph_for_inference_is_given_no_bound(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also out of a pipe, whose bytes are those of the file."""
    from test_summaries_onnx import images

    def by_model(context: Context, request: EstimateRequest) -> Estimate:
        assert isinstance(context.trials.describe(request), Described)
        said = (f"{estimating.OF_BOUND} those of the data set", "another")
        return Estimate(footprint_mib=900, upper_mib=1200, level=0.99, source=estimating.READER, warnings=said)

    world.says[estimating.READER] = by_model
    for norm, bound in ((True, 1200), (False, None)):
        raw = images(tmp_path / "net.onnx", norm=norm).read_bytes()
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
        for source in ("net.onnx", "-"):
            row = figures(capsys, "--gpu", "h200", "--summary", source, "--batch", "4")
            assert (row["bound_mib"], row["level"]) == (bound, bound and 0.99)
            assert any(warning.startswith(estimating.OF_BOUND) for warning in row["warnings"]) == (bound is not None)
            assert "another" in row["warnings"]
    said = printed(capsys, "--gpu", "h200", "--summary", "net.onnx", "--batch", "4")
    assert "900 MiB, without a bound" in said
    assert "--gpu-mem" not in said
