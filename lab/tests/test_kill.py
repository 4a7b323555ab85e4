"""`kill -9` at random moments: nothing that was acknowledged is lost, and nothing runs twice.

The study is that of `carma bench crash` (carma_lab.bench.crash), with fewer kills:

    CARMA_CRASH_SEED=7 CARMA_CRASH_KILLS=1000 pytest -n0 -s lab/tests/test_kill.py
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from pathlib import Path

from carma.core.model.events import TaskSubmitted
from carma.core.model.values import Owner, TaskId, TaskSpec
from carma.store.sqlite import SqliteStore
from carma_lab.bench.crash.copies import examine, take_copy
from carma_lab.bench.crash.kills import ALL
from carma_lab.bench.crash.server import crash_server
from carma_lab.bench.crash.stream import SubmissionStream
from carma_lab.bench.crash.study import Study, figures, study
from carma_lab.bench.crash.verdict import Excused, judge
from tests.harness import until

KILLS = int(os.environ.get("CARMA_CRASH_KILLS", "60"))
SEED = int(os.environ.get("CARMA_CRASH_SEED", str(random.randrange(1 << 32))))


def check(result: Study) -> None:
    print(f"CARMA_CRASH_SEED={SEED}")
    print(*(f"{figure.name} {figure.value:g} {figure.unit}" for figure in figures(result)), sep="\n")
    assert result.problems == (), f"CARMA_CRASH_SEED={SEED}"
    assert result.verdict.still_booked_mib == 0
    # Not those that were acknowledged: a database that is restored near the end lacks most of them.
    assert result.verdict.started > KILLS // 10, "hardly any task was started"


def test_kills_of_the_daemon_lose_nothing_and_repeat_nothing() -> None:
    result = study(KILLS, SEED, weights={"daemon": 1})
    check(result)
    assert result.kills == {"daemon": KILLS}


def test_kills_of_daemon_runners_and_commands_lose_nothing_and_repeat_nothing() -> None:
    result = study(KILLS // 3, SEED, weights=ALL, restores=3)
    check(result)
    assert sum(result.kills.values()) == KILLS // 3
    assert [copy for copy in result.copies if copy.method == "backup" and copy.problem] == []


def test_the_study_notices_lost_tasks_second_starts_and_wrong_outcomes() -> None:
    with crash_server() as server:
        stream = SubmissionStream(server, SEED)
        server.start()
        server.wait_until_serving()
        stream.start()
        until(lambda: len(stream.acknowledged) > 20, "tasks are acknowledged")
        stream.finish()
        assert judge(server, stream, Excused()).problems == ()
        first, second, third, *_ = sorted(stream.acknowledged.keys() - stream.cancelled - stream.asked_to_save)
        stream.acknowledged[10**6] = 0
        with (server.work / "runs" / str(first)).open("a") as starts:
            starts.write("1 token\n")
        with (server.work / "runs" / str(second)).open("a") as starts:
            starts.write("2 token\n")
        stream.acknowledged[third] += 1
        found = judge(server, stream, Excused())
    assert found.lost == ("task 1000000 was acknowledged and is unknown",)
    assert found.run_twice == (
        f"attempt 1 of task {first} started 2 times",
        f"attempt 2 of task {second} started and is not on record",
    )
    assert len(found.wrong_outcome) == 1
    assert str(third) in found.wrong_outcome[0]


MANY = 2_000  # tasks: more than one page of the database


def test_a_file_copy_is_torn_where_the_log_starts_again_between_its_files(tmp_path: Path) -> None:
    """Old database, new log: what the log held before is in neither. An online backup has it."""
    database, torn, whole = tmp_path / "carma.db", tmp_path / "torn", tmp_path / "whole"
    torn.mkdir()
    whole.mkdir()
    store = SqliteStore(database)
    owner = Owner(0, 0, "root")
    submitted = [
        TaskSubmitted(1.0, TaskId(task), owner, TaskSpec(command=("true",), directory="/"))
        for task in range(1, MANY + 2)
    ]
    store.append(submitted[:1])
    shutil.copyfile(database, torn / database.name)
    store.append(submitted[1:MANY])
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.append(submitted[MANY:])
    take_copy(database, whole, "backup")
    shutil.copyfile(f"{database}-wal", torn / f"{database.name}-wal")
    store.close()
    acknowledged = list(range(1, MANY + 1))
    assert examine(whole, "backup", acknowledged).problem == ""
    assert examine(torn, "naive", acknowledged).problem != ""
