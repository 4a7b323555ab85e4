"""Housekeeping, the background thread, and the systemd unit."""

from __future__ import annotations

import asyncio
import configparser
import errno
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import pytest

from carma.core.model.values import AttemptKey, TaskId
from carma.daemon import housekeeping
from carma.daemon.runtime import BackgroundThread
from carma.daemon.startup import systemd_unit as unit
from carma.launch.attempt_records import EXIT

T = TypeVar("T")
OLD, NEW = 1_000.0, 2_000.0


def attempt(logs: Path, name: str, touched_at: float) -> Path:
    directory = logs / name
    directory.mkdir()
    file = directory / "stdout.log"
    file.write_text("x")
    for path in (file, directory):
        os.utime(path, (touched_at, touched_at))
    return directory


def test_old_logs_go_and_everything_else_stays(tmp_path: Path) -> None:
    old = attempt(tmp_path, "1.1", OLD)
    kept = [attempt(tmp_path, "2.1", NEW), attempt(tmp_path, "3.1", OLD), attempt(tmp_path, "notes", OLD)]
    (tmp_path / "daemon.log").write_text("")
    os.utime(tmp_path / "daemon.log", (OLD, OLD))
    assert removed(tmp_path, live={3}, before=1_500.0) == 1
    assert not old.exists()
    assert all(directory.exists() for directory in kept)
    assert (tmp_path / "daemon.log").exists()


def removed(directory: Path, *, live: Collection[int] = (), before: float, steps: list[int] | None = None) -> int:
    class Counted(BackgroundThread):
        def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
            if steps is not None:
                steps.append(len(steps))
            return super().call(function)

    async def work() -> int:
        return await housekeeping.remove_old(Counted("test"), directory, live.__contains__, before)

    return asyncio.run(work())


def test_a_log_that_was_written_lately_keeps_its_directory(tmp_path: Path) -> None:
    directory = attempt(tmp_path, "1.1", OLD)
    os.utime(directory / "stdout.log", (NEW, NEW))
    assert removed(tmp_path, before=1_500.0) == 0


def test_an_ended_attempt_is_as_old_as_the_record_of_its_end_whatever_its_output_says(tmp_path: Path) -> None:
    directory = attempt(tmp_path, "1.1", OLD)
    (directory / "exit.json").write_text("{}")
    os.utime(directory / "exit.json", (OLD, OLD))
    os.utime(directory / "stdout.log", (NEW, NEW))
    assert removed(tmp_path, before=1_500.0) == 1
    assert not directory.exists()


def test_an_attempt_whose_record_cannot_be_read_is_left_and_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable, old = attempt(tmp_path, "1.1", OLD), attempt(tmp_path, "2.1", OLD)
    stat = os.stat

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if str(path) == str(unreadable / EXIT):
            raise PermissionError(errno.EACCES, "refused")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert removed(tmp_path, before=1_500.0) == 1
    assert unreadable.exists()
    assert not old.exists()


def test_a_link_in_the_log_directory_is_not_followed(tmp_path: Path) -> None:
    logs, elsewhere = tmp_path / "logs", tmp_path / "elsewhere"
    logs.mkdir()
    elsewhere.mkdir()
    (logs / "1.1").symlink_to(elsewhere)
    assert removed(logs, before=9e12) == 0
    assert elsewhere.exists()


def test_all_old_directories_go_in_steps_with_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "REMOVED_AT_ONCE", 2)
    monkeypatch.setattr(housekeeping, "PAUSE_S", 0.0)
    for number in range(1, 8):
        attempt(tmp_path, f"{number}.1", OLD)
    steps: list[int] = []
    assert removed(tmp_path, before=1_500.0, steps=steps) == 7
    assert list(tmp_path.iterdir()) == []
    assert len(steps) == 5  # of 2, 2, 2, 1 and 0 directories: the event loop was free in between


def test_a_background_thread_answers_in_order_and_passes_errors_on() -> None:
    async def work() -> None:
        worker = BackgroundThread("test")
        answers = [worker.call(lambda number=number: number) for number in range(5)]  # type: ignore[misc]
        assert await asyncio.gather(*answers) == list(range(5))
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 // 0)
        worker.close()

    asyncio.run(work())


def test_a_worker_that_hangs_does_not_hold_up_the_end() -> None:
    release = threading.Event()

    async def work() -> None:
        worker = BackgroundThread("test")
        hanging = worker.call(release.wait)
        worker.close(wait_s=0.0)
        assert not hanging.done()

    asyncio.run(work())
    release.set()


@pytest.mark.parametrize("user", [False, True])
def test_the_unit_is_well_formed_and_leaves_tasks_alone(user: bool) -> None:
    text = unit.text(user=user, program=Path("/opt/my env/100%/bin/carma"))
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read_string(text)
    service = parsed["Service"]
    assert service["Type"] == "notify"
    assert service["KillMode"] == "process"
    assert service["ExecStart"] == '"/opt/my env/100%%/bin/carma" up'
    assert parsed["Install"]["WantedBy"] == ("default.target" if user else "multi-user.target")


def test_records_that_a_killed_daemon_or_an_older_version_left_are_removed(tmp_path: Path) -> None:
    for name in ("1.1", "2.1", "3.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "order.json").write_text("secret")
        (tmp_path / name / "stdout.log").write_text("kept")
    for name in ("1.1", "2.1"):
        (tmp_path / name / "exit.json").write_text('{"ended_at": 1.0, "code": 0}')
    active = AttemptKey(TaskId(2), 1)

    async def drop() -> None:
        await housekeeping.drop_records(BackgroundThread("test"), tmp_path, lambda key: key == active)

    asyncio.run(drop())
    modes = {name: (tmp_path / name / "stdout.log").stat().st_mode & 0o777 for name in ("1.1", "2.1")}
    assert modes["1.1"] == 0o400 != modes["2.1"]  # the output of the active attempt is still its submitter's
    left = {name: sorted(os.listdir(tmp_path / name)) for name in ("1.1", "2.1", "3.1")}
    assert left == {
        "1.1": ["exit.json", "stdout.log"],
        "2.1": ["exit.json", "order.json", "stdout.log"],
        "3.1": ["stdout.log"],
    }
