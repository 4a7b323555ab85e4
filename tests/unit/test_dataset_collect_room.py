"""The collector's pure parts: who may use the card's memory next, and the file that rows are kept in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carma.dataset.inside import room, rows


def asking(need_mib: int, passed: int = 0) -> Any:
    return SimpleNamespace(need_mib=need_mib, passed=passed)


def test_those_that_fit_start_in_their_order() -> None:
    first, second, third = asking(40), asking(50), asking(20)
    assert room.admit([first, second, third], 0, 100) == [first, second]


def test_one_that_does_not_fit_lets_smaller_ones_pass_and_counts_them() -> None:
    large, small, tiny = asking(90), asking(30), asking(10)
    assert room.admit([large, small, tiny], 50, 100) == [small, tiny]
    assert large.passed == 2


def test_nobody_passes_one_that_was_passed_often() -> None:
    large, small = asking(90, passed=room.PASSES), asking(30)
    assert room.admit([large, small], 50, 100) == []
    assert room.admit([large, small], 0, 100) == [large]


def test_an_empty_card_takes_what_is_larger_than_it() -> None:
    huge, small = asking(500), asking(1)
    assert room.admit([huge, small], 0, 100) == [huge]


@given(st.lists(st.integers(1, 150), min_size=1, max_size=40), st.integers(1, 100))
def test_all_run_in_the_end_and_never_more_than_fits(needs: list[int], capacity: int) -> None:
    waiting = [asking(need) for need in needs]
    running: list[Any] = []
    while waiting or running:
        started = room.admit(waiting, sum(child.need_mib for child in running), capacity)
        running += started
        waiting = [child for child in waiting if child not in started]
        assert sum(child.need_mib for child in running) <= capacity or len(running) == 1
        assert running, "nothing runs, and some wait"
        running.pop(0)


def test_a_group_has_the_first_and_all_that_fit_beside_it() -> None:
    assert room.choose_group([60, 50, 30, 20, 5], most=24, capacity_mib=100) == [0, 2, 4]
    assert room.choose_group([60, 10, 10, 10], most=2, capacity_mib=100) == [0, 1]
    assert room.choose_group([600, 10], most=2, capacity_mib=100) == [0]
    assert room.choose_group([], most=2, capacity_mib=100) == []


def config(family: str = "cnn", guess_mib: int = 10_000) -> dict[str, Any]:
    return {"family": family, "guess_mib": guess_mib}


def test_room_is_the_guess_with_a_margin_until_runs_have_shown_another() -> None:
    margins = room.Margins()
    assert margins.needed_mib(config()) == 13_000 + room.SLACK_MIB
    for _ in range(room.LEARN_FROM):
        margins.learn(config(), 8_000 + room.SLACK_MIB)
    assert margins.needed_mib(config()) == 8_400 + room.SLACK_MIB
    assert margins.needed_mib(config("mlp")) == 13_000 + room.SLACK_MIB


@pytest.mark.parametrize(("footprint", "margin"), [(100, room.LEAST), (90_000, room.MOST)])
def test_what_is_learned_has_limits(footprint: int, margin: float) -> None:
    margins = room.Margins()
    for _ in range(room.LEARN_FROM):
        margins.learn(config(), footprint)
    assert margins.margin("cnn") == margin


def test_room_follows_the_runs_that_need_most() -> None:
    margins = room.Margins()
    for number in range(100):
        margins.learn(config(), 15_000 + room.SLACK_MIB if number % 10 == 0 else 5_000 + room.SLACK_MIB)
    assert margins.margin("cnn") == pytest.approx(1.5 * 1.05)


def test_small_runs_teach_nothing() -> None:
    margins = room.Margins()
    for _ in range(100):
        margins.learn(config(guess_mib=room.LARGE_MIB - 1), 50_000)
    assert margins.margin("cnn") == room.MARGIN


def test_rows_are_found_again_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    kept = rows.Rows(tmp_path, resume=True, activity=False)
    kept.write({"gpu": "x"})
    kept.write({"id": "a", "error": None, "oom": False})
    kept.write({"id": "b", "error": "broken", "oom": False})
    kept.write({"id": "c", "error": None, "oom": True})
    kept.file.close()
    assert (kept.measured, kept.failed, kept.oom, kept.written) == (1, 1, 1, 3)
    with kept.path.open("a") as file:
        file.write('{"id":"d","err')
    again = rows.Rows(tmp_path, resume=True, activity=False)
    again.write({"id": "e"})
    again.file.close()
    assert again.done == {"a", "b", "c"}
    assert [json.loads(line).get("id") for line in kept.path.read_text().splitlines()] == [None, "a", "b", "c", "e"]


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"gp')
    rows.Rows(tmp_path, resume=True, activity=False).file.close()
    assert (tmp_path / rows.NAME).read_text() == ""


def test_rows_without_activity_do_not_count_where_it_is_wanted(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"id":"a"}\n{"id":"b","step_ms":3.5}\n{"id":"c","step_ms":null,"error":"x"}\n')
    assert rows.read_done(tmp_path / rows.NAME, activity=True) == {"b", "c"}
    assert rows.read_done(tmp_path / rows.NAME, activity=False) == {"a", "b", "c"}


def test_beginning_anew_keeps_the_old_rows_aside(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"id":"a"}\n')
    kept = rows.Rows(tmp_path, resume=False, activity=False)
    kept.file.close()
    assert kept.done == set()
    assert (tmp_path / "rows.jsonl.old").read_text() == '{"id":"a"}\n'
