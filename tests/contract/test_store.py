"""What every store keeps to, whatever it is made of: SQLite's file and the one in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from carma.core.model import events as e
from carma.core.model.outcome import Cancelled, Disrupted, OutOfMemory, Succeeded
from carma.core.model.status import Finished, Queued
from carma.core.model.task import Plan, Task
from carma.core.model.values import (
    Activity,
    AttemptKey,
    Booking,
    Confinement,
    Estimate,
    Gpu,
    GpuId,
    GpuUsage,
    Guard,
    NoEstimate,
    Owner,
    Placement,
    TaskId,
    TaskSpec,
)
from carma.core.ports import Checkpoint, HistoryQuery, PastRun
from carma.errors import StoreError
from carma.store.archive import RUNS_KEPT
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore

AnyStore = SqliteStore | MemoryStore
Reopen = Callable[[AnyStore], AnyStore]
ALICE = Owner(1001, 1001, "alice")
SPEC = TaskSpec(
    command=("python", "train.py", "--name", "naïve \0 日本"), directory="/home/alice", environment={"A": "b"}
)
GPU = Gpu(id=GpuId("GPU-0"), index=0, name="Test GPU", memory_mib=40_960)
PLACEMENT = Placement(gpus=(GPU.id,), booking=Booking(memory_mib=4_096, source="declared"))


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyStore]:
    made: AnyStore = SqliteStore(tmp_path / "carma.db") if request.param == "sqlite" else MemoryStore()
    yield made
    made.close()


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """Ends one store and starts another on what it left behind."""
    opened: list[AnyStore] = []

    def again(store: AnyStore) -> AnyStore:
        store.close()
        if isinstance(store, MemoryStore):
            store.reopen()
            return store
        opened.append(SqliteStore(tmp_path / "carma.db"))
        return opened[-1]

    yield again
    for store in opened:
        store.close()


def submitted(task: int, at: float = 1.0) -> e.TaskSubmitted:
    return e.TaskSubmitted(at, TaskId(task), ALICE, SPEC)


def finished(task: int, at: float = 9.0, owner: Owner = ALICE) -> Task:
    status = Finished(at, Succeeded())
    return Task(id=TaskId(task), owner=owner, spec=SPEC, submitted_at=1.0, status=status)


def queued(task: int) -> Task:
    return Task(id=TaskId(task), owner=ALICE, spec=SPEC, submitted_at=1.0, status=Queued(1.0))


def past_run(task: int, ended_at: float = 5.0, **changes: object) -> PastRun:
    run = PastRun(
        key=AttemptKey(TaskId(task), 1),
        uid=1001,
        command=SPEC.command,
        directory=SPEC.directory,
        gpus=1,
        gpu_model="Test GPU",
        peak_mib=4_000,
        runtime_s=60.0,
        succeeded=True,
        collocated=False,
        ended_at=ended_at,
    )
    return msgspec.structs.replace(run, **changes)


def every_event() -> tuple[e.Durable, ...]:
    task, key = TaskId(1), AttemptKey(TaskId(1), 1)
    plan = Plan(rung="larger", memory_mib=8_192, reason="it held 4 GiB and asked for 2 more")
    held = Confinement(mechanism="mps", guards=(Guard(rung="mps", limit_mib=8_192, how="x"),), note="why")
    busy = Activity(sm_active=0.25, tensor_active=0.1)
    seen = e.AttemptUse(key=key, peak_mib=3_000, energy_j=1.5, activity=busy, used_s=9.0, settled=True)
    return (
        e.GpusFound(0.5, (GPU,)),
        submitted(1),
        e.TaskEstimated(1.1, task, None, (NoEstimate(source="history", reason="never ran"),)),
        e.TaskEstimated(1.2, task, Estimate(footprint_mib=1, upper_mib=2, source="declared", warnings=("w",))),
        e.TaskHeld(1.3, task),
        e.TaskReleased(1.4, task),
        e.TaskChanged(1.5, task, priority=3),
        e.TaskPlaced(1.6, key, PLACEMENT, "the most room"),
        e.AttemptStarted(1.7, key, 4321, held),
        e.MemoryObserved(1.8, key, 3_000, 12.5, busy, 60.0),
        e.BookingShrunk(1.85, key, 6_000, 3_256, 3_000),
        e.UseNoted(1.85, (seen,), (used("a", 1, 8.0),), {GPU.id: 50.0}),
        e.TaskWarned(1.9, task, 10),
        e.PreemptionRequested(1.92, task, "alice", 12, 30.0, "room", True, TaskId(2)),
        e.PreemptionMissed(1.95, task),
        e.TaskPaused(1.96, task, "alice", "a demo", 2.5),
        e.TaskUnpaused(1.97, task, "carma", "its time is over"),
        e.IdleNoted(1.98, task, 0.5, "pack"),
        e.IdleOver(1.99, task),
        e.NoticeDue(1.99, task),
        e.NoticeSent(1.99, task, "wait", 1.99, ("e-mail",), ("webhook: refused",)),
        e.AttemptEnded(2.0, key, OutOfMemory("gpu", 1, 2_048, 3_000, "CUDA oom"), 3_000, 12.5, (key,), busy, 9.0),
        e.RecoveryPlanned(2.1, task, plan, 4.0),
        e.RecoveryDue(4.0, task),
        e.StopRequested(4.5, task, OutOfMemory("gpu", 137, None, 9_000, "the watchdog"), 0.0, 9),
        e.StopRequested(4.6, task, Disrupted("the MPS server ended"), 2.0),
        e.StopRequested(5.0, task, Cancelled("alice", "enough"), 10.0),
        e.TaskFinished(6.0, task, Cancelled("alice", "enough")),
        e.TaskRestored(6.5, finished(1)),
        e.TaskRetried(7.0, task, True),
        e.GpuDrained(8.0, None, "maintenance"),
        e.GpuResumed(9.0, None),
    )


def test_a_new_store_is_empty(store: AnyStore) -> None:
    loaded = store.load()
    assert (loaded.checkpoint, loaded.events, loaded.sequence) == (None, (), 0)
    assert store.task(TaskId(1)) is None
    assert list(store.page().tasks) == []
    assert list(store.story(TaskId(1))) == []


def test_every_kind_of_event_comes_back_equal_after_a_restart(store: AnyStore, reopen: Reopen) -> None:
    events = every_event()
    assert {type(event) for event in events} == set(e.Durable.__args__)
    assert store.append(events[:3]) == 3
    assert store.append(events[3:]) == len(events)
    loaded = reopen(store).load()
    assert loaded.events == events
    assert loaded.sequence == len(events)


def test_an_empty_append_changes_nothing(store: AnyStore) -> None:
    store.append([submitted(1)])
    assert store.append([]) == 1
    assert store.load().sequence == 1


def test_an_event_that_could_not_be_read_again_is_refused_with_all_its_batch(store: AnyStore) -> None:
    store.append([submitted(1)])
    with pytest.raises(StoreError, match="cannot be stored"):
        store.append([submitted(2), submitted(3, at=math.nan)])
    lone = msgspec.structs.replace(SPEC, name="\udcff")
    with pytest.raises(StoreError, match="cannot be stored"):
        store.append([e.TaskSubmitted(1.0, TaskId(2), ALICE, lone)])
    assert store.load().events == (submitted(1),)
    assert store.append([submitted(4)]) == 2


def test_a_checkpoint_replaces_the_events_before_it(store: AnyStore, reopen: Reopen) -> None:
    store.append([e.GpusFound(0.5, (GPU,)), submitted(2), submitted(1)])
    checkpoint = Checkpoint(
        sequence=3,
        at=1.0,
        tasks=(queued(2), queued(1)),  # in the queue's order, which is not the order of the ids
        gpus=(GPU,),
        drained={"": "maintenance"},
        last_gpu=GPU.id,
        overtaken={2: 7},
    )
    store.save(checkpoint, ())
    store.append([submitted(3)])
    loaded = reopen(store).load()
    assert loaded.checkpoint == checkpoint
    assert loaded.events == (submitted(3),)
    assert loaded.sequence == 4


def test_checkpoints_follow_one_another_across_restarts(store: AnyStore, reopen: Reopen) -> None:
    store.append([submitted(number) for number in (1, 2, 3)])
    one, two, three = queued(1), queued(2), queued(3)
    store.save(Checkpoint(sequence=3, at=1.0, tasks=(one, two, three)), ())
    held = msgspec.structs.replace(two, status=Queued(2.0, held=True))
    store.append([e.TaskHeld(2.0, TaskId(2)), e.TaskFinished(3.0, TaskId(1), Succeeded())])
    store.save(Checkpoint(sequence=5, at=3.0, tasks=(held, three)), [finished(1)])
    store = reopen(store)
    assert store.load().checkpoint == Checkpoint(sequence=5, at=3.0, tasks=(held, three))
    store.append([e.TaskFinished(4.0, TaskId(3), Succeeded())])
    store.save(Checkpoint(sequence=6, at=4.0, tasks=(held,)), [finished(3)])
    loaded = reopen(store).load()
    assert loaded.checkpoint == Checkpoint(sequence=6, at=4.0, tasks=(held,))
    assert (loaded.events, loaded.sequence) == ((), 6)


def test_a_checkpoint_out_of_order_or_of_an_unfinished_task_is_refused_whole(store: AnyStore) -> None:
    store.append([submitted(1), submitted(2)])
    store.save(Checkpoint(sequence=1, at=1.0, tasks=(queued(1),)), ())
    before = store.load()
    for checkpoint, leaving in (
        (Checkpoint(sequence=0, at=1.0, tasks=()), []),
        (Checkpoint(sequence=3, at=1.0, tasks=()), []),
        (Checkpoint(sequence=2, at=1.0, tasks=()), [finished(2), queued(1)]),
    ):
        with pytest.raises(ValueError, match=r"checkpoint|has not finished"):
            store.save(checkpoint, leaving)
    assert store.load() == before
    assert list(store.page().tasks) == []


def test_sequence_numbers_go_on_after_every_event_was_dropped(store: AnyStore, reopen: Reopen) -> None:
    store.append([e.GpusFound(0.5, (GPU,))])
    store.save(Checkpoint(sequence=1, at=1.0, tasks=()), ())
    store = reopen(store)
    assert store.load().sequence == 1
    assert store.append([submitted(1)]) == 2


def test_task_ids_are_never_given_twice(store: AnyStore, reopen: Reopen) -> None:
    given: list[int] = []
    for count in (1, 3, 40, 1):
        first = store.new_task_ids(count)
        given.extend(range(first, first + count))
    store = reopen(store)  # nothing was submitted with them: they stay given
    given.append(store.new_task_ids(1))
    assert given == list(range(1, 47))
    with pytest.raises(ValueError, match="at least one"):
        store.new_task_ids(0)


def test_the_archive_gives_finished_tasks_newest_end_first(store: AnyStore, reopen: Reopen) -> None:
    bob = Owner(1002, 1002, "bob")
    store.append([submitted(number) for number in (1, 2, 3, 4)])
    done = [finished(1, at=10.0), finished(2, at=30.0, owner=bob), finished(3, at=20.0), finished(4, at=30.0)]
    store.save(Checkpoint(sequence=4, at=30.0, tasks=()), done)
    store = reopen(store)
    assert [task.id for task in store.page().tasks] == [4, 2, 3, 1]
    assert [task.id for task in store.page(HistoryQuery(uid=1001)).tasks] == [4, 3, 1]
    assert [task.id for task in store.page(HistoryQuery(since=20.0)).tasks] == [4, 2, 3]
    assert [task.id for task in store.page(HistoryQuery(uid=1001, since=20.0, limit=1)).tasks] == [4]
    assert store.page(HistoryQuery(limit=0)) == ([], False)
    assert store.task(TaskId(2)) == done[1]
    assert store.task(TaskId(5)) is None


def test_a_story_survives_checkpoints_the_archive_and_a_retry(store: AnyStore, reopen: Reopen) -> None:
    told: list[e.Durable] = [submitted(1), e.TaskHeld(2.0, TaskId(1))]
    store.append([submitted(2), *told])
    store.save(Checkpoint(sequence=3, at=2.0, tasks=(queued(1), queued(2))), ())
    assert list(store.story(TaskId(1))) == told  # live, before the checkpoint
    ended = e.TaskFinished(3.0, TaskId(1), Succeeded())
    store.append([ended])
    store.save(Checkpoint(sequence=4, at=3.0, tasks=(queued(2),)), [finished(1)])
    store = reopen(store)
    assert list(store.story(TaskId(1))) == [*told, ended]  # archived
    again: list[e.Durable] = [e.TaskRestored(4.0, finished(1)), e.TaskRetried(4.0, TaskId(1))]
    store.append(again)
    assert list(store.story(TaskId(1))) == [*told, ended, *again]  # live again
    store.save(Checkpoint(sequence=6, at=5.0, tasks=(queued(2),)), [finished(1, at=5.0)])
    assert list(reopen(store).story(TaskId(1))) == [*told, ended, *again]  # archived again


def test_a_restored_task_is_no_longer_in_the_archive(store: AnyStore) -> None:
    store.append([submitted(1)])
    store.save(Checkpoint(sequence=1, at=9.0, tasks=()), [finished(1)])
    store.append([e.TaskRestored(10.0, finished(1))])
    assert store.task(TaskId(1)) is None
    assert list(store.page().tasks) == []
    store.save(Checkpoint(sequence=2, at=11.0, tasks=()), [finished(1, at=11.0)])
    assert store.task(TaskId(1)) == finished(1, at=11.0)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_pruning_forgets_what_ended_before_and_nothing_else(store: SqliteStore) -> None:
    store.append([submitted(1), submitted(2), submitted(3)])
    store.remember(past_run(1))
    store.save(Checkpoint(sequence=3, at=9.0, tasks=()), [finished(1, 10.0), finished(2, 20.0), finished(3, 5.0)])
    assert list(store.prune(20.0)) == [1, 3]
    assert [task.id for task in store.page().tasks] == [2]
    assert list(store.story(TaskId(1))) == []
    assert list(store.story(TaskId(2))) == [submitted(2)]
    assert len(store.past_runs(uid=1001, command=SPEC.command, directory=SPEC.directory)) == 1


def test_past_runs_are_of_the_same_user_command_and_directory(store: AnyStore, reopen: Reopen) -> None:
    store.remember(past_run(1, ended_at=5.0))
    store.remember(past_run(2, ended_at=7.0, peak_mib=None))
    store.remember(past_run(3, uid=1002))
    store.remember(past_run(4, directory="/home/alice/other"))
    store.remember(past_run(5, command=(*SPEC.command, "--batch", "64")))
    store.remember(past_run(6, command=("python", "train.py --name naïve \0 日本")))
    store = reopen(store)
    found = store.past_runs(uid=1001, command=SPEC.command, directory=SPEC.directory)
    assert list(found) == [past_run(2, ended_at=7.0, peak_mib=None), past_run(1, ended_at=5.0)]
    newest = store.past_runs(uid=1001, command=SPEC.command, directory=SPEC.directory, limit=1)
    assert [run.key.task for run in newest] == [2]


def test_remembering_a_run_twice_keeps_the_first_report(store: AnyStore) -> None:
    store.remember(past_run(1))
    store.remember(past_run(1, peak_mib=None))
    assert list(store.past_runs(uid=1001, command=SPEC.command, directory=SPEC.directory)) == [past_run(1)]


def test_past_runs_of_one_command_do_not_grow_without_end(store: AnyStore) -> None:
    for number in range(1, RUNS_KEPT + 4):
        store.remember(past_run(number, ended_at=float(number)))
    kept = store.past_runs(uid=1001, command=SPEC.command, directory=SPEC.directory, limit=10_000)
    assert [run.key.task for run in kept] == list(range(RUNS_KEPT + 3, 3, -1))


def test_a_past_run_keeps_its_energy_and_activity(store: AnyStore, reopen: Reopen) -> None:
    run = past_run(1, energy_j=1234.5, activity=Activity(sm_active=0.5, gr_active=0.9))
    store.remember(run)
    again = reopen(store)
    assert list(again.past_runs(uid=1001, command=SPEC.command, directory=SPEC.directory)) == [run]


def used(gpu: str, hour: int, seconds: float) -> GpuUsage:
    return GpuUsage(
        gpu=GpuId(gpu),
        hour=hour,
        watched_s=seconds,
        held_s=seconds / 2,
        shared_s=seconds / 4,
        sm_s=seconds / 8,
        energy_j=seconds * 100,
        idle_j=seconds * 50,
        tasks_j=seconds * 40,
        guessed_s=seconds / 5,
    )


def noted(*rows: GpuUsage) -> e.UseNoted:
    return e.UseNoted(1.0, gpus=rows)


def test_what_gpus_did_adds_up_by_gpu_and_hour(store: AnyStore, reopen: Reopen) -> None:
    store.append([noted(used("b", 10, 60.0), used("a", 11, 60.0))])
    store.append([noted(used("b", 10, 40.0), used("a", 10, 8.0)), submitted(1), noted(used("a", 10, 8.0)), noted()])
    rows = reopen(store).usage(since=0.0, until=1e9)
    assert list(rows) == [used("a", 10, 16.0), used("b", 10, 100.0), used("a", 11, 60.0)]


def test_an_hour_belongs_to_the_span_in_which_it_begins(store: AnyStore) -> None:
    store.append([noted(*(used("a", hour, 1.0) for hour in range(10, 14)))])
    assert [row.hour for row in store.usage(since=11 * 3600.0, until=13 * 3600.0)] == [11, 12]
    assert [row.hour for row in store.usage(since=11 * 3600.0 + 0.5, until=13 * 3600.0 + 0.5)] == [12, 13]
    assert list(store.usage(since=20 * 3600.0, until=30 * 3600.0)) == []


def test_a_closed_store_says_so(store: AnyStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.append([submitted(1)])
    with pytest.raises(StoreError, match="closed"):
        store.load()
    with pytest.raises(StoreError, match="closed"):
        store.new_task_ids(1)
