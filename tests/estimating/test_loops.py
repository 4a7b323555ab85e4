"""Loops as people write them: whatever the script does around its steps, the trial comes through; figures agree."""

from __future__ import annotations

import subprocess
import sys

import pytest

from carma.trial.protocol import Trial
from tests.estimating.trying import Trying, peak_bytes, stepped


@pytest.fixture(scope="session")
def plain(trying: Trying) -> Trial:
    return trying.python("plain.py")


@pytest.fixture(scope="session")
def encoder(trying: Trying) -> Trial:
    return trying.python("encoder.py")


def test_a_plain_loop_with_workers_options_and_a_configuration(plain: Trial) -> None:
    report = plain.report
    assert report.steps == 3
    assert report.cuda == "" or report.cuda[0].isdigit()
    assert report.parameters_bytes == report.gradients_bytes > 2**20
    assert report.optimizer_bytes == 2 * report.parameters_bytes
    assert report.described is not None
    assert (report.described.batch, report.described.input) == (64, (64, 3, 32, 32))
    assert [layer.kind for layer in report.described.layers][:3] == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert {"forward", "backward", "step", "step_end"} <= set(report.marks)


def test_options_count(trying: Trying, plain: Trial) -> None:
    larger = trying.python("plain.py", "--batch-size", "128")
    assert 1.5 < peak_bytes(larger) / peak_bytes(plain) < 2.2


def test_a_half_model_and_an_average_of_it(trying: Trying, plain: Trial) -> None:
    half = trying.python("plain.py", "--half", "--ema")
    assert half.report.parameters_bytes * 2 == plain.report.parameters_bytes
    assert half.report.optimizer_bytes == 2 * half.report.parameters_bytes
    assert peak_bytes(half) < 0.7 * peak_bytes(plain)


def test_an_average_of_the_model_is_one_copy_more(trying: Trying, plain: Trial) -> None:
    more = peak_bytes(trying.python("plain.py", "--ema")) - peak_bytes(plain)
    assert 1.0 <= more / plain.report.parameters_bytes < 1.2


def test_a_checkpoint_on_the_disk_is_loaded_onto_the_card(trying: Trying, plain: Trial) -> None:
    folder = trying.folder()
    save = """
import torch; from torch import nn
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                      nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
torch.save({"model": model.state_dict()}, "last.pt")
"""
    subprocess.run([sys.executable, "-c", save], cwd=folder, check=True)
    trial = stepped(trying.run_in(folder, sys.executable, "plain.py", "--resume", "last.pt"))
    more = peak_bytes(trial) - peak_bytes(plain)
    assert 1.0 <= more / plain.report.parameters_bytes < 1.2  # the script keeps what it has loaded


def test_mixed_precision_with_a_scaler_steps(trying: Trying, encoder: Trial) -> None:
    mixed = trying.python("encoder.py", "--amp", "fp16")
    assert mixed.report.optimizer_bytes == 2 * mixed.report.parameters_bytes  # no step was skipped
    assert mixed.report.described is not None
    assert mixed.report.described.autocast == "float16"
    assert "amp" in mixed.report.flags
    assert "amp" not in encoder.report.flags
    assert peak_bytes(mixed) < peak_bytes(encoder)


def test_the_old_names_of_mixed_precision(trying: Trying) -> None:
    old, new = (trying.python("encoder.py", "--amp", kind) for kind in ("old", "fp16"))
    assert peak_bytes(old) == peak_bytes(new)


def test_all_in_bfloat16(trying: Trying, encoder: Trial) -> None:
    pure = trying.python("encoder.py", "--pure")
    assert pure.report.parameters_bytes * 2 == encoder.report.parameters_bytes
    assert peak_bytes(pure) < 0.7 * peak_bytes(encoder)


def test_recomputation_lowers_the_peak_and_layers_count_once(trying: Trying, encoder: Trial) -> None:
    again = trying.python("encoder.py", "--checkpoint")
    assert peak_bytes(again) < 0.7 * peak_bytes(encoder)
    assert again.report.described is not None
    assert encoder.report.described is not None
    assert again.report.described.checkpointing
    assert not encoder.report.described.checkpointing
    assert len(again.report.described.layers) == len(encoder.report.described.layers)


def test_accumulation_keeps_gradients_during_the_passes(trying: Trying, encoder: Trial) -> None:
    several = trying.python("encoder.py", "--accumulate", "2")
    more = peak_bytes(several) - peak_bytes(encoder)
    assert 0 < more <= 1.1 * encoder.report.gradients_bytes
    assert several.report.described is not None
    assert encoder.report.described is not None
    assert len(several.report.described.layers) == len(encoder.report.described.layers)


def test_compiling_a_model_or_a_function_is_left_out_with_a_warning(trying: Trying, encoder: Trial) -> None:
    compiled = trying.python("encoder.py", "--compile")
    assert peak_bytes(compiled) == peak_bytes(encoder)
    assert "compile" in compiled.report.flags
    assert any("torch.compile" in warning for warning in compiled.report.warnings)


def test_data_parallel_with_one_card(trying: Trying, encoder: Trial) -> None:
    assert peak_bytes(trying.python("encoder.py", "--parallel")) == peak_bytes(encoder)


@pytest.mark.parametrize("critics", ["1", "5"])
def test_two_optimizers(trying: Trying, critics: str) -> None:
    report = trying.python("gan.py", critics).report
    assert report.steps == 3
    assert report.optimizer_bytes == 2 * report.parameters_bytes  # of both networks
    assert report.described is not None
    assert len(report.described.layers) == 4  # of the first


def test_a_module_and_a_shell_script(trying: Trying) -> None:
    folder = trying.folder()
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "gan.py").rename(folder / "package" / "train.py")
    (folder / "run.sh").write_text("#!/bin/sh\nset -e\npython -c 'import torch'\nexec python -m package.train 1\n")
    assert stepped(trying.run_in(folder, "sh", "run.sh")).report.steps == 3


def test_what_scripts_touch_in_passing(trying: Trying) -> None:
    report = trying.python("extras.py").report
    assert report.steps == 3
    assert 0 < report.optimizer_bytes - 2 * report.parameters_bytes < 4096  # the fused one counts steps on the card


def test_a_script_that_deletes_its_output_survives(trying: Trying) -> None:
    folder = trying.folder()
    (folder / "out").mkdir()
    (folder / "out" / "precious").write_text("weeks of work")
    text = "import shutil\nshutil.rmtree('out')\n" + (folder / "gan.py").read_text()
    (folder / "train.py").write_text(text)
    stepped(trying.run_in(folder, sys.executable, "train.py"))
    assert (folder / "out" / "precious").read_text() == "weeks of work"


def test_copies_by_way_of_a_file_or_a_buffer(trying: Trying) -> None:
    text = """
import io, pickle, torch
model = torch.nn.Linear(512, 512, bias=False).cuda()
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
first = torch.load(buffer)
with open("model.pt", "wb") as file:
    torch.save({"nested": [model.state_dict(), 7]}, file)
with open("model.pt", "rb") as file:
    second, number = torch.load(file, map_location="cuda:0")["nested"]
torch.save(obj=[7], f="number.pt")
assert torch.load(f="number.pt", map_location="cpu") == [7]
third = pickle.loads(pickle.dumps(model))
assert number == 7
assert all(each["weight"].is_cuda for each in (first, second, third.state_dict()))
model.load_state_dict(second)
"""
    trial = trying.script(text)
    assert isinstance(trial, Trial), trial.reason
    assert (trial.report.stop, trial.report.reason) == ("end", "the script ended by itself before an optimizer step")
    assert peak_bytes(trial) == 4 * 4 * 512 * 512
