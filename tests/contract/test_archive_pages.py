"""Pages of the archive, and retention: the same from every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model.events import Durable, TaskRestored, TaskSubmitted
from carma.core.model.outcome import Failed, Outcome, Succeeded
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Task
from carma.core.model.values import ArrayPlace, Owner, TaskId, TaskSpec
from carma.core.ports import Checkpoint, End, HistoryQuery
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore

AnyStore = SqliteStore | MemoryStore
ALICE, BOB = Owner(1001, 1001, "alice"), Owner(1002, 1002, "bob")
SPEC = TaskSpec(
    command=("python", "train.py", "x" * 300),
    directory="/home/alice",
    environment={f"VARIABLE_{number}": "y" * 40 for number in range(30)},
)


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyStore]:
    made: AnyStore = SqliteStore(tmp_path / "carma.db") if request.param == "sqlite" else MemoryStore()
    yield made
    made.close()


def finished(number: int, at: float, outcome: Outcome = Succeeded(), owner: Owner = ALICE) -> Task:
    return Task(id=TaskId(number), owner=owner, spec=SPEC, submitted_at=1.0, status=Finished(at, outcome))


def archive(store: AnyStore, *tasks: Task) -> None:
    events: list[Durable] = [TaskSubmitted(1.0, task.id, task.owner, task.spec) for task in tasks]
    sequence = store.append(events)
    store.save(Checkpoint(sequence=sequence, at=1.0, tasks=()), tasks)


def ids(store: AnyStore, **wanted: object) -> list[int]:
    return [task.id for task in store.page(HistoryQuery(**wanted)).tasks]  # type: ignore[arg-type]


def end_of(task: Task) -> End:
    assert isinstance(task.status, Finished)
    return task.status.at, task.id


def test_pages_follow_one_another_without_a_gap_or_a_repetition(store: AnyStore) -> None:
    archive(store, *(finished(number, at=float(number // 3)) for number in range(1, 30)))  # several end at once
    found: list[int] = []
    before: End | None = None
    sizes: list[int] = []
    while True:
        page = store.page(HistoryQuery(before=before, limit=4))
        found += [task.id for task in page.tasks]
        sizes.append(len(page.tasks))
        archive(store, finished(100 + len(sizes), at=1e6))  # what ends meanwhile is on no later page
        if not page.more:
            break
        before = end_of(page.tasks[-1])
    assert found == list(range(29, 0, -1))
    assert sizes == [4] * 7 + [1]


def test_a_page_that_holds_all_has_no_more(store: AnyStore) -> None:
    archive(store, finished(1, 1.0), finished(2, 2.0))
    assert [store.page(HistoryQuery(limit=limit)).more for limit in (1, 2, 3)] == [True, False, False]


def test_tasks_are_chosen_by_owner_end_and_outcome_together(store: AnyStore) -> None:
    failed = Failed(1, "x")
    archive(
        store,
        finished(1, 10.0),
        finished(2, 20.0, failed),
        finished(3, 30.0, failed, BOB),
        finished(4, 40.0, failed),
        finished(5, 50.0),
    )
    assert ids(store, kinds=["failed"]) == [4, 3, 2]
    assert ids(store, kinds=["failed", "succeeded"]) == [5, 4, 3, 2, 1]
    assert ids(store, kinds=[]) == ids(store, kinds=["lost"]) == []
    assert ids(store, kinds=["failed"], uid=1001, since=15.0, before=(40.0, TaskId(4))) == [2]
    assert ids(store, before=(40.0, TaskId(5))) == [4, 3, 2, 1]
    assert store.page(HistoryQuery(kinds=["failed"], uid=1001, limit=1)).more


def test_lists_leave_out_environments_and_a_single_task_is_complete(store: AnyStore) -> None:
    archive(store, finished(1, 1.0), finished(2, 2.0))
    bare = replace(SPEC, environment={})
    assert [task.spec for task in store.page().tasks] == [bare, bare]
    assert [task.spec for task in store.tasks([TaskId(2), TaskId(7)])] == [bare]
    assert store.task(TaskId(2)) == finished(2, 2.0)
    assert store.story(TaskId(2))[0] == TaskSubmitted(1.0, TaskId(2), ALICE, SPEC)
    store.append([TaskRestored(3.0, finished(2, 2.0))])
    assert list(store.tasks([TaskId(2)])) == []


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_the_oldest_tasks_are_removed_first_and_at_most_the_limit_at_a_time(store: SqliteStore) -> None:
    archive(store, *(finished(number, at=100.0 - number) for number in range(1, 6)))
    assert list(store.prune(99.0, limit=2)) == [4, 5]
    assert list(store.prune(99.0, limit=2)) == [2, 3]
    assert list(store.prune(99.0, limit=2)) == []
    assert ids(store) == [1]
    while store.shrink():
        pass
    assert store.task(TaskId(1)) == finished(1, 99.0)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_retention_leaves_what_other_tasks_have_in_common_with_removed_ones(store: SqliteStore) -> None:
    waiting = Task(
        id=TaskId(3),
        owner=ALICE,
        spec=replace(SPEC, array=ArrayPlace(TaskId(3), 0)),
        submitted_at=1.0,
        status=Queued(1.0),
    )
    archive(store, finished(1, 1.0), finished(2, 9.0))
    store.append([TaskSubmitted(1.0, TaskId(3), ALICE, waiting.spec)])
    assert list(store.prune(2.0)) == [1]
    assert store.task(TaskId(2)) == finished(2, 9.0)
    assert list(store.prune(10.0)) == [2]
    assert store.load().events == (TaskSubmitted(1.0, TaskId(3), ALICE, waiting.spec),)
    store.save(Checkpoint(sequence=3, at=1.0, tasks=(waiting,)), ())
    loaded = store.load().checkpoint
    assert loaded is not None
    assert loaded.tasks == (waiting,)
