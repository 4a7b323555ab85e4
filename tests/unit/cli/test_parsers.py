"""The small languages of the flags."""

from __future__ import annotations

import contextlib
import datetime
import signal
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carma.cli import parsers as parse
from carma.core.model.values import Dependency, TaskId, WarnSignal


@pytest.mark.parametrize(("text", "gpus"), [("gpu:2", 2), ("gpu", 1), ("gpu:a100:4", 4), ("gpu:h200", 1)])
def test_gres(text: str, gpus: int) -> None:
    assert parse.parse_gres(text) == gpus


@pytest.mark.parametrize("text", ["cpu:2", "gpu:0", "gpu:-1", "", "gpu:1:2:3"])
def test_gres_that_is_not_gpus(text: str) -> None:
    with pytest.raises(ValueError, match="gpu:2"):
        parse.parse_gres(text)


def test_dependencies_as_slurm_writes_them() -> None:
    wanted = (Dependency(TaskId(12), "ok"), Dependency(TaskId(13), "ok"), Dependency(TaskId(4), "any"))
    assert parse.parse_dependencies("afterok:12:13,afterany:4") == wanted
    assert parse.parse_dependencies("7") == (Dependency(TaskId(7), "ok"),)
    assert parse.parse_dependencies("afternotok:7") == (Dependency(TaskId(7), "notok"),)


@pytest.mark.parametrize("text", ["after:12", "afterok", "afterok:", "afterok:x", "singleton", "", ":12x"])
def test_dependencies_that_are_not_understood(text: str) -> None:
    with pytest.raises(ValueError, match="afterok:12"):
        parse.parse_dependencies(text)


@pytest.mark.parametrize(
    ("text", "indices", "at_once"),
    [
        ("0-3", (0, 1, 2, 3), None),
        ("0-9%3", tuple(range(10)), 3),
        ("1,3,5", (1, 3, 5), None),
        ("0-10:5", (0, 5, 10), None),
        ("2,1-3", (2, 1, 3), None),
    ],
)
def test_arrays(text: str, indices: tuple[int, ...], at_once: int | None) -> None:
    assert parse.parse_array(text) == (indices, at_once)


@pytest.mark.parametrize("text", ["", "3-1", "a", "0-9%0", "0-9%", "0-9:0", "-1", "0-999999999"])
def test_arrays_that_are_not(text: str) -> None:
    with pytest.raises(ValueError):
        parse.parse_array(text)


def test_signals() -> None:
    assert parse.parse_signal("TERM") == parse.parse_signal("sigterm") == parse.parse_signal("15") == signal.SIGTERM
    assert parse.parse_warning("USR1@60") == WarnSignal(signal.SIGUSR1, 60.0)
    assert parse.parse_warning("B:USR2@5") == WarnSignal(signal.SIGUSR2, 5.0)
    assert parse.parse_warning("INT") == WarnSignal(signal.SIGINT, 60.0)
    for wrong in ("NOPE", "999", "USR1@x", ""):
        with pytest.raises(ValueError):
            parse.parse_warning(wrong)


def test_begin() -> None:
    noon = datetime.datetime(2026, 1, 31, 12, 0).timestamp()
    hour = 3600.0
    assert parse.parse_begin("now+1hour", noon) == noon + hour
    assert parse.parse_begin("+30m", noon) == noon + hour / 2
    assert parse.parse_begin("now+90", noon) == noon + 90
    assert parse.parse_begin("13:30", noon) == noon + 1.5 * hour
    assert parse.parse_begin("9:00", noon) == noon + 21 * hour  # tomorrow's
    assert parse.parse_begin("2026-01-31T16:30", noon) == noon + 4.5 * hour
    assert parse.parse_begin("tomorrow", noon) == noon + 12 * hour
    for wrong in ("25:00", "soon", "2026-13-01", ""):
        with pytest.raises(ValueError, match="is not a time"):
            parse.parse_begin(wrong, noon)


def test_since() -> None:
    assert parse.parse_past("2h", 10_000.0) == 2_800.0
    assert parse.parse_past("2026-01-31") == datetime.datetime(2026, 1, 31).timestamp()
    noon = datetime.datetime(2026, 1, 31, 12).timestamp()
    assert parse.parse_past("today", noon) == noon - 12 * 3600
    assert parse.parse_past("9999-01-01") > noon  # its form is right; the clock that decides is not asked yet
    for wrong in ("later", "9999-01-01", "2026-01-31T12:01", "２h"):
        with pytest.raises(ValueError, match="is not a time in the past"):
            parse.parse_past(wrong, noon)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse.parse_gpus, "２"),
        (parse.parse_gres, "gpu:２"),
        (parse.parse_dependencies, "１２"),
        (parse.parse_array, "０-３"),
        (parse.parse_array, "0-3%２"),
        (parse.parse_signal, "１５"),
        (parse.parse_warning, "USR1@６０"),
        (parse.parse_begin, "+３０m"),
        (parse.parse_factor, "６０"),
    ],
)
def test_only_ascii_digits_are_numbers(read: Callable[[str], object], text: str) -> None:
    read(unicodedata.normalize("NFKC", text))
    with pytest.raises(ValueError, match=text[-1]):
        read(text)


def test_export() -> None:
    own = {"PATH": "/bin", "HOME": "/h", "A": "1", "SECRET": "s"}
    assert parse.parse_export("ALL", own) == own
    assert parse.parse_export("NONE", own) == {"PATH": "/bin", "HOME": "/h"}
    assert parse.parse_export("ALL,B=2", own) == {**own, "B": "2"}
    assert parse.parse_export("A,B=x=y", own) == {"PATH": "/bin", "HOME": "/h", "A": "1", "B": "x=y"}
    with pytest.raises(ValueError, match="is not a variable"):
        parse.parse_export("ALL,1X=2", own)


READERS = (
    *(parse.parse_gres, parse.parse_gpus, parse.parse_dependencies, parse.parse_array, parse.parse_signal),
    *(parse.parse_warning, parse.parse_begin, parse.parse_past, parse.parse_grace),
)


@settings(deadline=None)
@given(st.text(alphabet="0123456789:-+%@,.TZaghmnoruw²٣ \0", max_size=20))
def test_whatever_is_typed_the_answer_is_a_value_or_a_value_error(text: str) -> None:
    for read in READERS:
        with contextlib.suppress(ValueError):
            read(text)
