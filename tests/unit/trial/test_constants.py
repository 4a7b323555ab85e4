"""A card's files: which are found for a card and a version, what they say, and what is not said without a warning."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from carma.paths import find_paths
from carma.trial.replay.card_constants import (
    SHIPPED,
    SYSTEM,
    CardConstants,
    ChosenConstants,
    ContextReading,
    Row,
    file_name,
    folders,
    load,
    own_folder,
    read_rows,
    rows_file,
    save,
)
from carma.trial.replay.conv_workspaces import convolutions_of, shipped_convolutions
from carma.trial.report import Call

MIB = 1 << 20


def reading(after: str, mib: float, alone: bool = False) -> ContextReading:
    return ContextReading(after=after, alone=alone, outside_bytes=round(mib * MIB))


CHAIN = (reading("init", 500), reading("matmul", 560), reading("conv", 700), reading("attention", 700))
H200 = CardConstants(gpu="NVIDIA H200", torch="2.11.0+cu128", driver="580", contexts=CHAIN)


def put(folder: Path, gpu: str, torch: str) -> CardConstants:
    constants = msgspec.structs.replace(H200, gpu=gpu, torch=torch)
    save(constants, [{"op": "convolution", "gpu": gpu}], folder / file_name(constants))
    return constants


def found(gpu: str, torch: str, *places: Path) -> ChosenConstants:
    answer = load(gpu, torch, places)
    assert answer is not None
    return answer


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    rows: list[Row] = [{"op": "convolution", "n": 4, "size": [2, 2], "tf32": False}, {"op": "operator", "error": "é"}]
    constants = msgspec.structs.replace(H200, rows=2, kept_once={"mm_fp32_forward": 33})
    save(constants, rows, tmp_path / "deep" / file_name(constants))
    answer = found("NVIDIA H200", "2.11.0+cu128", tmp_path / "none", tmp_path / "deep")
    assert answer.constants == constants
    assert answer.file.name == "nvidia-h200_torch-2.11.json"
    assert list(read_rows(rows_file(answer.file))) == rows
    assert answer.warnings == ()
    assert sorted(file.name for file in answer.file.parent.iterdir()) == [
        "nvidia-h200_torch-2.11.json",
        "nvidia-h200_torch-2.11.rows.jsonl.gz",
    ]


def test_constants_without_a_table_are_used_with_the_shipped_convolutions(tmp_path: Path) -> None:
    put(tmp_path, "NVIDIA H200", "2.11.0")
    answer = found("NVIDIA H200", "2.11.0", tmp_path)
    rows_file(answer.file).unlink()
    workspaces = convolutions_of(answer.file)
    call = Call(
        op="conv", dtype="float32", sizes=((1, 8, 9, 9), (8, 8, 3, 3), (1, 8, 7, 7)), numbers=(1, 1, 0, 0, 1, 1, 1)
    )
    assert workspaces(call) == shipped_convolutions()(call)


def test_this_machines_own_go_before_what_is_shipped(tmp_path: Path) -> None:
    for name in ("own", "shipped"):
        put(tmp_path / name, "NVIDIA H200", "2.11.0")
    assert found("NVIDIA H200", "2.11.0", tmp_path / "own", tmp_path / "shipped").file.parent.name == "own"
    assert found("NVIDIA H200", "2.11.0", tmp_path / "shipped", tmp_path / "own").file.parent.name == "shipped"


def test_the_right_card_goes_before_the_nearer_folder(tmp_path: Path) -> None:
    put(tmp_path / "own", "NVIDIA A30", "2.11.0")
    put(tmp_path / "shipped", "NVIDIA H200", "2.5.0")
    answer = found("NVIDIA H200", "2.11.0", tmp_path / "own", tmp_path / "shipped")
    assert answer.constants.gpu == "NVIDIA H200"
    assert ["torch 2.5.0" in warning for warning in answer.warnings] == [True]


def test_the_nearest_version_of_torch(tmp_path: Path) -> None:
    for torch in ("2.6.0", "2.10.1", "2.13.0"):
        put(tmp_path, "NVIDIA H200", torch)
    assert found("NVIDIA H200", "2.11.0", tmp_path).constants.torch == "2.10.1"
    assert found("NVIDIA H200", "2.10.1", tmp_path).warnings == ()
    assert found("NVIDIA H200", "", tmp_path).warnings == ()


@pytest.mark.parametrize(
    ("torch", "warned"),
    [("2.11.0", False), ("2.15.1", False), ("2.16.0", True), ("2.7.0", False), ("2.6.0", True), ("3.11.0", True)],
)
def test_only_a_distant_version_of_torch_is_a_warning(tmp_path: Path, torch: str, warned: bool) -> None:
    put(tmp_path, "NVIDIA H200", "2.11.0")
    warnings = found("NVIDIA H200", torch, tmp_path).warnings
    assert [f"the script has {torch}" in warning for warning in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("wanted", "taken", "warned"),
    [
        ("NVIDIA H200", "NVIDIA H200", False),
        ("NVIDIA H200 NVL", "NVIDIA H200", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A30", True),
        ("NVIDIA GeForce RTX 5090", "NVIDIA H200", True),
        ("Tesla T4", "NVIDIA A30", True),
        ("Something Else", "NVIDIA A30", True),
    ],
)
def test_a_card_without_measurements_gets_the_constants_of_the_nearest_card(
    tmp_path: Path, wanted: str, taken: str, warned: bool
) -> None:
    for gpu in ("NVIDIA A30", "NVIDIA H200"):
        put(tmp_path, gpu, "2.11.0")
    answer = found(wanted, "2.11.0", tmp_path)
    assert answer.constants.gpu == taken
    assert [f"measured on {taken}, not on {wanted}" in warning for warning in answer.warnings] == [True] * warned


def test_files_that_cannot_be_used_are_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{not json")
    (tmp_path / "b.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(H200, format=99)))
    (tmp_path / "c.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(H200, contexts=())))
    (tmp_path / "d.json").mkdir()
    assert load("NVIDIA H200", "2.11.0", [tmp_path, tmp_path / "none"]) is None
    put(tmp_path, "NVIDIA H200", "2.11.0")
    assert load("NVIDIA H200", "2.11.0", [tmp_path]) is not None


# What they say


@pytest.mark.parametrize(
    ("used", "mib"),
    [
        ((), 500),
        (("matmul",), 560),
        (("matmul", "conv"), 700),
        (("conv", "matmul", "conv", "init"), 700),
        (("conv",), 640),  # by the chain alone
        (("attention",), 500),
        (("unheard of",), 500),
    ],
)
def test_the_context_of_what_was_used(used: tuple[str, ...], mib: int) -> None:
    assert H200.context_mib(used) == mib


def test_one_library_never_takes_less_than_it_took_alone() -> None:
    known = msgspec.structs.replace(
        H200, contexts=(*CHAIN, reading("conv", 672.5, alone=True), reading("attention", 510, alone=True))
    )
    assert known.context_mib(["conv"]) == 673
    assert known.context_mib(["conv", "attention"]) == 673
    assert known.context_mib(["attention"]) == 510
    assert known.context_mib(["matmul", "conv"]) == 700


def test_a_reading_that_went_down_takes_nothing_off() -> None:
    known = msgspec.structs.replace(H200, contexts=(reading("init", 500), reading("a", 480), reading("b", 520)))
    assert known.context_mib(["a"]) == 500
    assert known.context_mib(["a", "b"]) == 540


def test_the_workspace_of_matrix_products() -> None:
    kept = {"mm_fp32_forward": 10, "linear_bf16_forward": 33, "bmm_fp16_backward": 40, "rnn_fp32_forward": 99}
    known = msgspec.structs.replace(H200, kept_once=kept)
    assert known.blas_workspace_bytes() == 33
    assert H200.blas_workspace_bytes() is None


# Where they lie


def test_folders_of_a_user_a_server_and_a_home_of_ones_own() -> None:
    home = Path("/home/alice")
    user = {"HOME": str(home)}
    assert own_folder(find_paths(user, uid=1000)) == home / ".local" / "share" / "carma" / "cards"
    assert own_folder(find_paths(user, uid=0)) == SYSTEM
    assert folders({"CARMA_HOME": str(home)}) == (home / "cards", SYSTEM, SHIPPED)
