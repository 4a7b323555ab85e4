"""What is particular to the file: what goes wrong with it, who may open it, and older and newer formats."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from carma.core.model.events import TaskSubmitted
from carma.core.model.status import Queued
from carma.core.model.task import Task
from carma.core.model.values import Owner, TaskId, TaskSpec
from carma.core.ports import Checkpoint
from carma.errors import AlreadyRunning, StoreError
from carma.store.schema import APPLICATION_ID, MIGRATIONS, check, migrate
from carma.store.sqlite import SqliteStore
from carma.store.store_errors import from_os

ALICE = Owner(1001, 1001, "alice")


def submitted(task: int, size: int = 0) -> TaskSubmitted:
    spec = TaskSpec(command=("true",), directory="/", environment={"SECRET": "s" * size})
    return TaskSubmitted(1.0, TaskId(task), ALICE, spec)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "carma.db"


def filled(path: Path, events: int = 5) -> Path:
    store = SqliteStore(path)
    store.append([submitted(number) for number in range(1, events + 1)])
    store.close()
    return path


def test_only_the_daemons_user_may_read_it(path: Path) -> None:
    filled(path).chmod(0o644)
    store = SqliteStore(path)
    store.append([submitted(1)])
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    store.close()
    assert set(modes) >= {"carma.db", "carma.db-wal"}
    assert set(modes.values()) == {0o600}


def test_a_commit_is_synchronous_and_the_log_is_a_wal(path: Path) -> None:
    store = SqliteStore(path)
    connection = store._database._connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    store.new_task_ids(1)  # relaxed: and back to FULL afterwards
    store.shrink()
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_what_was_appended_survives_kill_9(path: Path) -> None:
    program = f"""
        import os, signal
        from tests.unit.store.test_sqlite import submitted
        from carma.store.sqlite import SqliteStore
        store = SqliteStore({str(path)!r})
        print(store.new_task_ids(2), flush=True)
        print(store.append([submitted(1), submitted(2)]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = _run_python(program)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["1", "2"]
    store = SqliteStore(path)
    assert store.load().events == (submitted(1), submitted(2))
    assert store.new_task_ids(1) > 2
    store.close()


def test_two_daemons_cannot_use_one_database(path: Path) -> None:
    store = SqliteStore(path)
    with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}\b"):
        SqliteStore(path)
    store.append([submitted(1)])
    store.close()
    SqliteStore(path).close()


def test_a_task_that_outlives_the_daemon_does_not_keep_the_lock(path: Path) -> None:
    program = f"""
        import os, signal, subprocess
        from carma.store.sqlite import SqliteStore
        store = SqliteStore({str(path)!r})
        child = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=-3, stderr=-3)  # -3: DEVNULL
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = _run_python(program)
    child = int(done.stdout)
    try:
        SqliteStore(path).close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("content", [b"not a database, " * 300, b"\0" * 8192, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_not_a_database_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StoreError) as caught:
        SqliteStore(path)
    assert str(path) in str(caught.value)
    assert "--new-database" in caught.value.hint
    assert path.read_bytes() == content


def test_a_damaged_database_is_refused_and_left_alone(path: Path) -> None:
    content = bytearray(filled(path, events=400).read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged") as caught:
        SqliteStore(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_truncated_database_is_refused(path: Path) -> None:
    content = filled(path, events=400).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(path)
    assert path.stat().st_size == len(content) // 2


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused_and_left_alone(path: Path) -> None:
    _set_version(filled(path), len(MIGRATIONS) + 1)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"format {len(MIGRATIONS) + 1}") as caught:
        SqliteStore(path)
    assert "newer version" in caught.value.hint
    assert path.read_bytes() == before


def test_an_event_of_another_version_is_named_and_not_skipped(path: Path) -> None:
    with sqlite3.connect(filled(path)) as connection:
        connection.execute("""UPDATE events SET body = '{"event":"task_teleported","at":1}' WHERE sequence = 3""")
    connection.close()
    store = SqliteStore(path)
    with pytest.raises(StoreError, match="task_teleported"):
        store.load()
    store.close()


@pytest.mark.parametrize("statement", ["DELETE FROM events WHERE sequence = 3", "DELETE FROM live WHERE id = 1"])
def test_a_row_that_is_missing_is_noticed(path: Path, statement: str) -> None:
    store = SqliteStore(path)
    store.append([submitted(1)])
    task = Task(id=TaskId(1), owner=ALICE, spec=submitted(1).spec, submitted_at=1.0, status=Queued(1.0))
    store.save(Checkpoint(sequence=1, at=1.0, tasks=(task,)), ())
    store.append([submitted(2), submitted(3), submitted(4)])
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    store = SqliteStore(path)
    with pytest.raises(StoreError, match="missing"):
        store.load()
    store.close()


def test_a_full_disk_loses_nothing_and_the_store_goes_on(path: Path) -> None:
    store = SqliteStore(path)
    store.append([submitted(1)])
    connection = store._database._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 4}")  # SQLite says SQLITE_FULL beyond it
    with pytest.raises(StoreError, match="disk is full") as caught:
        store.append([submitted(2), submitted(3, size=100_000)])
    assert "Free some space" in caught.value.hint
    assert store.load().events == (submitted(1),)
    connection.execute("PRAGMA max_page_count = 1000000")
    assert store.append([submitted(2)]) == 2
    store.close()
    again = SqliteStore(path)
    assert again.load().events == (submitted(1), submitted(2))
    again.close()


def test_a_database_that_may_not_be_written_is_a_store_error(path: Path) -> None:
    store = SqliteStore(path)
    store._database._connection.execute("PRAGMA query_only = ON")  # SQLite says SQLITE_READONLY
    with pytest.raises(StoreError, match="cannot be written") as caught:
        store.append([submitted(1)])
    assert str(path) in str(caught.value)
    assert "owner and the mode" in caught.value.hint
    assert store.load().sequence == 0
    store.close()


def test_a_disk_that_refuses_to_grow_a_file_is_a_store_error(path: Path) -> None:
    """The kernel's own refusal, through a limit on the size of files."""
    program = f"""
        import resource
        from tests.unit.store.test_sqlite import submitted
        from carma.errors import StoreError
        from carma.store.sqlite import SqliteStore
        store = SqliteStore({str(path)!r})
        store.append([submitted(1)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        try:
            store.append([submitted(2, size=2_000_000)])
        except StoreError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(store.append([submitted(2)]))
        store.close()
    """
    done = _run_python(program)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert str(path) in first
    assert second == "2"


def test_a_directory_in_its_place_or_a_file_above_it_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a directory"):
        SqliteStore(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file exists|not a directory"):
        SqliteStore(tmp_path / "file" / "carma.db")


def test_no_space_left_says_what_to_do() -> None:
    error = from_os(OSError(28, "No space left on device"), Path("/x/carma.db"), "open")
    assert str(error) == "could not open /x/carma.db: no space left on device"
    assert "Free some space" in error.hint


def test_an_older_format_is_migrated_and_keeps_its_rows(path: Path) -> None:
    connection = sqlite3.connect(filled(path), isolation_level=None)

    def second(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE past_runs ADD COLUMN host TEXT NOT NULL DEFAULT ''")

    migrate(connection, (*MIGRATIONS, second))
    check(connection, path, known=len(MIGRATIONS) + 1)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("SELECT count(*) FROM events").fetchone() == (5,)
    assert connection.execute("SELECT count(host) FROM past_runs").fetchone() == (0,)
    connection.close()


def test_a_migration_that_fails_leaves_the_older_format_whole(path: Path) -> None:
    connection = sqlite3.connect(filled(path), isolation_level=None)

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE past_runs")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        migrate(connection, (*MIGRATIONS, broken))
    connection.close()
    store = SqliteStore(path)
    assert store.load().sequence == 5
    assert list(store.past_runs(uid=1, command=("x",), directory="/")) == []
    store.close()


def test_threads_share_it(path: Path) -> None:
    """The loop asks for ids and an estimator reads while the writer appends."""
    store = SqliteStore(path)
    failures: list[BaseException] = []
    given: list[int] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                given.append(store.new_task_ids(1))
                store.append([submitted(number)])
                store.past_runs(uid=1, command=("x",), directory="/")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(given) == list(range(1, 81))
    assert store.load().sequence == 80
    store.close()


def _set_version(path: Path, version: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def _run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    root = Path(__file__).parents[3]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
