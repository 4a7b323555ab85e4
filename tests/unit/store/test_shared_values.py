"""Environments and long commands are stored once and are one object in memory, for arrays and for single tasks."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model.events import TaskRestored, TaskSubmitted
from carma.core.model.outcome import Succeeded
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Task
from carma.core.model.values import ArrayPlace, Owner, TaskId, TaskSpec
from carma.core.ports import Checkpoint, HistoryQuery
from carma.errors import StoreError
from carma.store.codec import INLINE_BYTES
from carma.store.sqlite import SqliteStore

ALICE = Owner(1001, 1001, "alice")
COUNT = 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "carma.db"


def spec_of(number: int = 0, size: int = 20_000) -> TaskSpec:
    """An equal spec is another object each time."""
    environment = {"PATH": "/bin", "LONG": "".join(["e"] * size)}
    return TaskSpec(command=("train", "".join(["c"] * size)), directory="/", environment=environment, name=str(number))


def array(first: int, count: int = COUNT) -> list[TaskSubmitted]:
    spec = spec_of()
    return [
        TaskSubmitted(1.0, TaskId(number), ALICE, replace(spec, array=ArrayPlace(TaskId(first), number)))
        for number in range(first, first + count)
    ]


def task_of(event: TaskSubmitted, *, finished: bool = False) -> Task:
    status = Finished(float(event.task), Succeeded()) if finished else Queued(1.0)
    return Task(id=event.task, owner=ALICE, spec=event.spec, submitted_at=1.0, status=status)


def objects(tasks: list[TaskSubmitted] | list[Task]) -> tuple[int, int]:
    return len({id(task.spec.environment) for task in tasks}), len({id(task.spec.command) for task in tasks})


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


def test_an_array_is_small_on_disk_and_shared_in_memory_through_its_whole_life(path: Path) -> None:
    store = SqliteStore(path)
    events = array(1)
    store.append(events)
    store.close()
    once = sum(map(len, ("e" * 20_000, "c" * 20_000)))
    assert size_of(path) < 3 * once + COUNT * 1_000

    store = SqliteStore(path)
    replayed = store.load().events
    assert list(replayed) == events
    assert objects(list(replayed)) == (1, 1)  # type: ignore[arg-type]
    tasks = [task_of(event) for event in replayed if isinstance(event, TaskSubmitted)]
    store.save(Checkpoint(sequence=COUNT, at=1.0, tasks=tuple(tasks)), ())
    store.close()

    store = SqliteStore(path)
    checkpoint = store.load().checkpoint
    assert checkpoint is not None
    assert list(checkpoint.tasks) == tasks
    assert objects(list(checkpoint.tasks)) == (1, 1)
    store.save(Checkpoint(sequence=COUNT, at=1.0, tasks=()), [task_of(event, finished=True) for event in events])
    page = store.page(HistoryQuery(limit=COUNT)).tasks
    assert len({id(task.spec.command) for task in page}) == 1
    assert store.task(TaskId(7)) == task_of(events[6], finished=True)
    assert list(store.story(TaskId(7))) == [events[6]]
    store.close()
    assert size_of(path) < 3 * once + COUNT * 6_000
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*), max(length(body)) FROM parts").fetchone()[0] == 2
    connection.close()


def test_tasks_that_are_submitted_one_by_one_share_too(path: Path) -> None:
    store = SqliteStore(path)
    specs: list[TaskSpec] = []
    for number in range(1, 6):
        specs.append(store.shared(spec_of(number)))
        store.append([TaskSubmitted(1.0, TaskId(number), ALICE, specs[-1])])
    assert [spec.name for spec in specs] == ["1", "2", "3", "4", "5"]
    assert {id(spec.environment) for spec in specs} == {id(specs[0].environment)}
    assert {id(spec.command) for spec in specs} == {id(specs[0].command)}
    assert store._database._connection.execute("SELECT count(*) FROM parts").fetchone() == (2,)
    assert objects(list(store.load().events)) == (1, 1)  # type: ignore[arg-type]
    store.close()


def test_a_restored_task_shares_values_with_waiting_tasks(path: Path) -> None:
    store = SqliteStore(path)
    events = array(1, 3)
    store.append(events)
    waiting = [task_of(event) for event in events[1:]]
    store.save(Checkpoint(sequence=3, at=1.0, tasks=tuple(waiting)), [task_of(events[0], finished=True)])
    found = store.task(TaskId(1))
    assert found is not None
    assert found.spec.environment is waiting[0].spec.environment
    store.append([TaskRestored(2.0, found)])
    assert store.load().events == (TaskRestored(2.0, found),)
    store.close()


def test_parts_go_with_the_last_task_that_uses_them(path: Path) -> None:
    store = SqliteStore(path)
    store.append([*array(1, 2), TaskSubmitted(1.0, TaskId(9), ALICE, spec_of(size=30_000))])
    done = [task_of(event, finished=True) for event in array(1, 2)]
    alone = task_of(TaskSubmitted(1.0, TaskId(9), ALICE, spec_of(size=30_000)), finished=True)
    store.save(Checkpoint(sequence=3, at=1.0, tasks=()), [*done, alone])

    def parts() -> int:
        return int(store._database._connection.execute("SELECT count(*) FROM parts").fetchone()[0])

    assert parts() == 4
    store.prune(1.5)
    assert parts() == 4
    store.prune(2.5)
    assert parts() == 2
    store.prune(1e9)
    assert parts() == 0
    store.append(array(20, 1))  # what is no longer there is stored again
    store.close()
    store = SqliteStore(path)
    assert store.load().events[-1] == array(20, 1)[0]
    store.close()


def test_a_store_that_was_not_loaded_removes_no_parts(path: Path) -> None:
    """It does not know what the tasks that wait refer to."""
    store = SqliteStore(path)
    events = array(1, 2)
    store.append(events)
    store.save(Checkpoint(sequence=2, at=1.0, tasks=(task_of(events[1]),)), [task_of(events[0], finished=True)])
    store.close()
    store = SqliteStore(path)
    assert list(store.prune(1e9)) == [1]
    checkpoint = store.load().checkpoint
    assert checkpoint is not None
    assert checkpoint.tasks == (task_of(events[1]),)
    store.close()


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        ({}, ("true",)),
        ({"": "0123"}, ("", "0123")),  # look like references
        ({"": "0123", "A": "b"}, ("",)),
        ({"A": "b" * INLINE_BYTES}, ("true", "x" * INLINE_BYTES)),
        ({"Ä": "ö" * 100}, ("日本" * 100, "")),
        ({"A": "b" * INLINE_BYTES}, ()),
    ],
)
def test_every_environment_and_command_comes_back_equal(
    path: Path, environment: dict[str, str], command: tuple[str, ...]
) -> None:
    event = TaskSubmitted(1.0, TaskId(1), ALICE, TaskSpec(command=command, directory="/", environment=environment))
    store = SqliteStore(path)
    store.append([event])
    store.save(Checkpoint(sequence=1, at=1.0, tasks=()), [task_of(event, finished=True)])
    store.append([replace(event, task=TaskId(2))])
    store.close()
    store = SqliteStore(path)
    assert store.load().events == (replace(event, task=TaskId(2)),)
    assert store.task(TaskId(1)) == task_of(event, finished=True)
    assert [task.spec.command for task in store.page().tasks] == [command]
    store.close()


def test_a_part_that_is_missing_is_damage(path: Path) -> None:
    store = SqliteStore(path)
    store.append(array(1, 1))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM parts")
    connection.close()
    store = SqliteStore(path)
    with pytest.raises(StoreError, match="damaged"):
        store.load()
    store.close()


def test_a_page_with_long_commands_ends_early_and_says_that_there_is_more(path: Path) -> None:
    store = SqliteStore(path)
    events = [
        TaskSubmitted(1.0, TaskId(number), ALICE, TaskSpec(command=(f"{number}" + "x" * 1_000_000,), directory="/"))
        for number in range(1, 21)
    ]
    for event in events:
        store.append([event])
    store.save(Checkpoint(sequence=20, at=1.0, tasks=()), [task_of(event, finished=True) for event in events])
    page = store.page(HistoryQuery(limit=100))
    assert 0 < len(page.tasks) < 12
    assert page.more
    last = page.tasks[-1]
    assert isinstance(last.status, Finished)
    rest = store.page(HistoryQuery(limit=1, before=(last.status.at, last.id)))
    assert rest.tasks[0].id == last.id - 1
    store.close()


def test_the_file_gets_smaller_when_tasks_are_removed(path: Path) -> None:
    store = SqliteStore(path)
    for start in range(1, 2_001, 500):
        events = [
            TaskSubmitted(1.0, TaskId(number), ALICE, TaskSpec(command=("x",), directory="/", comment="y" * 1_000))
            for number in range(start, start + 500)
        ]
        sequence = store.append(events)
        store.save(Checkpoint(sequence=sequence, at=1.0, tasks=()), [task_of(one, finished=True) for one in events])
    while len(store.prune(1_900.0)):
        pass
    steps = [store.shrink()]
    while steps[-1]:
        steps.append(store.shrink())
    assert len(steps) > 3  # in small steps
    assert path.stat().st_size < 2_000_000
    assert path.with_name("carma.db-wal").stat().st_size == 0
    assert [task.id for task in store.page(HistoryQuery(limit=2)).tasks] == [2_000, 1_999]
    store.close()
