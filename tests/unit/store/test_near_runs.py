"""Past runs by the pattern of their command, in the file: older formats get it, and an index answers."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from carma.core.model.values import AttemptKey, TaskId
from carma.core.ports import PastRun
from carma.store import codec
from carma.store.sqlite import SqliteStore
from tests.unit.store.old_formats import make_old


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "carma.db"


def past_run(task: int, command: tuple[str, ...]) -> PastRun:
    return PastRun(
        key=AttemptKey(TaskId(task), 1),
        uid=1,
        command=command,
        directory="/",
        gpus=1,
        gpu_model="A100",
        peak_mib=1_000,
        runtime_s=90.0,
        succeeded=True,
        collocated=False,
        ended_at=float(task),
    )


def test_past_runs_of_the_third_format_are_found_by_their_pattern(path: Path) -> None:
    run = past_run(1, ("python", "train.py", "--batch=32"))
    connection = make_old(path, 3)
    row = (1, 1, 1, codec.digest(run.command, run.directory), 1.0, codec.write(run))
    connection.execute("INSERT INTO past_runs VALUES (?, ?, ?, ?, ?, ?)", row)
    connection.close()
    store = SqliteStore(path)
    store.remember(past_run(2, ("python", "train.py", "--batch=64")))
    near = store.past_runs(uid=1, command=("python", "train.py", "--batch=128"), directory="/", near=True)
    assert [run.key.task for run in near] == [2, 1]
    store.close()


def test_a_question_about_past_runs_reads_an_index_and_not_the_table(path: Path) -> None:
    """The question costs the same for ten and for a hundred thousand runs."""
    SqliteStore(path).close()
    connection = sqlite3.connect(path)
    for column, index in (("digest", "past_runs_by_command"), ("pattern", "past_runs_by_pattern")):
        plan = connection.execute(
            f"""EXPLAIN QUERY PLAN SELECT body FROM past_runs WHERE uid = ? AND {column} = ?
                ORDER BY ended_at DESC, task DESC, attempt DESC LIMIT ?""",
            (1, b"x", 20),
        ).fetchall()
        assert f"USING INDEX {index} (uid=? AND {column}=?)" in plan[0][3]
    connection.close()
