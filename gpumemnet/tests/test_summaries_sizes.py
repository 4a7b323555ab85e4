"""Sizes and numbers of layers that no model has: said as they are printed, and before anything is worked out."""

from __future__ import annotations

import re

import pytest

from carma.errors import Usage
from gpumemnet.summaries import read_text
from gpumemnet.summaries.text import MOST_LAYERS

LINEAR = "  ({0}): Linear(in_features=10, out_features=10, bias=True)\n"
HEAD = "Layer (type:depth-idx)      Output Shape              Param #\n"
ROW = "├─Linear: 1-{0:<16} [4, 10]                   110\n"
RULE = "=" * 70 + "\n"


@pytest.mark.parametrize("sample", [(), (10,)])
@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("Linear(in_features=-5, out_features=5, bias=True)", "a size is negative"),
        ("Linear(in_features=-5, out_features=5, bias=True), 30 params", "a size is negative"),
        ("Embedding(-7, 64)", "a size is negative"),
        ("Conv2d(3, 64, kernel_size=(3, -3), stride=(1, 1))", "a size is negative"),
        (f"Linear(in_features={'1234567890' * 3}, out_features=5, bias=True)", "a size has more than 18 digits"),
    ],
)
def test_an_impossible_size_is_an_error(layer: str, why: str, sample: tuple[int, ...]) -> None:
    with pytest.raises(Usage, match=rf"line 2 .*: {why}: '{re.escape(f'(a): {layer}'[:40])}"):
        read_text(f"Net(\n  (a): {layer}\n)\n", batch=4, sample=sample)


def test_what_may_be_negative_is_no_size() -> None:
    text = (
        "Net(\n  (a): Flatten(start_dim=1, end_dim=-1)\n  (n): LayerNorm((10,), 1e-05)\n"
        "  (e): Embedding(10, 10, padding_idx=-1)\n  (s): Softmax(dim=-1)\n)\n"
    )
    assert read_text(text, batch=4).described.parameters == 20 + 100


@pytest.mark.parametrize(
    "text",
    [
        "Net(\n" + "".join(map(LINEAR.format, range(MOST_LAYERS))) + ")\n",
        f"Net(\n  (0-{MOST_LAYERS}): {MOST_LAYERS + 1} x ReLU()\n)\n",
        HEAD + RULE + "".join(map(ROW.format, range(MOST_LAYERS))) + "\n" + RULE,
    ],
    ids=["printed", "times", "table"],
)
def test_too_many_layers_are_refused_before_they_are_understood(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumemnet.summaries.printed._Counting.count", None)
    monkeypatch.setattr("gpumemnet.summaries.torch_tables._tree_rows", None)
    with pytest.raises(Usage, match="more than 100,000 layers"):
        read_text(text, batch=4, sample=(10,))


def test_as_many_as_there_may_be_are_read() -> None:
    text = f"Net(\n  (0-{MOST_LAYERS - 3}): {MOST_LAYERS - 2} x ReLU()\n)\n"
    assert len(read_text(text, batch=4).described.layers) == MOST_LAYERS - 2
