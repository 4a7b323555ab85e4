"""Tables that tell less than they seem to: cut by depth, shortened by hand, of frozen weights, without shapes."""

from __future__ import annotations

import pytest
from test_summaries import COLUMNS, FLAT, NESTED

from carma.errors import Usage
from carma.trial.layers.description import TrainingOptions
from gpumemnet.summaries import read_text
from gpumemnet.summaries.training_options import completed

# As torchinfo 1.8.0 printed them, of a nn.TransformerEncoder and a head; the first with its depth of 3.
CUT = """\
===============================================================================================
Layer (type:depth-idx)                        Output Shape              Param #
===============================================================================================
Net                                           [8, 32, 10]               256
├─TransformerEncoder: 1-1                     [8, 32, 256]              --
│    └─ModuleList: 2-1                        --                        --
│    │    └─TransformerEncoderLayer: 3-1      [8, 32, 256]              (789,760)
│    │    └─TransformerEncoderLayer: 3-2      [8, 32, 256]              789,760
├─Linear: 1-2                                 [8, 32, 10]               2,570
===============================================================================================
Total params: 1,582,346
Trainable params: 792,586
Non-trainable params: 789,760
Total mult-adds (Units.MEGABYTES): 16.87
===============================================================================================
Input size (MB): 0.26
Forward/backward pass size (MB): 14.70
===============================================================================================
"""
WHOLE = """\
===============================================================================================
Layer (type:depth-idx)                        Output Shape              Param #
===============================================================================================
TransformerEncoder                            [8, 32, 256]              --
├─ModuleList: 1-1                             --                        --
│    └─TransformerEncoderLayer: 2-1           [8, 32, 256]              --
│    │    └─MultiheadAttention: 3-1           [8, 32, 256]              263,168
│    │    └─Dropout: 3-2                      [8, 32, 256]              --
│    │    └─LayerNorm: 3-3                    [8, 32, 256]              512
│    │    └─Linear: 3-4                       [8, 32, 1024]             263,168
│    │    └─Dropout: 3-5                      [8, 32, 1024]             --
│    │    └─Linear: 3-6                       [8, 32, 256]              262,400
│    │    └─Dropout: 3-7                      [8, 32, 256]              --
│    │    └─LayerNorm: 3-8                    [8, 32, 256]              512
===============================================================================================
Total params: 789,760
Trainable params: 789,760
Non-trainable params: 0
===============================================================================================
Input size (MB): 0.26
===============================================================================================
"""
SHAPELESS = """\
==========================================================================================
Layer (type:depth-idx)                                            Param #
==========================================================================================
Net                                                               --
├─Linear: 1-1                                                     2,570
==========================================================================================
Total params: 2,570
Trainable params: 2,570
Non-trainable params: 0
==========================================================================================
"""


def without(text: str, *pieces: str) -> str:
    return "\n".join(line for line in text.splitlines() if not any(piece in line for piece in pieces))


def test_a_table_that_is_cut_by_its_depth() -> None:
    (gap,) = read_text(CUT).gaps
    assert "stops above the layers of 2 blocks (TransformerEncoderLayer)" in gap
    assert "depth=10 (torchinfo.summary(model, ..., depth=10))" in gap
    assert "of 1 block (" in read_text(without(CUT, ": 3-2")).gaps[0]


def test_a_list_whose_modules_are_not_shown_is_cut_at_any_depth() -> None:
    rows = "├─ModuleList: 1-0                             --                        789,760\n├─ModuleList: 1-1"
    text = WHOLE.replace("├─ModuleList: 1-1", rows).replace("params: 789,760", "params: 1,579,520")
    assert "1 block (ModuleList)" in read_text(text).gaps[0]


@pytest.mark.parametrize("text", [WHOLE, NESTED, COLUMNS, FLAT])
def test_a_whole_table_has_no_gaps(text: str) -> None:
    read = read_text(text)
    assert (read.gaps, read.remarks) == ((), ())


def test_a_table_without_shapes_has_a_hint_how_to_print_them() -> None:
    for sample in ((), (256,)):
        read = read_text(SHAPELESS, batch=4, sample=sample)
        assert "input_size=" in read.gaps[0]
        assert read.described.input == ((4, 256) if sample else ())
        assert read.described.parameters == 2570


def test_rows_that_were_deleted_are_missed() -> None:
    (remark,) = read_text(without(WHOLE, "3-6")).remarks
    assert "the rows of the table have 527,360 parameters, its total says 789,760: rows are missing" in remark
    with pytest.raises(Usage, match=r"line 2 .* 263,424 .* 789,760"):
        read_text(without(WHOLE, "3-1 ", "3-4 "))
    assert read_text(without(WHOLE, "3-8")).remarks == ()  # not a hundredth
    (shared,) = read_text(WHOLE.replace("Total params: 789,760", "Total params: 526,592")).remarks
    assert "weights are shared" in shared


@pytest.mark.parametrize("text", [FLAT, WHOLE, SHAPELESS])
def test_an_input_for_a_table_without_one_is_used(text: str) -> None:
    assert read_text(text, batch=4).described.input == ()
    assert read_text(text, batch=4, sample=(32, 256)).described.input == (4, 32, 256)


def test_an_input_that_is_not_the_tables() -> None:
    assert read_text(WHOLE, sample=(32, 256)).remarks == ()
    (remark,) = read_text(WHOLE, sample=(64, 256)).remarks
    assert "--input 64x256 differs from the input of the table, which has 0.26 MB" in remark
    assert read_text(COLUMNS, sample=(3, 32, 32)) == read_text(COLUMNS)
    (remark,) = read_text(COLUMNS, sample=(3, 64, 64)).remarks
    assert "an input of 3x32x32, which is used; --input 3x64x64 is ignored" in remark
    assert read_text(COLUMNS, sample=(3, 64, 64)).described == read_text(COLUMNS).described


def test_frozen_weights_are_a_remark() -> None:
    read = read_text(CUT)
    assert read.frozen == 789_760
    said = completed(read, TrainingOptions(optimizer="adam")).remarks
    assert said == (
        "789,760 parameters are frozen and are counted as trained: about 9 MiB of gradients and optimizer state are "
        "too much",
    )
    assert "about 2 MiB" in completed(read, TrainingOptions(optimizer="sgd", precision="bf16")).remarks[0]
    assert completed(read_text(WHOLE), TrainingOptions(optimizer="sgd")).remarks == ()


def test_beside_adapters_all_is_frozen() -> None:
    base = "(base_layer): Linear(in_features=64, out_features=64, bias=False)"
    lora = "(lora_A): ModuleDict(\n      (default): Linear(in_features=64, out_features=4, bias=False)\n    )"
    read = read_text(f"Net(\n  (q): Linear(\n    {base}\n    {lora}\n  )\n)")
    assert (read.frozen, read.described.parameters) == (4096, 4352)
    assert read_text(f"Net(\n  {base}\n)").frozen == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FLAT.replace("[-1, 16, 8, 8]               0\n            Conv2d-3", "[-1, 16, -8, 8]              0\n"
                      "            Conv2d-3"), "line 6 .* a size is negative"),
        (FLAT.replace("[-1, 10]", "[-2, 10]"), "line 12 .* a size is negative"),
        (NESTED.replace("[8, 16, 16, 16] ", "[8, 16, -1, 16] "), "line 6 .* a size is negative"),
        (COLUMNS.replace("[8, 16]   ", "[8, -16]  "), "line 9 .* a size is negative"),
    ],
)  # fmt: skip
def test_a_size_that_is_negative(text: str, told: str) -> None:
    with pytest.raises(Usage, match=told):
        read_text(text)


def test_a_batch_that_no_memory_holds() -> None:
    with pytest.raises(Usage, match="1,000,000,000,000"):
        read_text(FLAT, batch=10**12)


def test_several_models_in_one_text() -> None:
    net = "Net(\n  (fc): Linear(in_features=4, out_features=%d, bias=True)\n)\n"
    read = read_text("Namespace(lr=0.1)\n" + net % 3 + net % 5)
    assert read.described.parameters == 15
    assert any("has 2 printed models: only the first, from line 2 on," in remark for remark in read.remarks)
    tables = read_text(NESTED + WHOLE)
    assert tables.described == read_text(NESTED).described
    assert any("has 2 tables: only the first, from line 3 on," in remark for remark in tables.remarks)
    assert read_text(net % 3 + "Namespace(lr=0.1)\nAdam (\nParameter Group 0\n)").remarks == ()
