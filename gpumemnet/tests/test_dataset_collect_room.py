"""The collector's pure parts: who may use the card's memory next, and the file that rows are kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.dataset.inside import memory_reservation as room
from gpumemnet.dataset.inside import rows

CAPACITY_MIB = 100_000


class Run:
    """One that waits for room, or has it."""

    def __init__(self, need_mib: float, lane: str = "light", held_mib: float = 0.0, passed: int = 0) -> None:
        self.need_mib, self.lane, self.held_mib, self.passed = need_mib, lane, held_mib, passed


def test_those_that_fit_start_in_their_order() -> None:
    first, second, third = Run(40), Run(50), Run(20)
    assert room.admit([first, second, third], 100) == [first, second]


def test_one_that_does_not_fit_lets_smaller_ones_pass_and_counts_them() -> None:
    large, small, tiny = Run(90), Run(30), Run(10)
    assert room.admit([large, small, tiny], 50) == [small, tiny]
    assert (large.passed, small.passed) == (2, 0)


def test_nobody_passes_one_that_was_passed_often() -> None:
    large, small = Run(90, passed=room.PASSES), Run(30)
    assert room.admit([large, small], 50) == []
    assert room.admit([large, small], 125) == [large, small]


def test_what_is_held_already_needs_no_room() -> None:
    holder = Run(90, held_mib=60)
    assert room.admit([holder], 29) == []
    assert room.admit([holder], 30) == [holder]


class Card:
    """A card and those that are on it: begins, admits and ends runs as the collector does."""

    def __init__(self, guesses_mib: list[int], capacity_mib: float, margins: room.Margins, bench: int = 6) -> None:
        self.lanes = room.Lanes([config(guess_mib=guess) for guess in guesses_mib], capacity_mib)
        self.margins, self.bench = margins, bench
        self.waiting: list[Run] = []
        self.running: list[Run] = []
        self.alone = self.ended = 0

    def begun(self) -> dict[str, int]:
        return {lane: sum(run.lane == lane for run in self.waiting) for lane in room.LANES}

    def done(self, lane: str) -> float:
        return self.lanes.done(lane, self.begun())

    def look(self) -> None:
        while len(self.lanes) and len(self.waiting) < self.bench:
            lane, taken = self.lanes.take(self.begun())
            need_mib = self.margins.needed_mib(taken)
            if need_mib > self.lanes.capacity_mib * room.ALONE_SHARE:
                self.alone += 1
            else:
                self.waiting.append(Run(need_mib, lane))
        used = sum(run.need_mib for run in self.running)
        admitted = self.lanes.admit(self.waiting, used, self.begun())
        self.running += admitted
        self.waiting = [run for run in self.waiting if run not in admitted]

    def end(self, place: int) -> Run:
        self.ended += 1
        return self.running.pop(place % len(self.running))


def test_light_and_heavy_are_told_apart_by_what_they_need() -> None:
    lanes = room.Lanes([config(guess_mib=guess) for guess in (0, 9_000, 9_200, 50_000)], CAPACITY_MIB)
    assert [each["guess_mib"] for each in lanes.waiting["light"]] == [0, 9_000]
    assert [each["guess_mib"] for each in lanes.waiting["heavy"]] == [9_200, 50_000]
    assert len(lanes) == 4


def test_the_lane_with_fewer_that_have_begun_is_next() -> None:
    lanes = room.Lanes([config(guess_mib=guess) for guess in (1, 2, 3, 30_000)], CAPACITY_MIB)
    assert lanes.take({"light": 0, "heavy": 1})[1]["guess_mib"] == 1
    assert lanes.take({"light": 1, "heavy": 0}) == ("heavy", config(guess_mib=30_000))
    assert lanes.take({"light": 5, "heavy": 0})[1]["guess_mib"] == 2  # there is no heavy one any more


def two_lanes() -> room.Lanes:
    return room.Lanes([config(guess_mib=guess) for guess in [1000] * 200 + [50_000] * 200], CAPACITY_MIB)


def test_a_heavy_run_without_room_does_not_hold_up_the_light_ones() -> None:
    heavy, light = Run(55_000, "heavy", passed=room.PASSES), Run(2_000, "light")
    assert two_lanes().admit([heavy, light], 50_000, {"light": 1, "heavy": 1}) == [light]


def test_the_lane_that_is_behind_chooses_first_and_the_other_takes_what_is_left() -> None:
    heavies, lights = [Run(60_000, "heavy")], [Run(15_000, "light") for _ in range(4)]
    lanes = two_lanes()
    assert lanes.admit([*lights, *heavies], 0, {"light": 4, "heavy": 5}) == [*heavies, *lights[:2]]
    assert lanes.admit([*heavies, *lights], 0, {"light": 5, "heavy": 4}) == lights
    assert lanes.admit(lights, 0, {"light": 4, "heavy": 4}) == lights  # nothing is kept for nobody


def test_a_lane_stands_back_where_it_is_ahead_and_one_of_the_other_finds_no_room() -> None:
    heavy, light = Run(60_000, "heavy"), Run(2_000, "light")
    lanes = two_lanes()
    level, ahead = {"light": 3, "heavy": 3}, {"light": 0, "heavy": 3}
    assert lanes.admit([heavy, light], 50_000, level) == [light]
    assert lanes.admit([heavy, light], 50_000, ahead) == []
    assert lanes.admit([light], 50_000, ahead) == [light]
    assert lanes.admit([heavy, light], 40_000, ahead) == [heavy]
    assert lanes.admit([heavy, light], 30_000, ahead) == [heavy, light]


def test_a_lane_that_is_alone_has_all_of_the_card() -> None:
    lanes = room.Lanes([config(guess_mib=1000) for _ in range(9)], CAPACITY_MIB)
    lights = [Run(10_000, "light") for _ in range(12)]
    assert len(lanes.admit(lights, 0, {"light": 12, "heavy": 0})) == 10


def test_one_that_is_put_back_is_the_next_of_its_lane() -> None:
    lanes = room.Lanes([config(guess_mib=guess) for guess in (1, 2)], CAPACITY_MIB)
    lane, first = lanes.take({"light": 0, "heavy": 0})
    lanes.put_back(lane, first)
    assert (len(lanes), lanes.done(lane, {"light": 0, "heavy": 0})) == (2, 0.0)
    assert lanes.take({"light": 0, "heavy": 0}) == (lane, first)


def test_both_lanes_come_forward_together() -> None:
    """Runs end in the order in which they began, the heavy ones after three times as long."""
    guesses = [500 + 23 * number for number in range(300)] + [9_500 + 450 * number for number in range(100)]
    card = Card(guesses[::7] + [each for place, each in enumerate(guesses) if place % 7], CAPACITY_MIB, room.Margins())
    apart = []
    turn = 0
    while card.ended + card.alone < len(guesses) * 3 // 4:
        card.look()
        turn += 1
        lights = [place for place, run in enumerate(card.running) if run.lane == "light"]
        heavies = [place for place, run in enumerate(card.running) if run.lane == "heavy"]
        card.end((heavies or lights)[0] if turn % 4 == 0 or not lights else lights[0])
        apart.append(abs(card.done("light") - card.done("heavy")))
    assert max(apart[100:]) < 0.05


@given(
    st.lists(st.integers(0, 120_000), min_size=1, max_size=60),
    st.integers(8_000, 150_000),
    st.floats(0.1, 3.0),
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
)
def test_all_have_their_room_in_the_end_and_never_more_than_there_is(
    guesses: list[int], capacity_mib: int, true_margin: float, order: list[int]
) -> None:
    """With whatever margin has been learned, and in whatever order runs end."""
    margins = room.Margins()
    for _ in range(room.LEARN_FROM):
        margins.learn(config(guess_mib=10_000), 10_000 * true_margin)
    card = Card(guesses, capacity_mib, margins)
    card.look()
    while card.running:
        assert sum(run.need_mib for run in card.running) <= capacity_mib
        assert all(run.passed <= room.PASSES + card.bench for run in card.waiting)
        card.end(order[card.ended % len(order)])
        card.look()
    assert not card.waiting, "nothing runs, and some wait"
    assert card.ended + card.alone == len(guesses)


def test_at_rest_more_have_a_place_than_at_their_peaks() -> None:
    resting = [Run(40, held_mib=10) for _ in range(3)]
    waiting = [Run(40, held_mib=5), Run(40, held_mib=5)]
    assert room.admit_to_turns(waiting, [], resting, free_mib=105 - 30 - 10) == waiting[:1]


def test_room_for_the_highest_peak_at_rest_stays() -> None:
    resting = [Run(70, held_mib=10)]
    waiting = [Run(25, held_mib=5)]
    assert room.admit_to_turns(waiting, [], resting, free_mib=79) == []
    assert room.admit_to_turns(waiting, [], resting, free_mib=80) == waiting


def test_those_that_train_are_to_rise_to_their_peaks() -> None:
    waiting = [Run(25, held_mib=5)]
    assert room.admit_to_turns(waiting, [Run(60, held_mib=5)], [], free_mib=74) == []
    assert room.admit_to_turns(waiting, [Run(60, held_mib=5)], [], free_mib=75) == waiting


def test_where_nobody_trains_or_rests_the_first_may() -> None:
    waiting = [Run(500, held_mib=5), Run(1)]
    assert room.admit_to_turns(waiting, [], [], free_mib=100) == waiting[:1]
    assert room.admit_to_turns(waiting, [Run(1, held_mib=1)], [], free_mib=100) == waiting[1:]
    assert room.admit_to_turns([], [], [], free_mib=100) == []


def config(family: str = "cnn", guess_mib: int = 10_000) -> dict[str, Any]:
    return {"family": family, "guess_mib": guess_mib}


def test_room_is_the_guess_with_a_margin_until_runs_have_shown_another() -> None:
    margins = room.Margins()
    assert margins.needed_mib(config()) == 11_500 + room.SLACK_MIB
    for _ in range(room.LEARN_FROM):
        margins.learn(config(), 8_000 + room.SLACK_MIB)
    assert margins.needed_mib(config()) == 8_400 + room.SLACK_MIB
    assert margins.needed_mib(config("mlp")) == 11_500 + room.SLACK_MIB


@pytest.mark.parametrize(("footprint", "margin"), [(100, room.LEAST), (90_000, room.MOST)])
def test_what_is_learned_has_limits(footprint: int, margin: float) -> None:
    margins = room.Margins()
    for _ in range(room.LEARN_FROM):
        margins.learn(config(), footprint)
    assert margins.margin("cnn") == margin


@pytest.mark.parametrize(("every", "ratio"), [(10, 0.5), (3, 1.5)])
def test_room_follows_the_runs_that_need_more_unless_they_are_few(every: int, ratio: float) -> None:
    margins = room.Margins()
    for number in range(100):
        margins.learn(config(), 15_000 + room.SLACK_MIB if number % every == 0 else 5_000 + room.SLACK_MIB)
    assert margins.margin("cnn") == pytest.approx(ratio * 1.05)


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
    assert [name for name in "abcd" if again.has({"id": name, "of": "0"})] == ["a", "b", "c"]
    assert [json.loads(line).get("id") for line in kept.path.read_text().splitlines()] == [None, "a", "b", "c", "e"]


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"gp')
    rows.Rows(tmp_path, resume=True, activity=False).file.close()
    assert (tmp_path / rows.NAME).read_text() == ""


def test_rows_without_activity_do_not_count_where_it_is_wanted(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"id":"a"}\n{"id":"b","step_ms":3.5}\n{"id":"c","step_ms":null,"error":"x"}\n')
    assert set(rows.read_done(tmp_path / rows.NAME, activity=True)) == {"b", "c"}
    assert set(rows.read_done(tmp_path / rows.NAME, activity=False)) == {"a", "b", "c"}


def test_a_row_of_another_config_with_the_same_id_does_not_count(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"id":"a","of":"1"}\n{"id":"b","of":"1"}\n{"id":"b","of":"2"}\n{"id":"c"}\n')
    kept = rows.Rows(tmp_path, resume=True, activity=False)
    kept.file.close()
    assert not kept.has({"id": "a", "of": "2"})
    assert kept.has({"id": "a", "of": "1"})
    assert kept.has({"id": "b", "of": "2"})
    assert kept.has({"id": "c", "of": "2"})


def test_a_config_carries_the_digest_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "configs.jsonl"
    file.write_text('{"id": "a"}\n\n{"id":"b"}\n')
    assert rows.read_configs(file) == [
        {"id": "a", "of": rows.digest(b'{"id": "a"}\n')},
        {"id": "b", "of": rows.digest(b'{"id":"b"}')},
    ]


def test_beginning_anew_keeps_the_old_rows_aside(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"id":"a"}\n')
    kept = rows.Rows(tmp_path, resume=False, activity=False)
    kept.file.close()
    assert not kept.has({"id": "a", "of": "0"})
    assert (tmp_path / "rows.jsonl.old").read_text() == '{"id":"a"}\n'
