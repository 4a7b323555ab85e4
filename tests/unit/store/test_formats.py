"""Databases of older formats: each is brought to the newest one at the first start and keeps its rows."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model.events import GpusFound, TaskFinished, TaskRestored, TaskRetried, TaskSubmitted, UseNoted
from carma.core.model.outcome import Failed, Succeeded
from carma.core.model.status import Ended, Finished, Queued, Recovering
from carma.core.model.task import Task
from carma.core.model.values import ArrayPlace, Capabilities, Gpu, GpuId, GpuUsage, Owner, TaskId, TaskSpec
from carma.core.ports import HistoryQuery
from carma.store import codec
from carma.store.sqlite import SqliteStore
from tests.unit.store.old_formats import make_old

ALICE = Owner(1001, 1001, "alice")
ENVIRONMENT = {f"VARIABLE_{number}": "x" * 50 for number in range(20)}
SPEC = TaskSpec(command=("python", "train.py", "y" * 500), directory="/", environment=ENVIRONMENT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "carma.db"


def test_a_file_of_the_first_format_takes_what_gpus_do(path: Path) -> None:
    make_old(path, 1).close()
    store = SqliteStore(path)
    row = GpuUsage(gpu=GpuId("GPU-0"), hour=5, watched_s=60.0, energy_j=600.0)
    assert store.append([UseNoted(9.0, gpus=(row,))]) == 1
    assert list(store.usage(since=0.0, until=1e9)) == [row]
    store.close()


def test_hours_of_the_second_format_are_kept(path: Path) -> None:
    connection = make_old(path, 2)
    connection.execute("INSERT INTO gpu_usage VALUES ('GPU-0', 5, 60.0, 30.0, 10.0, 20.0, 600.0, 400.0, 100.0)")
    connection.close()
    store = SqliteStore(path)
    row = GpuUsage(gpu=GpuId("GPU-0"), hour=5, watched_s=60.0, guessed_s=7.0)
    store.append([UseNoted(9.0, gpus=(row,))])
    (found,) = store.usage(since=0.0, until=1e9)
    assert (found.watched_s, found.tasks_j, found.guessed_s) == (120.0, 100.0, 7.0)
    store.close()


def queued(number: int) -> Task:
    spec = codec.read_task(codec.write(finished(1))).spec  # equal, and another object
    return Task(
        id=TaskId(number),
        owner=ALICE,
        spec=TaskSpec(
            command=spec.command,
            directory="/",
            environment=spec.environment,
            array=ArrayPlace(TaskId(3), number),
        ),
        submitted_at=1.0,
        status=Queued(1.0),
    )


def finished(number: int, outcome: Failed | Succeeded = Succeeded()) -> Task:
    status = Finished(float(number), outcome)
    return Task(id=TaskId(number), owner=ALICE, spec=SPEC, submitted_at=1.0, status=status)


def fill_format_4(connection: sqlite3.Connection) -> tuple[list[object], list[Task]]:
    """Two finished tasks (one of them restored), two that wait in the checkpoint, one event after it."""
    stories: list[object] = []
    for number, outcome in ((1, Succeeded()), (2, Failed(3, "x"))):
        told = (
            TaskSubmitted(1.0, TaskId(number), ALICE, SPEC),
            TaskFinished(float(number), TaskId(number), outcome),
            *((TaskRestored(3.0, finished(2, outcome)), TaskRetried(3.0, TaskId(2))) if number == 2 else ()),
        )
        stories.append(list(told))
        task = finished(number, outcome)
        story = f"[{','.join(codec.write(event) for event in told)}]"
        row = (number, 1001, float(number), int(number == 2), codec.write(task), story)
        connection.execute("INSERT INTO finished VALUES (?, ?, ?, ?, ?, ?)", row)
    live = [queued(3), queued(4)]
    connection.executemany("INSERT INTO live VALUES (?, ?)", [(task.id, codec.write(task)) for task in live])
    connection.execute("""INSERT INTO checkpoint VALUES (1, 7, '{"sequence":7,"at":1.0,"tasks":[]}', '[4,3]')""")
    event = TaskSubmitted(8.0, TaskId(5), ALICE, SPEC)
    connection.execute("INSERT INTO events VALUES (8, 8.0, 5, ?)", (codec.write(event),))
    connection.execute("UPDATE meta SET value = 6 WHERE name = 'next_task_id'")
    return stories, live


def test_a_file_of_the_fourth_format_keeps_everything_and_stores_environments_once(path: Path) -> None:
    connection = make_old(path, 4)
    stories, live = fill_format_4(connection)
    connection.close()
    store = SqliteStore(path)
    loaded = store.load()
    assert loaded.checkpoint is not None
    assert loaded.checkpoint.tasks == (live[1], live[0])
    assert loaded.events == (TaskSubmitted(8.0, TaskId(5), ALICE, SPEC),)
    assert loaded.sequence == 8
    assert (store.task(TaskId(1)), store.task(TaskId(2))) == (finished(1), None)
    assert [list(store.story(TaskId(number))) for number in (1, 2)] == stories
    assert [task.id for task in store.page(HistoryQuery(kinds=["succeeded"])).tasks] == [1]
    assert store.new_task_ids(1) == 6
    store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM parts").fetchone() == (2,)
        texts = [
            row[0]
            for table, column in (("events", "body"), ("live", "body"), ("finished", "body"), ("finished", "story"))
            for row in connection.execute(f"SELECT {column} FROM {table}")
        ]
        assert len(texts) == 7
        assert max(map(len, texts)) < 2_000
        assert not any("VARIABLE_1" in text for text in texts)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # INCREMENTAL
    connection.close()


def test_a_task_of_the_fifth_format_whose_attempt_had_just_ended_has_ended(path: Path) -> None:
    connection = make_old(path, 5)
    recovering = {"state": "recovering", "since": 5.0, "until": 9.0, "held": True}
    statuses = ({"state": "recovering", "since": 5.0}, recovering | {"until": None}, recovering)
    for number, status in enumerate(statuses, 1):
        body = {
            "id": number,
            "owner": {"uid": 1001, "gid": 1001, "name": "alice"},
            "spec": {"command": ["true"], "directory": "/"},
            "submitted_at": 1.0,
            "status": status,
            "attempts": [
                {
                    "number": 1,
                    "placement": {"gpus": ["GPU-0"], "booking": {"memory_mib": 5, "source": "declared"}},
                    "placed_at": 2.0,
                    "outcome": {"kind": "failed", "code": 3},
                }
            ],
        }
        connection.execute("INSERT INTO live VALUES (?, ?)", (number, json.dumps(body)))
    connection.execute("""INSERT INTO checkpoint VALUES (1, 7, '{"sequence":7,"at":1.0,"tasks":[]}', '[1,2,3]')""")
    connection.close()
    store = SqliteStore(path)
    loaded = store.load().checkpoint
    assert loaded is not None
    assert [task.status for task in loaded.tasks] == [
        Ended(5.0, Failed(3)),
        Ended(5.0, Failed(3), held=True),
        Recovering(5.0, 9.0, held=True),
    ]
    store.close()


def test_the_metrics_of_a_gpu_of_the_fifth_format_are_a_list_of_their_names(path: Path) -> None:
    connection = make_old(path, 5)
    gpu = {"id": "GPU-0", "index": 0, "name": "Test", "memory_mib": 5}
    capabilities = {"sm_active": True, "dram_active": False, "gr_active": True, "power": True, "source": "gpm"}
    known = json.dumps({"sequence": 7, "at": 1.0, "tasks": [], "gpus": [gpu, gpu | {"capabilities": capabilities}]})
    connection.execute("INSERT INTO checkpoint VALUES (1, 7, ?, '[]')", (known,))
    found = json.dumps({"event": "gpus_found", "at": 8.0, "gpus": [gpu | {"capabilities": capabilities}]})
    noted = json.dumps({"event": "use_noted", "at": 9.0, "gpus": [{"gpu": "GPU-0", "hour": 1}]})
    connection.executemany("INSERT INTO events VALUES (?, 8.0, NULL, ?)", [(8, found), (9, noted)])
    connection.close()
    store = SqliteStore(path)
    loaded = store.load()
    expected = Gpu(
        id=GpuId("GPU-0"),
        index=0,
        name="Test",
        memory_mib=5,
        capabilities=Capabilities(metrics=("sm_active", "gr_active"), power=True, source="gpm"),
    )
    assert loaded.checkpoint is not None
    assert loaded.checkpoint.gpus == (replace(expected, capabilities=Capabilities()), expected)
    usage = GpuUsage(gpu=GpuId("GPU-0"), hour=1)
    assert loaded.events == (GpusFound(8.0, (expected,)), UseNoted(9.0, gpus=(usage,)))
    store.close()


def test_a_fourth_format_that_cannot_be_vacuumed_for_lack_of_room_is_opened_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = make_old(path, 4)
    fill_format_4(connection)
    connection.close()

    class Full:
        f_bavail, f_frsize, f_files, f_favail = 1, 4096, 1, 1

    with monkeypatch.context() as patched:
        patched.setattr("os.statvfs", lambda _path: Full)
        store = SqliteStore(path)
    assert store.load().sequence == 8
    assert store.shrink() == 0
    assert "cannot be shrunk" in caplog.text
    store.close()
    store = SqliteStore(path)  # with room again
    assert store._database._connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert store.load().sequence == 8
    store.close()
