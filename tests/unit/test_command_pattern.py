"""Which words of a command are numbers, and what they belong to."""

from __future__ import annotations

import pytest

from carma.command_pattern import numbers, pattern


@pytest.mark.parametrize(
    ("command", "blank"),
    [
        (("python", "train.py", "--batch-size", "64"), ("python", "train.py", "--batch-size", "#")),
        (("python", "train.py", "--batch-size=64"), ("python", "train.py", "--batch-size=#")),
        (("python", "-m", "x", "trainer.batch=64", "lr=1e-4"), ("python", "-m", "x", "trainer.batch=#", "lr=#")),
        (("x", "-5", "+.5", "3.", "1.5e+3"), ("x", "#", "#", "#", "#")),
        # Names with digits in them are names.
        (("python3", "resnet50.py", "--model", "vit_b_16", "config2.yaml", "12GiB", "0x10", "1,2", "nan", ""),) * 2,
        (("a=b=3", "=3", "3="), ("a=b=#", "=#", "3=")),
        (("line\nwith=7",), ("line\nwith=#",)),
    ],
)
def test_only_numbers_are_taken_out(command: tuple[str, ...], blank: tuple[str, ...]) -> None:
    assert pattern(command) == blank


def test_a_number_has_the_name_of_its_option() -> None:
    found = numbers(("train", "8", "--batch-size", "64", "--lr=1e-3", "7", "9"))
    assert [(one.place, one.value, one.name) for one in found] == [
        (1, 8.0, ""),
        (3, 64.0, "--batch-size"),
        (4, 0.001, "--lr"),
        (5, 7.0, ""),
        (6, 9.0, ""),
    ]


def test_a_negative_number_is_no_option() -> None:
    assert [one.name for one in numbers(("--a", "-1", "2"))] == ["--a", ""]
