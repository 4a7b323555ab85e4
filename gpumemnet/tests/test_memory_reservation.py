"""The collector's pure parts: which run may use GPU memory next, and the file of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.dataset.inside import memory_reservation as reservation
from gpumemnet.dataset.inside import rows

CAPACITY_MIB = 100_000


class Run:
    """A worker that waits for memory, or has it."""

    def __init__(self, need_mib: float, queue: str = "light", held_mib: float = 0.0, passed: int = 0) -> None:
        self.need_mib, self.queue, self.held_mib, self.times_passed = need_mib, queue, held_mib, passed


def test_runs_that_fit_start_in_their_order() -> None:
    first, second, third = Run(40), Run(50), Run(20)
    assert reservation.admit([first, second, third], 100) == [first, second]


def test_a_run_that_does_not_fit_is_passed_by_smaller_ones_which_are_counted() -> None:
    large, small, tiny = Run(90), Run(30), Run(10)
    assert reservation.admit([large, small, tiny], 50) == [small, tiny]
    assert (large.times_passed, small.times_passed) == (2, 0)


def test_a_run_that_was_passed_often_is_not_passed_again() -> None:
    large, small = Run(90, passed=reservation.MAX_TIMES_PASSED), Run(30)
    assert reservation.admit([large, small], 50) == []
    assert reservation.admit([large, small], 125) == [large, small]


def test_memory_that_a_worker_holds_already_is_not_reserved_again() -> None:
    holder = Run(90, held_mib=60)
    assert reservation.admit([holder], 29) == []
    assert reservation.admit([holder], 30) == [holder]


class OneGpu:
    """A GPU and its runs: begins, admits and ends them as the collector does."""

    def __init__(
        self, guesses_mib: list[int], capacity_mib: float, margins: reservation.Margins, standby: int = 6
    ) -> None:
        self.queues = reservation.Queues([config(guess_mib=guess) for guess in guesses_mib], capacity_mib)
        self.margins, self.standby = margins, standby
        self.waiting: list[Run] = []
        self.running: list[Run] = []
        self.alone = self.ended = 0

    def begun(self) -> dict[str, int]:
        return {queue: sum(run.queue == queue for run in self.waiting) for queue in reservation.QUEUES}

    def done(self, queue: str) -> float:
        return self.queues.done(queue, self.begun())

    def schedule(self) -> None:
        while len(self.queues) and len(self.waiting) < self.standby:
            queue, taken = self.queues.take(self.begun())
            need_mib = self.margins.needed_mib(taken)
            if need_mib > self.queues.capacity_mib * reservation.ALONE_SHARE:
                self.alone += 1
            else:
                self.waiting.append(Run(need_mib, queue))
        used = sum(run.need_mib for run in self.running)
        admitted = self.queues.admit(self.waiting, used, self.begun())
        self.running += admitted
        self.waiting = [run for run in self.waiting if run not in admitted]

    def end(self, place: int) -> Run:
        self.ended += 1
        return self.running.pop(place % len(self.running))


def test_light_and_heavy_runs_differ_by_the_memory_they_need() -> None:
    queues = reservation.Queues([config(guess_mib=guess) for guess in (0, 9_000, 9_200, 50_000)], CAPACITY_MIB)
    assert [each["guess_mib"] for each in queues.waiting["light"]] == [0, 9_000]
    assert [each["guess_mib"] for each in queues.waiting["heavy"]] == [9_200, 50_000]
    assert len(queues) == 4


def test_the_queue_with_fewer_begun_workers_is_next() -> None:
    queues = reservation.Queues([config(guess_mib=guess) for guess in (1, 2, 3, 30_000)], CAPACITY_MIB)
    assert queues.take({"light": 0, "heavy": 1})[1]["guess_mib"] == 1
    assert queues.take({"light": 1, "heavy": 0}) == ("heavy", config(guess_mib=30_000))
    assert queues.take({"light": 5, "heavy": 0})[1]["guess_mib"] == 2  # there is no heavy one any more


def two_queues() -> reservation.Queues:
    return reservation.Queues([config(guess_mib=guess) for guess in [1000] * 200 + [50_000] * 200], CAPACITY_MIB)


def test_a_heavy_run_without_memory_does_not_block_light_ones() -> None:
    heavy, light = Run(55_000, "heavy", passed=reservation.MAX_TIMES_PASSED), Run(2_000, "light")
    assert two_queues().admit([heavy, light], 50_000, {"light": 1, "heavy": 1}) == [light]


def test_the_queue_that_is_behind_chooses_first_and_the_other_one_uses_the_rest() -> None:
    heavies, lights = [Run(60_000, "heavy")], [Run(15_000, "light") for _ in range(4)]
    queues = two_queues()
    assert queues.admit([*lights, *heavies], 0, {"light": 4, "heavy": 5}) == [*heavies, *lights[:2]]
    assert queues.admit([*heavies, *lights], 0, {"light": 5, "heavy": 4}) == lights
    assert queues.admit(lights, 0, {"light": 4, "heavy": 4}) == lights  # nothing is reserved without a worker


def test_a_queue_that_is_ahead_waits_while_a_run_of_the_other_one_does_not_fit() -> None:
    heavy, light = Run(60_000, "heavy"), Run(2_000, "light")
    queues = two_queues()
    level, ahead = {"light": 3, "heavy": 3}, {"light": 0, "heavy": 3}
    assert queues.admit([heavy, light], 50_000, level) == [light]
    assert queues.admit([heavy, light], 50_000, ahead) == []
    assert queues.admit([light], 50_000, ahead) == [light]
    assert queues.admit([heavy, light], 40_000, ahead) == [heavy]
    assert queues.admit([heavy, light], 30_000, ahead) == [heavy, light]


def test_a_single_queue_uses_the_whole_gpu() -> None:
    queues = reservation.Queues([config(guess_mib=1000) for _ in range(9)], CAPACITY_MIB)
    lights = [Run(10_000, "light") for _ in range(12)]
    assert len(queues.admit(lights, 0, {"light": 12, "heavy": 0})) == 10


def test_a_config_that_is_put_back_is_the_next_of_its_queue() -> None:
    queues = reservation.Queues([config(guess_mib=guess) for guess in (1, 2)], CAPACITY_MIB)
    queue, first = queues.take({"light": 0, "heavy": 0})
    queues.put_back(queue, first)
    assert (len(queues), queues.done(queue, {"light": 0, "heavy": 0})) == (2, 0.0)
    assert queues.take({"light": 0, "heavy": 0}) == (queue, first)


def test_both_queues_advance_together() -> None:
    """Runs end in the order in which they began, the heavy ones after three times as long."""
    guesses = [500 + 23 * number for number in range(300)] + [9_500 + 450 * number for number in range(100)]
    gpu = OneGpu(
        guesses[::7] + [each for place, each in enumerate(guesses) if place % 7], CAPACITY_MIB, reservation.Margins()
    )
    apart = []
    turn = 0
    while gpu.ended + gpu.alone < len(guesses) * 3 // 4:
        gpu.schedule()
        turn += 1
        lights = [place for place, run in enumerate(gpu.running) if run.queue == "light"]
        heavies = [place for place, run in enumerate(gpu.running) if run.queue == "heavy"]
        gpu.end((heavies or lights)[0] if turn % 4 == 0 or not lights else lights[0])
        apart.append(abs(gpu.done("light") - gpu.done("heavy")))
    assert max(apart[100:]) < 0.05


@given(
    st.lists(st.integers(0, 120_000), min_size=1, max_size=60),
    st.integers(8_000, 150_000),
    st.floats(0.1, 3.0),
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
)
def test_every_run_gets_memory_and_never_more_than_the_capacity(
    guesses: list[int], capacity_mib: int, true_margin: float, order: list[int]
) -> None:
    """With whatever margin has been learned, and in whatever order runs end."""
    margins = reservation.Margins()
    for _ in range(reservation.LEARN_FROM):
        margins.learn(config(guess_mib=10_000), 10_000 * true_margin)
    gpu = OneGpu(guesses, capacity_mib, margins)
    gpu.schedule()
    while gpu.running:
        assert sum(run.need_mib for run in gpu.running) <= capacity_mib
        assert all(run.times_passed <= reservation.MAX_TIMES_PASSED + gpu.standby for run in gpu.waiting)
        gpu.end(order[gpu.ended % len(order)])
        gpu.schedule()
    assert not gpu.waiting, "nothing runs, and some wait"
    assert gpu.ended + gpu.alone == len(guesses)


def test_more_workers_fit_at_rest_than_at_their_peaks() -> None:
    resting = [Run(40, held_mib=10) for _ in range(3)]
    waiting = [Run(40, held_mib=5), Run(40, held_mib=5)]
    assert reservation.admit_to_turns(waiting, [], resting, free_mib=105 - 30 - 10) == waiting[:1]


def test_memory_for_the_highest_peak_at_rest_stays_free() -> None:
    resting = [Run(70, held_mib=10)]
    waiting = [Run(25, held_mib=5)]
    assert reservation.admit_to_turns(waiting, [], resting, free_mib=79) == []
    assert reservation.admit_to_turns(waiting, [], resting, free_mib=80) == waiting


def test_training_workers_are_counted_with_their_peaks() -> None:
    waiting = [Run(25, held_mib=5)]
    assert reservation.admit_to_turns(waiting, [Run(60, held_mib=5)], [], free_mib=74) == []
    assert reservation.admit_to_turns(waiting, [Run(60, held_mib=5)], [], free_mib=75) == waiting


def test_the_first_run_starts_if_no_other_trains_or_rests() -> None:
    waiting = [Run(500, held_mib=5), Run(1)]
    assert reservation.admit_to_turns(waiting, [], [], free_mib=100) == waiting[:1]
    assert reservation.admit_to_turns(waiting, [Run(1, held_mib=1)], [], free_mib=100) == waiting[1:]
    assert reservation.admit_to_turns([], [], [], free_mib=100) == []


def config(family: str = "cnn", guess_mib: int = 10_000) -> dict[str, Any]:
    return {"family": family, "guess_mib": guess_mib}


def test_a_reservation_is_the_rough_estimate_with_a_margin_until_runs_show_another() -> None:
    margins = reservation.Margins()
    assert margins.needed_mib(config()) == 11_500 + reservation.SLACK_MIB
    for _ in range(reservation.LEARN_FROM):
        margins.learn(config(), 8_000 + reservation.SLACK_MIB)
    assert margins.needed_mib(config()) == 8_400 + reservation.SLACK_MIB
    assert margins.needed_mib(config("mlp")) == 11_500 + reservation.SLACK_MIB


@pytest.mark.parametrize(("footprint", "margin"), [(100, reservation.MIN_MARGIN), (90_000, reservation.MAX_MARGIN)])
def test_learned_margins_have_limits(footprint: int, margin: float) -> None:
    margins = reservation.Margins()
    for _ in range(reservation.LEARN_FROM):
        margins.learn(config(), footprint)
    assert margins.margin("cnn") == margin


@pytest.mark.parametrize(("every", "ratio"), [(10, 0.5), (3, 1.5)])
def test_margins_follow_the_runs_that_need_more_unless_they_are_few(every: int, ratio: float) -> None:
    margins = reservation.Margins()
    for number in range(100):
        margins.learn(
            config(), 15_000 + reservation.SLACK_MIB if number % every == 0 else 5_000 + reservation.SLACK_MIB
        )
    assert margins.margin("cnn") == pytest.approx(ratio * 1.05)


def test_small_runs_do_not_change_the_margin() -> None:
    margins = reservation.Margins()
    for _ in range(100):
        margins.learn(config(guess_mib=reservation.LARGE_MIB - 1), 50_000)
    assert margins.margin("cnn") == reservation.MARGIN


def test_rows_are_found_again_and_an_incomplete_one_is_removed(tmp_path: Path) -> None:
    kept = rows.Rows(tmp_path, resume=True, activity=False)
    kept.write({"gpu": "x"})
    kept.write({"id": "a", "error": None, "oom": False})
    kept.write({"id": "b", "error": "broken", "oom": False})
    kept.write({"id": "c", "error": None, "oom": True})
    kept.file.close()
    assert kept.counts == {"measured": 1, "failed": 1, "oom": 1}
    with kept.path.open("a") as file:
        file.write('{"id":"d","err')
    again = rows.Rows(tmp_path, resume=True, activity=False)
    again.write({"id": "e"})
    again.file.close()
    assert [name for name in "abcd" if again.has({"id": name, "of": "0"})] == ["a", "b", "c"]
    assert [json.loads(line).get("id") for line in kept.path.read_text().splitlines()] == [None, "a", "b", "c", "e"]


def test_a_file_of_one_incomplete_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"gp')
    rows.Rows(tmp_path, resume=True, activity=False).file.close()
    assert (tmp_path / rows.NAME).read_text() == ""


def test_rows_without_activity_do_not_count_with_activity(tmp_path: Path) -> None:
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


def test_without_resume_the_old_rows_are_renamed(tmp_path: Path) -> None:
    (tmp_path / rows.NAME).write_text('{"id":"a"}\n')
    kept = rows.Rows(tmp_path, resume=False, activity=False)
    kept.file.close()
    assert not kept.has({"id": "a", "of": "0"})
    assert (tmp_path / "rows.jsonl.old").read_text() == '{"id":"a"}\n'
