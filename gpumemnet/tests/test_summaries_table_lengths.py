"""Tables of language models that were printed for one length and are asked about another."""

from __future__ import annotations

import pytest

from carma.errors import Usage
from gpumemnet.summaries import read_text

# As torchinfo 1.8.0 prints a GPT-2 of one layer, 24 words long, with what goes in and without.
PRINTED = """\
==================================================================================================
Layer (type:depth-idx)                             Input Shape      Output Shape     Param #
==================================================================================================
GPT2LMHeadModel                                    [2, 24]          --               --
├─GPT2Model: 1-1                                   [2, 24]          --               --
│    └─Embedding: 2-1                              [2, 24]          [2, 24, 48]      48,000
│    └─Embedding: 2-2                              [1, 24]          [1, 24, 48]      3,072
│    └─Dropout: 2-3                                [2, 24, 48]      [2, 24, 48]      --
│    └─ModuleList: 2-4                             --               --               --
│    │    └─GPT2Block: 3-1                         [2, 24, 48]      [2, 24, 48]      --
│    │    │    └─LayerNorm: 4-1                    [2, 24, 48]      [2, 24, 48]      96
│    │    │    └─GPT2Attention: 4-2                [2, 24, 48]      [2, 24, 48]      --
│    │    │    │    └─Conv1D: 5-1                  [2, 24, 48]      [2, 24, 144]     7,056
│    │    │    │    └─Conv1D: 5-2                  [2, 24, 48]      [2, 24, 48]      2,352
│    │    │    │    └─Dropout: 5-3                 [2, 24, 48]      [2, 24, 48]      --
│    │    │    └─LayerNorm: 4-3                    [2, 24, 48]      [2, 24, 48]      96
│    │    │    └─GPT2MLP: 4-4                      [2, 24, 48]      [2, 24, 48]      --
│    │    │    │    └─Conv1D: 5-4                  [2, 24, 48]      [2, 24, 192]     9,408
│    │    │    │    └─NewGELUActivation: 5-5       [2, 24, 192]     [2, 24, 192]     --
│    │    │    │    └─Conv1D: 5-6                  [2, 24, 192]     [2, 24, 48]      9,264
│    │    │    │    └─Dropout: 5-7                 [2, 24, 48]      [2, 24, 48]      --
│    └─LayerNorm: 2-5                              [2, 24, 48]      [2, 24, 48]      96
├─Linear: 1-2                                      [2, 24, 48]      [2, 24, 1000]    48,000
==================================================================================================
Total params: 127,440
Trainable params: 127,440
Non-trainable params: 0
==================================================================================================
Input size (MB): 0.00
==================================================================================================
"""
BARE = "\n".join(line[:51] + line[68:] if len(line) > 60 else line for line in PRINTED.splitlines())
LONGER = {name: text.replace(" 24]", " 40]").replace(" 24,", " 40,") for name, text in (("in", PRINTED), ("out", BARE))}
LAST = "├─Linear: 1-2                                      [2, 24, 1000]    48,000"


def with_row(kind: str, shape: str, parameters: str = "--") -> str:
    """One more row behind the last."""
    row = f"├─{kind}: 1-3".ljust(51) + shape.ljust(17) + parameters
    total = f"Total params: {127_440 + (0 if parameters == '--' else int(parameters.replace(',', ''))):,}"
    return BARE.replace(LAST, f"{LAST}\n{row}").replace("Total params: 127,440", total)


@pytest.mark.parametrize("batch", [None, 2, 7, 24, 40])
@pytest.mark.parametrize(("text", "longer"), [(PRINTED, LONGER["in"]), (BARE, LONGER["out"])])
def test_every_row_gets_the_length_that_was_asked_for(text: str, longer: str, batch: int | None) -> None:
    assert "[2, 24, 144]" in text
    assert "24" not in longer.replace("127,440", "")
    found = read_text(text, batch=batch, sample=(40,))
    assert found.described == read_text(longer, batch=batch, sample=(40,)).described
    assert found.described.input == (batch or 2, 40)
    (remark,) = found.remarks
    assert "printed for 24 words" in remark


def test_the_length_that_it_was_printed_with_changes_nothing() -> None:
    plain, told = read_text(BARE), read_text(BARE, sample=(24,))
    assert told.described.layers == plain.described.layers
    assert (told.remarks, told.described.input) == ((), (2, 24))


def test_a_linear_layer_of_hugging_face_is_no_convolution() -> None:
    """What goes into it once made a convolutional network of a GPT-2."""
    found = [layer for layer in read_text(PRINTED).described.layers if layer.kind == "Conv1D"]
    assert [layer.inputs for layer in found[:2]] == [((2, 24, 48),)] * 2
    assert all(layer.attributes == {} for layer in found)


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (("Softmax", "[2, 4, 24, 24]"), (2, 4, 40, 40)),  # scores, by head
        (("Identity", "[2, 24, 4, 12]"), (2, 40, 4, 12)),
        (("Linear", "[2, 24, 24]", "1,176"), (2, 40, 24)),  # its weights have 24 rows
        (("Linear", "[2, 24]", "1,176"), (2, 24)),
        (("Linear", "[48, 4]", "196"), (80, 4)),  # the words of all samples in a row
        (("Embedding", "[24, 24, 4]", "128"), (40, 40, 4)),  # of distances
        (("Tanh", "[2, 48]"), (2, 48)),
    ],
)
def test_rows_of_other_shapes(row: tuple[str, str], shape: tuple[int, ...]) -> None:
    assert read_text(with_row(*row), sample=(40,)).described.layers[-1].output == shape


def test_words_of_all_samples_in_a_row_follow_the_batch() -> None:
    text = with_row("Linear", "[48, 4]", "196")
    assert read_text(text, batch=6).described.layers[-1].output == (144, 4)
    assert read_text(text, batch=6, sample=(40,)).described.layers[-1].output == (240, 4)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("Dropout", "[2, 24, 24]"), "not sure which of its sizes"),  # scores, or words that are 24 wide
        (("Conv1d", "[2, 64, 24]", "9,280"), "not sure which of its sizes"),
        (("Linear", "[2, 12, 48]", "2,352"), "not sure which of its sizes"),  # half as many words
        (("Identity", "[2, 24]"), "a size of 24 may be"),
        (("Linear", "[9, 48]", "2,352"), "its first size is not the batch"),  # some of the words
        (("Linear", "[2, 5]", "120,005"), "hang on the number of words"),  # takes 24 times 1000
    ],
)
def test_a_row_that_is_not_sure_is_named(row: tuple[str, ...], why: str) -> None:
    with pytest.raises(Usage, match=f"printed for 24 words .* 40 of --input: .*{why}.* \\({row[0]}, ") as caught:
        read_text(with_row(*row), sample=(40,))
    assert "as many words as it is trained with" in caught.value.hint
    assert read_text(with_row(*row), sample=(24,)).described.layers[-1].kind == row[0]


def test_a_table_of_places_that_ends_before() -> None:
    assert read_text(BARE, sample=(64,)).described.input == (2, 64)
    with pytest.raises(Usage, match=r"--input 65 .* 64 words") as caught:
        read_text(BARE, sample=(65,))
    assert "up to --input 64" in caught.value.hint


def test_an_image_beside_a_table_of_words() -> None:
    with pytest.raises(Usage, match=r"3x24x24 .* 24 in"):
        read_text(BARE, sample=(3, 24, 24))
