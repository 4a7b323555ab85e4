"""Sizes and durations as people write them, and as they are shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from carma.core.model.units import parse_duration_s, parse_mib, show_mib, show_pair_mib, show_s


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("12GiB", 12_288),
        ("12G", 12_288),
        ("12gb", 12_288),
        ("512M", 512),
        ("4000", 4_000),
        ("1.5 GiB", 1_536),
        ("1T", 1_048_576),
        ("1500k", 2),
        ("1K", 1),
        (" 7 ", 7),
    ],
)
def test_sizes_are_read_as_slurm_reads_them(text: str, mib: int) -> None:
    assert parse_mib(text) == mib


@pytest.mark.parametrize(
    "text", ["", "0", "-1G", "12X", "GiB", "12 G i B", "nan", "1e3", "12G;ls", "9" * 40, "12B", "12ib"]
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_mib(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("00:10:00", 600),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-00:00:01", 86_401),
        ("90s", 90),
        ("1.5h", 5_400),
        ("2D", 172_800),
        ("15m", 900),
    ],
)
def test_durations_are_read_as_slurm_reads_them(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "00:00", "-5", "5x", "1:2:3:4", "1-", "h", "9999999999", "10:30s"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("mib", "shown"), [(None, "-"), (640, "640 MiB"), (1_024, "1.0 GiB"), (12_698, "12.4 GiB"), (0, "0 MiB")]
)
def test_sizes_are_shown_in_the_unit_that_reads_best(mib: int | None, shown: str) -> None:
    assert show_mib(mib) == shown


def test_two_figures_that_differ_never_look_the_same() -> None:
    assert show_pair_mib(12_698, 9_318) == ("12.4 GiB", "9.1 GiB")
    assert show_pair_mib(40_960, 40_957) == ("40,960 MiB", "40,957 MiB")
    assert show_pair_mib(2_048, 2_048) == ("2.0 GiB", "2.0 GiB")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (-3.0, "0 s"),
        (4.4, "4 s"),
        (59.6, "01:00"),
        (184, "03:04"),
        (7_384, "02:03:04"),
        (93_784, "1d 02:03:04"),
    ],
)
def test_spans_are_shown_as_a_clock_shows_them(seconds: float | None, shown: str) -> None:
    assert show_s(seconds) == shown


@pytest.mark.parametrize(
    ("read", "text"), [(parse_mib, "５０"), (parse_duration_s, "３０"), (parse_duration_s, "３０s")]
)
def test_digits_are_those_of_a_keyboard(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(text)
