"""Trainers of others: Hugging Face, accelerate, Lightning."""

from __future__ import annotations

import importlib.util

import pytest

from tests.estimating.trying import Trying, peak_bytes


def _needs(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def test_hugging_face_trainer_with_gpt2(trying: Trying) -> None:
    _needs("transformers")
    full = trying.python("hf_trainer.py", "gpt2", "eval_strategy=epoch", "per_device_eval_batch_size=32")
    short = trying.python("hf_trainer.py", "gpt2", "bf16=True")
    for report in (full.report, short.report):
        assert report.steps == 3
        assert 0 <= report.optimizer_bytes - 2 * report.parameters_bytes < 4096  # the fused one counts steps there
        assert "evaluation" in report.flags
        assert report.described is not None
        assert report.described.config["model_type"] == "gpt2"
        assert (report.described.batch, report.described.input) == (8, (8, 128))  # given by name
    assert short.report.described is not None
    assert short.report.described.autocast == "bfloat16"
    assert peak_bytes(short) < peak_bytes(full)


def test_hugging_face_trainer_with_bert_recomputing_and_accumulating(trying: Trying) -> None:
    _needs("transformers")
    again = trying.python("hf_trainer.py", "bert", "gradient_checkpointing=True", "gradient_accumulation_steps=2")
    whole = trying.python("hf_trainer.py", "bert", "gradient_accumulation_steps=2")
    assert again.report.steps == whole.report.steps == 3
    assert "checkpoint" in again.report.flags
    assert peak_bytes(again) < peak_bytes(whole)


def test_accelerate(trying: Trying) -> None:
    _needs("accelerate")
    report = trying.python("hf_accelerate.py").report
    assert report.steps == 3
    assert report.optimizer_bytes == 2 * report.parameters_bytes > 0  # it was made before the model moved
    assert "amp" in report.flags
    assert report.described is not None
    assert (report.described.autocast, report.described.batch) == ("bfloat16", 32)


@pytest.mark.parametrize(("precision", "autocast"), [("16-mixed", "float16"), ("bf16-mixed", "bfloat16")])
def test_lightning(trying: Trying, precision: str, autocast: str) -> None:
    _needs("lightning")
    report = trying.python("pl.py", precision).report
    assert report.steps == 3
    assert report.optimizer_bytes == 2 * report.parameters_bytes
    assert report.gradients_bytes == report.parameters_bytes
    assert "eval" in report.marks  # its first look at the validation data
    assert report.described is not None
    assert (report.described.autocast, report.described.batch) == (autocast, 64)


def test_lightning_on_two_cards_with_its_own_copies_of_the_loaders(trying: Trying) -> None:
    _needs("lightning")
    report = trying.python("pl_ddp.py", gpus=2).report
    assert (report.world_size, report.steps) == (2, 3)
    assert {"ddp", "evaluation"} <= set(report.flags)
    assert report.described is not None
    assert report.described.batch == 64
