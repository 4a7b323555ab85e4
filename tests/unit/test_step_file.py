"""The file of optimizer steps: the sum of its slots, and what a hostile user may write into it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carma.core.model.values import AttemptKey, TaskId
from carma.launch.step_metering import HOOK_DIRECTORY, StepFiles, metered
from carma.step_file import LIMIT_BYTES, MAGIC, MOST_STEPS, SLOT_BYTES, VARIABLE, SlotWriter, append, count, slot_of

KEY = AttemptKey(TaskId(7), 1)
NOW_NS = 10**12


def steps(*slots: tuple[int, int, int]) -> int | None:
    """Of slots with steps, begin and last step in seconds."""
    data = b"".join(slot_of(1, n, int(began * 1e9), int(last * 1e9)) for n, began, last in slots)
    found = count(data, NOW_NS)
    return None if found is None else found.steps


def test_of_processes_at_the_same_time_the_largest_count_holds() -> None:
    assert steps((100, 1, 50), (101, 2, 51), (99, 1, 49)) == 101


def test_processes_that_follow_one_another_add_up() -> None:
    assert steps((100, 1, 50), (7, 60, 70), (3, 71, 80)) == 110


def test_groups_of_ranks_that_follow_one_another_add_up() -> None:
    assert steps((100, 1, 50), (100, 2, 50), (30, 60, 70), (31, 61, 71)) == 131


def test_the_time_of_the_last_step_is_that_of_the_counted_process() -> None:
    data = slot_of(1, 100, 1, 500) + slot_of(2, 100, 2, 400) + slot_of(3, 90, 2, 600)
    found = count(data, NOW_NS)
    assert found is not None
    assert found.last_ns == 400


HOSTILE = {
    "an empty file": b"",
    "half a slot": slot_of(1, 5, 1, 2)[:40],
    "another format": (MAGIC + 1).to_bytes(8, "little") + slot_of(1, 5, 1, 2)[8:],
    "ones": b"\xff" * LIMIT_BYTES,
    "zeros": b"\0" * LIMIT_BYTES,
    "no steps": slot_of(1, 0, 1, 2),
    "too many steps": slot_of(1, MOST_STEPS, 1, 2),
    "a last step before the begin": slot_of(1, 5, 3, 2),
    "a step in the future": slot_of(1, 5, 1, 2 * NOW_NS),
    "slots beyond the limit": b"\0" * LIMIT_BYTES + slot_of(1, 5, 1, 2),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_slot_counts_nothing(data: bytes) -> None:
    assert count(data, NOW_NS) is None


@given(st.binary(max_size=4 * SLOT_BYTES), st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), max_size=4))
def test_any_file_gives_nothing_or_plausible_numbers(noise: bytes, numbers: list[tuple[int, int, int]]) -> None:
    found = count(b"".join(slot_of(1, *three) for three in numbers) + noise, NOW_NS)
    assert found is None or (0 < found.steps < 256 * MOST_STEPS and 0 < found.began_ns <= found.last_ns <= NOW_NS)


def test_a_writer_rewrites_its_own_slot(tmp_path: Path) -> None:
    file = tmp_path / "steps.bin"
    file.touch()
    one, two = SlotWriter(str(file)), SlotWriter(str(file))
    for made in (1, 2, 3):
        one.write(made, time.monotonic_ns())
        two.write(2 * made, time.monotonic_ns())
    assert file.stat().st_size == 2 * SLOT_BYTES
    found = count(file.read_bytes(), time.monotonic_ns())
    assert found is not None
    assert found.steps == 6


def test_a_writer_without_a_usable_file_writes_nothing(tmp_path: Path) -> None:
    SlotWriter("").write(1, 1)
    SlotWriter(str(tmp_path / "missing")).write(1, 1)
    full = tmp_path / "full"
    full.write_bytes(b"\0" * LIMIT_BYTES)
    with pytest.raises(OSError, match="no place"):
        append(str(full), slot_of(1, 1, 1, 1))


# -- the reader of the daemon -----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / str(KEY)).mkdir()
    return tmp_path / str(KEY) / "steps.bin"


def read(file: Path) -> list[int]:
    return [found.steps for found in StepFiles(file.parent.parent).read([KEY])]


def test_the_daemon_reads_a_file_of_any_size_without_following_anything(file: Path) -> None:
    now_ns = time.monotonic_ns()
    slot = slot_of(os.getpid(), 5, now_ns, now_ns)
    assert read(file) == []
    file.write_bytes(slot)
    assert read(file) == [5]
    file.write_bytes(slot + b"x" * LIMIT_BYTES)
    os.truncate(file, 1 << 40)
    assert read(file) == [5]
    os.truncate(file, 10)
    assert read(file) == []
    file.unlink()
    other = file.with_name("other")
    other.write_bytes(slot)
    file.symlink_to(other)
    with pytest.raises(OSError):
        os.close(os.open(file, os.O_NOFOLLOW))
    assert read(file) == []
    file.unlink()
    os.mkfifo(file)
    assert read(file) == []


# -- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "path"),
    [({}, HOOK_DIRECTORY), ({"PYTHONPATH": ""}, HOOK_DIRECTORY), ({"PYTHONPATH": "a::b"}, f"{HOOK_DIRECTORY}:a::b")],
)
def test_the_hook_comes_first_on_the_path_and_adds_no_current_directory(own: dict[str, str], path: str) -> None:
    found = metered(own, "/steps.bin")
    assert found == {"PYTHONPATH": path, VARIABLE: "/steps.bin"}
    assert metered(found, "/other.bin") == {"PYTHONPATH": path, VARIABLE: "/other.bin"}


def test_without_counting_a_submission_from_inside_a_task_loses_the_variables_of_that_task() -> None:
    for own in ({"A": "1"}, {"PYTHONPATH": "a:b", "A": "1"}, {"PYTHONPATH": ""}):
        assert metered(own, None) == own
        inside = metered(own, "/steps.bin")
        assert metered(inside, None) == {name: value for name, value in own.items() if value}
