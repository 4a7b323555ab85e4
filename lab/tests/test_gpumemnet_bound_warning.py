"""The warning about the bound of a family whose measured models stayed below it less often than its level."""

from __future__ import annotations

from pathlib import Path

import pytest

from carma.cli import estimate_request as estimating
from carma.core.model.values import Estimate
from carma.trial.layers.description import TrainingOptions
from carma.trial.protocol import NoTrials
from carma_lab.bench.memory.comparison_file import read as read_comparison
from gpumemnet.serving import limits
from gpumemnet.serving.estimator import GpuMemNet
from gpumemnet.serving.model_facts import SHIPPED, Kind
from gpumemnet.summaries import read_text
from gpumemnet.summaries.training_options import completed
from gpumemnet_fixtures import gpumemnet_models as tiny

ROOT = Path(__file__).parent.parent.parent
BLOCK = """\
    ({0}): TransformerEncoderLayer(
      (self_attn): MultiheadAttention(
        (out_proj): NonDynamicallyQuantizableLinear(in_features=256, out_features=256, bias=True)
      )
      (linear1): Linear(in_features=256, out_features=1024, bias=True)
      (dropout): Dropout(p=0.1, inplace=False)
      (linear2): Linear(in_features=1024, out_features=256, bias=True)
      (norm1): LayerNorm((256,), eps=1e-05, elementwise_affine=True)
      (norm2): LayerNorm((256,), eps=1e-05, elementwise_affine=True)
      (dropout1): Dropout(p=0.1, inplace=False)
      (dropout2): Dropout(p=0.1, inplace=False)
    )
"""
WORDS = f"""\
Net(
  (words): Embedding(8000, 256)
  (blocks): ModuleList(
{BLOCK.format(0)}{BLOCK.format(1)}  )
  (head): Linear(in_features=256, out_features=8000, bias=True)
)
"""


def _said(text: str, sample: tuple[int, ...], kind: Kind = "mlp", models: Path = SHIPPED) -> tuple[str, ...]:
    described = completed(read_text(text, batch=16, sample=sample), TrainingOptions(optimizer="adam")).described
    answer = GpuMemNet(kind, NoTrials(), 0.99, models=(models,)).of(described)
    assert isinstance(answer, Estimate), answer
    return answer.warnings


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_an_estimate_of_a_transformer_warns_how_often_the_bound_held(kind: Kind) -> None:
    (said,) = (warning for warning in _said(WORDS, (128,), kind) if "people use" in warning)
    assert said.startswith(estimating.OF_BOUND)
    assert "it held for 49 of 55 transformers that people use (89 %), not for 99 %" in said


def test_a_family_whose_bound_held_has_no_warning() -> None:
    printed = "Net(\n  (a): Linear(in_features=784, out_features=2048, bias=True)\n  (b): ReLU()\n)\n"
    assert not any("people use" in warning for warning in _said(printed, (784,)))


def test_a_model_that_is_not_shipped_has_no_warning(tmp_path: Path) -> None:
    tiny.save(tmp_path, tiny.facts("transformer", "mlp"))
    assert not any("people use" in warning for warning in _said(WORDS, (128,), models=tmp_path))


def test_the_shipped_counts_equal_the_measured_ones() -> None:
    comparison = read_comparison(ROOT / "lab" / "results" / "gpumemnet" / "zoo.json")
    assert comparison.level == limits.LEVEL
    for one in comparison.networks:
        family, estimator = one.name.split(": ")
        if estimator.startswith("gpumemnet"):
            assert one.bound_holds_share is not None
            assert (round(one.bound_holds_share * one.answered), one.answered) == limits.BOUND_HELD[family]  # type: ignore[index]
