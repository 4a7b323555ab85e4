"""Texts that cannot be read: what is said helps, and names no option that does not."""

from __future__ import annotations

import pytest
from test_summaries import FLAT, NESTED, PRINTED

from carma.errors import Usage
from gpumemnet.summaries import read_bytes, read_text

KERAS = """\
Model: "sequential"
_________________________________________________________________
 Layer (type)                Output Shape              Param #
=================================================================
 first ({kind})              {shape}          128

 dense (Dense)               (None, 10)                650

=================================================================
Total params: 778
Trainable params: 778
Non-trainable params: 0
_________________________________________________________________
"""


@pytest.mark.parametrize(
    "text", [FLAT.partition("Block-6")[0], NESTED[: len(NESTED) // 2], PRINTED[: len(PRINTED) // 2]]
)
def test_what_is_cut_off_is_to_be_saved_whole(text: str) -> None:
    with pytest.raises(Usage, match="cut off") as caught:
        read_text(text[: len(text) // 2].rpartition("\n")[0])
    assert "last line" in caught.value.hint


@pytest.mark.parametrize("sample", [(224,), (224, 224, 3), (1, 1, 1)])
def test_an_input_that_does_not_fit_a_printed_model(sample: tuple[int, ...]) -> None:
    """The way to write it, and where to go if that is not it."""
    lines = ("Net(", "  (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))", ")")
    with pytest.raises(Usage, match="line 2") as caught:
        read_text("\n".join(lines), sample=sample)
    assert "channels first" in caught.value.hint
    assert "torchinfo" in caught.value.hint


def test_parameters_that_are_not_printed() -> None:
    with pytest.raises(Usage, match="how many parameters") as caught:
        read_text("Net(\n  (0): StrangeLinear()\n)")
    assert caught.value.hint.startswith("A table of torchinfo counts them")


@pytest.mark.parametrize("raw", [b"", b" \n\n", b"\t"])
def test_nothing_is_called_so(raw: bytes) -> None:
    with pytest.raises(Usage, match="it is empty"):
        read_bytes(raw)


def test_a_file_of_weights_is_not_taken_for_a_summary() -> None:
    with pytest.raises(Usage, match="an archive") as caught:
        read_bytes(b"PK\x03\x04" + bytes(100))
    assert "print(model)" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "shape", "does_input_help"),
    [
        ("Embedding", "(None, None, 32)", True),
        ("Conv1D", "(None, None, 32)", False),  # it changes the length, which the table does not tell
        ("Conv2D", "(None, None, None, 32)", False),
    ],
)
def test_none_in_a_keras_table(kind: str, shape: str, does_input_help: bool) -> None:
    text = KERAS.format(kind=kind, shape=shape)
    (gap,) = read_text(text, batch=2).gaps
    assert ("--input" in gap) == does_input_help
    assert ("keras.Input(shape=" in gap) == (not does_input_help)
    assert bool(read_text(text, batch=2, sample=(7,)).gaps) == (not does_input_help)
