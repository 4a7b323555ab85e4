"""Each route over a real socket: what it answers, and what it leaves behind in the log."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from carma import errors
from carma.core.model.events import StopRequested, TaskChanged, TaskRestored, TaskSubmitted
from carma.core.model.outcome import Failed
from carma.core.model.status import Finished
from carma.core.model.values import Dependency, TaskId
from carma.wire.api_types import ArrayAsk, UpdateRequest
from tests.unit.daemon.api_server import LIMIT_S, Served, serving, until


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def finished(served: Served, *command: str, outcome: Failed | None = None) -> int:
    task = served.client().submit(served.request(*command)).ids[0]
    served.estimated(task)
    served.end(served.place(task), outcome)
    return task


def test_a_submission_is_in_the_log_before_it_is_acknowledged(served: Served) -> None:
    answer = served.client().submit(served.request("true", name="first"))
    assert answer.ids == (1,)
    event = served.store.load().events[-1]
    assert isinstance(event, TaskSubmitted)
    assert event.spec.name == "first"
    assert (event.owner.uid, event.owner.name) == (500, "carmad")


def test_a_task_is_shown_from_submission_to_its_end(served: Served) -> None:
    client = served.client()
    task = client.submit(served.request("sleep", "5", gpu_memory_mib=3_000)).ids[0]
    view = client.task(task)
    assert (view.state, view.code, view.reason_code) == ("estimating", "PD", "Estimating")
    served.estimated(task)
    assert client.task(task).state == "queued"
    key = served.place(task, 1)
    view = client.task(task)
    assert (view.state, view.code, view.reason, view.gpu_indices, view.booking_mib) == ("running", "R", "", (1,), 4_000)
    served.end(key, Failed(7, "boom"))
    view = client.task(task)
    assert (view.state, view.code, view.exit_code, view.observed_mib) == ("finished", "F", 7, 3_000)
    assert view.outcome == {"kind": "failed", "code": 7, "message": "boom"}
    assert view.attempts[0].stdout.endswith("1.1/stdout.log")
    assert client.tasks() == []
    assert [entry.id for entry in client.history()] == [task]


def test_a_waiting_task_says_why(served: Served) -> None:
    client = served.client()
    first = client.submit(served.request("sleep", "9", gpus=2, exclusive=True)).ids[0]
    second = client.submit(served.request("sleep", "9")).ids[0]
    served.estimated(first, second)
    served.place(first, 0, 1, alone=True)
    view = next(entry for entry in client.tasks() if entry.id == second)
    assert view.reason_code == "Exclusive"
    assert f"task {first} has it alone" in view.reason
    explained = client.explain(second)
    assert [(entry.index, entry.accepted, entry.code) for entry in explained.entries] == [
        (0, False, "Exclusive"),
        (1, False, "Exclusive"),
    ]
    assert explained.needs_mib == 5_120


def test_an_array_gets_consecutive_ids_and_its_indices(served: Served) -> None:
    client = served.client()
    client.submit(served.request())
    answer = client.submit(served.request(array=ArrayAsk((3, 5, 9), at_once=2)))
    assert answer.ids == (2, 3, 4)
    assert [view.array for view in client.tasks()][1:] == ["2[3]", "2[5]", "2[9]"]


def test_a_dry_run_tells_and_does_nothing(served: Served) -> None:
    client = served.client()
    before = served.shell.sequence
    answer = client.submit(served.request(dry_run=True))
    assert answer.ids == ()
    assert answer.note == "would start on GPU 0 now, 5.0 GiB booked (memory unknown)"
    assert [entry.chosen for entry in answer.explain] == [True, False]
    held = client.submit(served.request(dry_run=True, held=True))
    assert "would wait: held" in held.note
    assert served.shell.sequence == before
    assert client.submit(served.request()).ids == (1,)


def test_nonblock_is_refused_with_the_reason_and_uses_no_id(served: Served) -> None:
    client = served.client()
    assert client.submit(served.request("sleep", "9", gpus=2, exclusive=True, nonblock=True)).ids == (1,)
    served.estimated(1)
    served.place(1, 0, 1, alone=True)
    with pytest.raises(errors.NoCapacity, match="task 1") as caught:
        client.submit(served.request(nonblock=True))
    assert caught.value.exit_code == 75
    assert client.submit(served.request()).ids == (2,)


def test_dependencies_on_finished_tasks_are_settled_at_once(served: Served) -> None:
    client = served.client()
    good, bad = finished(served), finished(served, outcome=Failed(1, "its own words"))
    served.archive()
    waiting = client.submit(served.request()).ids[0]
    after = (Dependency(TaskId(good)), Dependency(TaskId(bad), "notok"), Dependency(TaskId(waiting)))
    task = client.submit(served.request(after=after)).ids[0]
    assert client.task(task).after == (f"ok:{waiting}",)
    with pytest.raises(errors.Refused, match=rf"task {bad} to succeed, but that task failed with exit code 1$"):
        client.submit(served.request(after=(Dependency(TaskId(bad)),)))
    with pytest.raises(errors.NotFound, match="no task 99"):
        client.submit(served.request(after=(Dependency(TaskId(99)),)))


def test_cancel_ends_a_waiting_task_and_stops_a_running_one(served: Served) -> None:
    client = served.client()
    waiting, running = client.submit(served.request(array=ArrayAsk((0, 1)))).ids
    served.estimated(waiting, running)
    served.place(running)
    assert "cancelled" in client.cancel(waiting, reason="no longer wanted").note
    assert client.task(waiting).reason == "cancelled by carmad: no longer wanted"
    assert "being stopped" in client.cancel(running, signal=9).note
    assert client.task(running).code == "CG"
    event = served.store.load().events[-1]
    assert isinstance(event, StopRequested)
    assert (event.signal, event.grace_s) == (9, 0.0)
    with pytest.raises(errors.WrongState):
        client.cancel(waiting)


def test_hold_and_release_can_be_repeated(served: Served) -> None:
    client = served.client()
    task = client.submit(served.request()).ids[0]
    served.estimated(task)
    for _ in range(2):
        client.hold(task)
        assert client.task(task).code == "H"
    for _ in range(2):
        client.release(task)
        assert client.task(task).code == "PD"
    served.place(task)
    with pytest.raises(errors.WrongState, match="is running"):
        client.hold(task)


def test_a_task_of_the_archive_can_be_retried(served: Served) -> None:
    client = served.client()
    task = finished(served, outcome=Failed(1))
    served.archive()
    assert task not in served.shell.state.tasks
    assert client.task(task).exit_code == 1
    client.retry(task)
    assert client.task(task).state == "queued"
    assert [entry.id for entry in client.history()] == []
    assert any(isinstance(event, TaskRestored) for event in served.store.load().events)
    with pytest.raises(errors.WrongState, match="finished"):
        client.retry(task)


def test_update_changes_what_can_be_changed(served: Served) -> None:
    client = served.client()
    task = client.submit(served.request()).ids[0]
    served.estimated(task)
    view = client.update(task, UpdateRequest(name="new", priority=-5, time_limit_s=60.0, comment="slow"))
    assert (view.name, view.priority, view.time_limit_s, view.comment) == ("new", -5, 60.0, "slow")
    with pytest.raises(errors.NeverFitsError, match="largest GPU"):
        client.update(task, UpdateRequest(gpu_memory_mib=50_000))
    with pytest.raises(errors.Usage):
        client.update(task, UpdateRequest())
    served.place(task)
    with pytest.raises(errors.WrongState, match="priority"):
        client.update(task, UpdateRequest(priority=-6))
    client.update(task, UpdateRequest(time_limit_s=90.0))
    assert isinstance(served.store.load().events[-1], TaskChanged)


def test_drain_and_resume_by_index_uuid_and_for_all(served: Served) -> None:
    client = served.client()
    client.drain("1", reason="fan")
    assert [view.state for view in client.gpus()] == ["idle", "drained"]
    client.drain(reason="maintenance")
    assert client.server().drained == "maintenance"
    assert [view.reason for view in client.gpus()] == ["is drained: maintenance", "is drained: fan"]
    assert {view.drained for view in client.gpus()} == {True}
    assert client.resume().note.startswith("the server takes new tasks; GPU 1 stays drained")
    assert client.server().drained is None
    assert [view.drained for view in client.gpus()] == [False, True]
    assert client.resume("GPU-1").note == "GPU GPU-1 takes new tasks"
    assert [view.drained for view in client.gpus()] == [False, False]
    with pytest.raises(errors.NotFound, match="no GPU '7'"):
        client.drain("7")


def test_wait_answers_when_the_task_has_finished(served: Served) -> None:
    client, waiter = served.client(), served.client()
    task = client.submit(served.request()).ids[0]
    served.estimated(task)
    key = served.place(task)
    assert client.task(task, wait_s=0.01).state == "running"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait, task)
        served.end(key)
        assert waiting.result(LIMIT_S).exit_code == 0


def test_the_story_tells_all_that_happened(served: Served) -> None:
    task = finished(served)
    told = [line.text for line in served.client().story(task)]
    assert told[0] == "submitted by carmad"
    assert "attempt 1: started as process 4321" in told
    assert told[-1] == "finished: succeeded"
    served.archive()
    assert [line.text for line in served.client().story(task)] == told


def test_the_list_is_filtered_and_bounded(served: Served) -> None:
    client = served.client()
    ids = client.submit(served.request(array=ArrayAsk(tuple(range(5))))).ids
    served.estimated(*ids[:3])
    assert len(client.tasks(limit=2)) == 2
    assert [view.id for view in client.tasks(state="estimating")] == list(ids[3:])
    assert len(client.tasks(state="PD")) == 5
    served.place(ids[2])
    assert client.tasks(limit=1)[0].id == ids[2]  # what runs comes first
    for wrong in ({"state": "nosuch"}, {"limit": 0}, {"limit": 10**9}):
        with pytest.raises(errors.Usage):
            client.tasks(**wrong)
    with pytest.raises(errors.NotFound, match="no user"):
        client.tasks(user="nobody-of-that-name")


def test_history_is_filtered_by_how_it_ended(served: Served) -> None:
    client = served.client()
    good, bad = finished(served), finished(served, outcome=Failed(3))
    served.archive()
    newest = finished(served)
    assert [view.id for view in client.history()] == [newest, bad, good]
    assert [view.id for view in client.history(state="F")] == [bad]
    assert [view.id for view in client.history(state="succeeded")] == [newest, good]
    assert [view.id for view in client.history(limit=1)] == [newest]
    status = served.shell.state.tasks[TaskId(newest)].status
    assert isinstance(status, Finished)
    assert [view.id for view in client.history(since=status.at)] == [newest]


def test_events_are_streamed_as_they_happen(served: Served) -> None:
    events = served.client().events()
    client = served.client()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(lambda: [next(events) for _ in range(2)])
        until(lambda: served.shell.subscribed == 1)
        task = client.submit(served.request()).ids[0]
        served.estimated(task)
        first, second = coming.result(LIMIT_S)
    assert (first.event, first.task, first.text) == ("task_submitted", task, f"task {task}: submitted by carmad")
    assert second.event == "task_estimated"
    assert second.sequence == first.sequence + 1
    events.close()  # type: ignore[attr-defined]
    served.client().server()


def test_the_server_and_its_settings_are_described(served: Served) -> None:
    client = served.client()
    server = client.server()
    assert (server.gpus, server.user, server.policy, server.you_are_admin) == (2, "carmad", "magm", True)
    by_name = {setting.name: setting for setting in client.settings()}
    assert by_name["gate.sm_active"].value == 0.8
    assert by_name["gate.sm_active"].origin == "default"
    assert "SM activity" in by_name["gate.sm_active"].description


def test_shutdown_is_answered(served: Served) -> None:
    assert "stopping" in served.client().shutdown(cancel_running=True).note
    assert served.shell.stopping.is_set()
    assert served.shell.cancel_at_stop


def test_waits_and_streams_end_when_the_server_stops() -> None:
    with ThreadPoolExecutor(3) as pool, serving() as served:
        task = served.client().submit(served.request()).ids[0]
        clients = [served.client() for _ in range(3)]
        stream = pool.submit(lambda: list(clients[0].events()))
        output = pool.submit(lambda: list(clients[1].logs(task, follow=True)))
        waiting = pool.submit(clients[2].task, task, wait_s=50.0)
        until(lambda: served.shell.subscribed == 1 and served.shell.waiting == 2)
        served.loop.call_soon_threadsafe(served.stopping.set)
        assert stream.result(LIMIT_S) == []
        assert output.result(LIMIT_S) == []
        assert waiting.exception(LIMIT_S) is not None  # asked again, and no daemon answered


def test_a_full_disk_is_an_error_and_the_daemon_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served.client()
    with monkeypatch.context() as patched:

        def full(_events: object) -> int:
            raise errors.StoreError("the disk is full", "free some space")

        patched.setattr(served.store, "append", full)
        with pytest.raises(errors.StoreError, match="disk is full"):
            client.submit(served.request())
    assert client.tasks() == []
    assert len(client.submit(served.request()).ids) == 1
