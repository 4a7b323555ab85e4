"""A database that was lost is refused and not replaced by an empty one; what a crash leaves behind is opened."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from carma.core.model.events import GpuDrained
from carma.core.model.values import TaskId
from carma.core.ports import Checkpoint
from carma.errors import StoreError
from carma.store import database_files as files
from carma.store.sqlite import SqliteStore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "carma.db"


def event(number: int) -> GpuDrained:
    return GpuDrained(float(number), None, f"event {number}")


def killed(path: Path, events: int) -> None:
    """The files of a daemon that was killed after this number of events: no event has been moved out of the log."""
    program = f"""
        import os, signal
        from tests.unit.store.test_lost_database import event
        from carma.store.sqlite import SqliteStore
        store = SqliteStore({str(path)!r})
        for number in range({events}):
            store.append([event(number)])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def count_of(path: Path) -> int:
    store = SqliteStore(path)
    try:
        return store.load().sequence
    finally:
        store.close()


def refusal(path: Path) -> StoreError:
    before = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.suffix != ".lock"}
    with pytest.raises(StoreError) as caught:
        SqliteStore(path)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.suffix != ".lock"}
    before.pop(f"{path.name}-shm", None), after.pop(f"{path.name}-shm", None)  # an index, which SQLite makes again
    assert {name: content for name, content in after.items() if content} == {
        name: content for name, content in before.items() if content
    }
    assert "--new-database" in caught.value.hint
    return caught.value


@pytest.mark.parametrize("with_log", [True, False])
def test_an_empty_database_is_refused(path: Path, with_log: bool) -> None:
    killed(path, 3)
    path.write_bytes(b"")
    if not with_log:
        files.log_of(path).unlink()
    assert "is empty" in str(refusal(path))


def test_an_empty_database_without_any_trace_of_another_is_refused_too(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert "is empty" in str(refusal(path))


@pytest.mark.parametrize("trace", ["-wal", ".last"])
def test_a_database_that_is_missing_beside_its_log_or_record_is_refused(path: Path, trace: str) -> None:
    killed(path, 3)
    for file in path.parent.iterdir():
        if file.name != f"{path.name}{trace}":
            file.unlink()
    assert f"{path.name}{trace}" in str(refusal(path))
    assert not path.exists()


def test_a_removed_log_is_noticed_by_the_events_that_are_missing(path: Path) -> None:
    killed(path, 3)
    files.log_of(path).unlink()
    refused = refusal(path)
    assert "ends at event 0, but event 3 was acknowledged" in str(refused)
    assert str(files.record_of(path)) in refused.hint
    files.record_of(path).unlink()  # as the hint says
    assert count_of(path) == 0


def test_a_shortened_log_is_noticed(path: Path) -> None:
    killed(path, 6)
    log = files.log_of(path)
    os.truncate(log, log.stat().st_size // 2)
    assert "but event 6 was acknowledged" in str(refusal(path))


def test_a_log_that_was_put_back_is_complete(path: Path) -> None:
    killed(path, 3)
    log = files.log_of(path)
    content = log.read_bytes()
    log.unlink()
    refusal(path)
    log.write_bytes(content)
    assert count_of(path) == 3


def test_an_older_copy_that_was_written_over_the_database_is_refused(path: Path) -> None:
    SqliteStore(path).close()
    older = path.read_bytes()
    store = SqliteStore(path)
    store.append([event(1), event(2)])
    store.close()
    path.write_bytes(older)
    assert "ends at event 0, but event 2 was acknowledged" in str(refusal(path))


def test_a_backup_that_was_moved_into_place_is_opened(path: Path) -> None:
    SqliteStore(path).close()
    shutil.copy(path, path.with_name("backup"))
    store = SqliteStore(path)
    store.append([event(1), event(2)])
    store.close()
    path.with_name("backup").rename(path)
    assert count_of(path) == 0
    assert count_of(path) == 0  # and the record is about that one now


def test_copies_taken_at_any_moment_are_opened_elsewhere(path: Path, tmp_path: Path) -> None:
    """Files are copied one after the other while events are stored; the record last, so that it is the newest."""
    store = SqliteStore(path)
    copies: list[tuple[Path, int]] = []
    for number in range(12):
        store.append([event(number)])
        if number == 6:
            store.save(Checkpoint(sequence=7, at=1.0, tasks=()), ())
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", copy / f"{path.name}{suffix}")
        store.append([event(number)])
        shutil.copy(f"{path}.last", copy / f"{path.name}.last")
        copies.append((copy / path.name, 2 * number + 1))
    store.close()
    assert [(copy, count_of(copy)) for copy, _ in copies] == copies


@pytest.mark.parametrize("content", [b"", b"garbage", b"7", b"1 2 3 4", b"\xff" * 63])
def test_a_torn_record_is_no_reason_to_refuse(path: Path, content: bytes) -> None:
    killed(path, 3)
    files.record_of(path).write_bytes(content)
    assert count_of(path) == 3


def test_a_record_that_a_power_cut_left_behind_is_no_reason_to_refuse(path: Path) -> None:
    """Commits are synced, the record is not: it may name an earlier event, or be gone."""
    killed(path, 1)
    earlier = files.record_of(path).read_bytes()
    killed(path, 3)
    files.record_of(path).write_bytes(earlier)
    assert count_of(path) == 4
    files.record_of(path).unlink()
    assert count_of(path) == 4


@pytest.mark.slow
def test_no_kill_at_any_moment_leads_to_a_refusal(path: Path) -> None:
    program = f"""
        from tests.unit.store.test_lost_database import event
        from carma.core.ports import Checkpoint
        from carma.store.sqlite import SqliteStore
        store = SqliteStore({str(path)!r})
        print("open", flush=True)
        number = store.load().sequence
        while True:
            number = store.append([event(number)])
            print(number, flush=True)
            if number % 10 == 0:
                store.save(Checkpoint(sequence=number, at=1.0, tasks=()), ())
    """
    chance = random.Random(7)
    for _ in range(8):
        command = [sys.executable, "-c", textwrap.dedent(program)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            said = [child.stdout.readline().strip() for _ in range(chance.randrange(1, 40))]
            child.kill()
            said += child.stdout.read().split()
        assert count_of(path) >= max((int(word) for word in said if word.isdecimal()), default=0)


@pytest.mark.parametrize(
    ("target", "attribute"),
    [(files, "migrate"), (os, "rename"), (files, "_sync_directory"), (files, "LastEventRecord")],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_while_the_database_is_made_is_followed_by_an_ordinary_start(
    path: Path, target: object, attribute: str, after: bool
) -> None:
    pid = os.fork()
    if pid == 0:
        original: Callable[..., object] = getattr(target, attribute)

        def crash(*arguments: object) -> None:
            if after:
                original(*arguments)
            os._exit(9)

        setattr(target, attribute, crash)
        if attribute == "LastEventRecord":
            sys.modules["carma.store.sqlite"].LastEventRecord = crash  # type: ignore[attr-defined]
        try:
            SqliteStore(path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    store = SqliteStore(path)
    assert store.append([event(1)]) == 1
    store.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["carma.db", "carma.db.last", "carma.db.lock"]


def test_a_new_database_keeps_the_old_files_under_another_name(path: Path) -> None:
    killed(path, 3)
    for expected in ("carma.db.old1", "carma.db.old2"):
        store = SqliteStore(path, new=True)
        assert store.load().sequence == 0
        store.append([event(1)])
        store.close()
        assert path.with_name(expected).exists()
    assert count_of(path.with_name("carma.db.old1")) == 3  # with what was in its log
    assert count_of(path.with_name("carma.db.old2")) == 1
    assert count_of(path) == 1


def damage_an_index(path: Path) -> None:
    """Changes the row number in the last entry of an index: every page is valid by itself."""
    rows = "INSERT INTO past_runs VALUES (?, 1, 0, x'aa', 1.0, '{}', x'bb')"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executemany(rows, [(number,) for number in range(2, 6)])
        connection.commit()
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'past_runs_by_command'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[page * size - 1] ^= 0x40
    path.write_bytes(data)


def test_a_copy_with_a_damaged_index_is_refused_with_instructions(path: Path, tmp_path: Path) -> None:
    killed(path, 3)
    assert count_of(path) == 3
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    for name in (path.name, f"{path.name}.last"):
        shutil.copy(path.with_name(name), copy.with_name(name))
    damage_an_index(copy)
    before = copy.read_bytes()
    with pytest.raises(StoreError, match=r"damaged.*past_runs_by_command") as caught:
        SqliteStore(copy)
    assert "--new-database" in caught.value.hint
    assert copy.read_bytes() == before
    files.record_of(copy).unlink()  # a restored backup without the record
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(copy)


@pytest.mark.parametrize("emptied", ["empty", "missing", "damaged"])
def test_a_new_database_can_replace_a_refused_one(path: Path, emptied: str) -> None:
    killed(path, 3)
    path.write_bytes(b"" if emptied == "empty" else b"nonsense" * 100)
    if emptied == "missing":
        path.unlink()
    refusal(path)
    store = SqliteStore(path, new=True)
    assert store.new_task_ids(1) == TaskId(1)
    store.close()
    assert count_of(path) == 0
