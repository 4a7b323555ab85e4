"""What stands around the shell: the worker thread, housekeeping, the systemd unit."""

from __future__ import annotations

import asyncio
import configparser
import os
import threading
from pathlib import Path

import pytest

from carma.core.model import TaskId
from carma.daemon import housekeeping, unit
from carma.daemon.worker import Worker

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
    assert housekeeping.remove_old(tmp_path, frozenset({TaskId(3)}), before=1_500.0) == 1
    assert not old.exists()
    assert all(directory.exists() for directory in kept)
    assert (tmp_path / "daemon.log").exists()


def test_a_log_that_was_written_lately_keeps_its_directory(tmp_path: Path) -> None:
    directory = attempt(tmp_path, "1.1", OLD)
    os.utime(directory / "stdout.log", (NEW, NEW))
    assert housekeeping.remove_old(tmp_path, frozenset(), before=1_500.0) == 0


def test_a_link_in_the_log_directory_is_not_followed(tmp_path: Path) -> None:
    logs, elsewhere = tmp_path / "logs", tmp_path / "elsewhere"
    logs.mkdir()
    elsewhere.mkdir()
    (logs / "1.1").symlink_to(elsewhere)
    assert housekeeping.remove_old(logs, frozenset(), before=9e12) == 0
    assert elsewhere.exists()


def test_only_so_many_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "AT_ONCE", 2)
    for number in range(1, 4):
        attempt(tmp_path, f"{number}.1", OLD)
    assert housekeeping.remove_old(tmp_path, frozenset(), before=1_500.0) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_worker_answers_in_order_and_hands_errors_on() -> None:
    async def work() -> None:
        worker = Worker("test")
        answers = [worker.call(lambda number=number: number) for number in range(5)]  # type: ignore[misc]
        assert await asyncio.gather(*answers) == list(range(5))
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 // 0)
        worker.close()

    asyncio.run(work())


def test_a_worker_that_hangs_does_not_hold_up_the_end() -> None:
    release = threading.Event()

    async def work() -> None:
        worker = Worker("test")
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
