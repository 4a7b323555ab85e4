"""Task files: what each says, and what is said about a bad one. Names of tests are the sentences they prove."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carma.cli import rad_file as rad
from carma.cli import sweep
from carma.cli import task_file as taskfile
from carma.errors import BadTaskFile, NotRunnable, Usage

RAD = [
    "# resnet50 on CIFAR-100",
    "",
    "python train.py --name 'two words' --glob *.txt",
    "summary.txt",
    "/data/cifar",
    "128",
    "not exclusive",
    "2",
    "3934",
    "8000",
    "9000.5",
    "16000",
]


def written(tmp_path: Path, lines: list[str], name: str = "task.rad") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_rad_file_is_read_by_line_position(tmp_path: Path) -> None:
    task = rad.read_rad(written(tmp_path, RAD))
    assert task.command == ("python", "train.py", "--name", "two words", "--glob", "*.txt")
    assert (task.gpus, task.exclusive, task.memory_mib, task.environment_name) == (2, False, 3934, None)


def test_the_command_of_a_rad_file_need_not_say_python(tmp_path: Path) -> None:
    lines = [*RAD[:2], "./train --lr 1", "python_summary.txt", *RAD[4:]]
    assert rad.read_rad(written(tmp_path, lines)).command == ("./train", "--lr", "1")


def test_the_exclusive_line_counts(tmp_path: Path) -> None:
    assert rad.read_rad(written(tmp_path, [*RAD[:6], "Exclusive", *RAD[7:]])).exclusive


def test_a_rad_file_that_ends_after_the_number_of_gpus_has_no_memory_figure(tmp_path: Path) -> None:
    assert rad.read_rad(written(tmp_path, RAD[:8])).memory_mib is None


def test_the_named_conda_environment_is_used_or_missed_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = rad.read_rad(written(tmp_path, [RAD[0], "conda activate tf-2.1", *RAD[2:]]))
    assert task.environment_name == "tf-2.1"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRunnable, match="conda is not on PATH"):
        rad.in_environment(task)
    conda = tmp_path / "conda"
    conda.write_text("#!/bin/sh\n")
    conda.chmod(0o755)
    assert rad.in_environment(task)[:5] == ("conda", "run", "--no-capture-output", "-n", "tf-2.1")


@pytest.mark.parametrize("kept", [1, 2, 3, 7])
def test_a_short_rad_file_names_the_first_line_that_is_missing(tmp_path: Path, kept: int) -> None:
    with pytest.raises(BadTaskFile, match=rf"too short: line {kept} \({rad.LINES[kept]}"):
        rad.read_rad(written(tmp_path, RAD[:kept]))


@pytest.mark.parametrize(("place", "text"), [(7, "two"), (7, "0"), (7, ""), (8, "much"), (8, "nan"), (11, "-1")])
def test_a_line_that_is_not_a_number_is_named(tmp_path: Path, place: int, text: str) -> None:
    with pytest.raises(BadTaskFile, match=f"line {place} "):
        rad.read_rad(written(tmp_path, [*RAD[:place], text, *RAD[place + 1 :]]))


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "empty"), (b" \n\n", "empty"), (b"a\0b\n" * 12, "binary"), (b"\xff\xfe" * 99, "binary")]
)
def test_an_empty_or_binary_rad_file_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "task.rad"
    path.write_bytes(data)
    with pytest.raises(BadTaskFile, match=said):
        rad.read_rad(path)


@pytest.mark.parametrize(("place", "text"), [(1, "source something else"), (2, ""), (2, "python 'open quote")])
def test_lines_of_text_that_cannot_be_used_are_named(tmp_path: Path, place: int, text: str) -> None:
    with pytest.raises(BadTaskFile, match=f"line {place} "):
        rad.read_rad(written(tmp_path, [*RAD[:place], text, *RAD[place + 1 :]]))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_rad_task_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.rad"
    path.write_bytes(data)
    try:
        task = rad.read_rad(path)
    except BadTaskFile:
        return
    assert task.command
    assert task.gpus >= 1


def test_directives_stop_at_the_first_command_of_a_script(tmp_path: Path) -> None:
    lines = ["#!/bin/bash", "#CARMA --gpus 2 # two", "# plain", "", "#SBATCH -J 'a b'", "true", "#CARMA --gpus 9"]
    found = taskfile.read_directives(written(tmp_path, lines, "run.sh"))
    assert [(each.line, each.dialect, each.words) for each in found] == [
        (2, "CARMA", ("--gpus", "2")),
        (5, "SBATCH", ("-J", "a b")),
    ]


def test_a_script_runs_by_its_first_line_or_with_sh(tmp_path: Path) -> None:
    with_line = written(tmp_path, ["#!/usr/bin/env -S python -u", "pass"], "a.py")
    without = written(tmp_path, ["#CARMA --gpus 1", "true"], "b")
    assert taskfile.script_command(with_line, ("x y",)) == ("/usr/bin/env", "-S python -u", str(with_line), "x y")
    assert taskfile.script_command(without, ()) == ("/bin/sh", str(without))


def test_a_python_file_without_its_first_line_is_not_given_to_sh(tmp_path: Path) -> None:
    with pytest.raises(BadTaskFile) as caught:
        taskfile.script_command(written(tmp_path, ["#CARMA --gpus 1", "print()"], "train.py"), ())
    assert "python" in caught.value.hint


def test_a_program_is_not_taken_for_a_script(tmp_path: Path) -> None:
    binary = tmp_path / "program"
    binary.write_bytes(b"\x7fELF\0\0\0")
    assert not taskfile.is_script(binary)
    assert not taskfile.is_script(tmp_path / "absent.sh")
    assert taskfile.is_script(written(tmp_path, ["#!/bin/sh"], "x"))


FLAGS = ["gpus", "gpu-mem", "time", "requeue", "no-requeue", "exclusive", "array", "param", "name"]


def test_a_task_file_spells_flags(tmp_path: Path) -> None:
    lines = [
        'command = ["python", "train.py", "a b"]',
        "gpus = 2",
        'gpu_mem = "12GiB"',
        "exclusive = true",
        "requeue = false",
        "array = [1, 3]",
        "param = {lr = [0.1, 0.01]}",
        "[environment]",
        "SEED = 7",
    ]
    read = taskfile.read_task_file(written(tmp_path, lines, "t.toml"), FLAGS)
    assert read.command == ("python", "train.py", "a b")
    assert read.environment == {"SEED": "7"}
    assert read.words == (
        "--gpus=2",
        "--gpu-mem=12GiB",
        "--exclusive",
        "--no-requeue",
        "--array=1,3",
        "--param=lr=0.1,0.01",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu_memm = 1", "did you mean 'gpu-mem'"),
        ("command = 3", ": command "),
        ("command = []", ": command "),
        ('command = "python \'x"', "quot"),
        ("= 1", "is not TOML"),
        ("time = {a = 1}", "'time'"),
        ("environment = 1", ": environment "),
    ],
)
def test_a_bad_task_file_is_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadTaskFile, match=said):
        taskfile.read_task_file(written(tmp_path, [text], "t.toml"), FLAGS)


def test_params_make_every_combination() -> None:
    params = sweep.read_params(["lr=0.1,0.01", "seed=1,2"])
    made = [command for command, _ in sweep.combinations(("train", "--lr={lr}", "{seed}", "{other}", "{i}"), params)]
    assert made == [
        ("train", "--lr=0.1", "1", "{other}", "0"),
        ("train", "--lr=0.1", "2", "{other}", "1"),
        ("train", "--lr=0.01", "1", "{other}", "2"),
        ("train", "--lr=0.01", "2", "{other}", "3"),
    ]


def test_a_param_that_the_command_does_not_use_is_a_mistake() -> None:
    with pytest.raises(Usage, match=r"no \{lr\}"):
        list(sweep.combinations(("train",), sweep.read_params(["lr=1,2"])))


@pytest.mark.parametrize("texts", [["lr"], ["=1"], ["lr="], ["l r=1"], ["lr=1", "lr=2"]])
def test_params_that_are_not_understood(texts: list[str]) -> None:
    with pytest.raises(Usage, match="--param"):
        sweep.read_params(texts)


def test_commands_from_standard_input_are_words() -> None:
    assert sweep.read_commands(["python a.py 'x y' $HOME; rm *", "", "# remark", "b"]) == {
        1: ("python", "a.py", "x y", "$HOME;", "rm", "*"),
        4: ("b",),
    }
    with pytest.raises(Usage, match="line 2"):
        sweep.read_commands(["a", "b 'c"])
    with pytest.raises(Usage, match="no command"):
        sweep.read_commands(["", "#"])
