"""The history in pages, read beside the event loop; and numbers that no integer of the database could hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from msgspec.structs import replace

from carma import errors
from carma.client import Client
from carma.core.model.outcome import Failed, Succeeded
from carma.core.model.status import Finished
from carma.core.model.task import Task
from carma.core.model.values import Dependency, Owner, TaskId, TaskSpec
from carma.core.ports import Checkpoint, HistoryQuery
from carma.daemon.api.history import read_cursor, write_cursor
from carma.wire.api_types import ArrayAsk
from carma.wire.routes import API, CURSOR_HEADER, HISTORY_LIMIT, ROUTES, Route
from tests.unit.daemon.api_server import LIMIT_S, Served, serving, until

OWNER = Owner(500, 500, "carmad")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def finished(number: int, at: float | None = None) -> Task:
    outcome = Failed(1, "x") if number % 3 == 0 else Succeeded()
    spec = TaskSpec(command=("true",), directory="/")
    status = Finished(float(number) if at is None else at, outcome)
    return Task(id=TaskId(number), owner=OWNER, spec=spec, submitted_at=0.5, status=status)


def fill(served: Served, count: int) -> None:
    """Puts this number of finished tasks into the archive."""

    async def save() -> None:
        served.store.save(
            Checkpoint(sequence=served.shell.sequence, at=1.0, tasks=()), [finished(n) for n in range(1, count + 1)]
        )
        served.store.new_task_ids(count)

    served.call(save())


def raw_page(client: Client, query: str) -> tuple[list[int], str | None]:
    reply = client._link.request("GET", f"{API}/history?{query}", None, LIMIT_S)
    assert reply.status == 200
    return [view["id"] for view in msgspec.json.decode(reply.read())], reply.headers.get(CURSOR_HEADER)


def test_the_client_pages_through_a_long_history(served: Served) -> None:
    fill(served, 2 * HISTORY_LIMIT + 500)
    client = served.client()
    assert [view.id for view in client.history(limit=5_000)] == list(range(2_500, 0, -1))
    assert [view.id for view in client.history(limit=HISTORY_LIMIT + 1)] == list(range(2_500, 1_499, -1))
    assert len(client.history()) == 100
    assert [view.id for view in client.history(limit=3, state="failed")] == [2_499, 2_496, 2_493]
    assert len(client.history(limit=5_000, state="F")) == 833
    assert client.history(state="lost") == client.history(state="running") == []


def test_a_page_names_the_next_one_and_the_last_names_none(served: Served) -> None:
    fill(served, 5)
    client = served.client()
    first, cursor = raw_page(client, "limit=2")
    assert (first, cursor) == ([5, 4], "4.0_4")
    second, cursor = raw_page(client, f"limit=2&cursor={cursor}")
    assert second == [3, 2]
    third, cursor = raw_page(client, f"limit=2&cursor={cursor}")
    assert (third, cursor) == ([1], None)
    assert raw_page(client, "limit=5") == ([5, 4, 3, 2, 1], None)


def test_tasks_in_memory_and_in_the_archive_are_one_history(served: Served) -> None:
    client = served.client()
    done: list[int] = []
    for number in range(6):
        task = client.submit(served.request("true")).ids[0]
        served.estimated(task)
        served.end(served.place(task))
        done.insert(0, task)
        if number == 3:
            served.archive()
    pages: list[int] = []
    cursor: str | None = None
    while True:
        page, cursor = raw_page(client, "limit=1" + (f"&cursor={cursor}" if cursor else ""))
        pages += page
        served.archive()  # tasks that move between two pages are neither lost nor repeated
        if cursor is None:
            break
    assert pages == done


def test_a_cursor_is_read_as_it_was_written_and_anything_else_is_refused(served: Served) -> None:
    task = finished(7, at=1_700_000_000.1234567)
    assert read_cursor(write_cursor(task)) == (1_700_000_000.1234567, 7)
    client = served.client()
    for wrong in ("", "x", "1.0", "1.0_", "_1", "nan_1", "inf_1", "1.0_0", "1.0_-3", f"1.0_{2**64}", "1_" + "9" * 99):
        with pytest.raises(errors.Usage, match="cursor"):
            client._ask("history", list[Any], cursor=wrong)
    with pytest.raises(errors.Usage, match="limit"):
        client._ask("history", list[Any], limit=HISTORY_LIMIT + 1)


@pytest.mark.parametrize(
    ("method", "ask"),
    [
        ("page", lambda client: client.history()),
        ("page", lambda client: client.report(since=0.0)),
        ("usage", lambda client: client.report()),
        ("story", lambda client: client.story(1)),
        ("task", lambda client: client.task(1)),
        ("task", lambda client: client.explain(1)),
    ],
)
def test_the_daemon_answers_others_while_the_archive_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, method: str, ask: Callable[[Client], object]
) -> None:
    fill(served, 3)
    slow, other = served.client(), served.client()
    entered, release = threading.Event(), threading.Event()
    original = getattr(served.store, method)

    def blocked(*arguments: Any, **named: Any) -> object:
        entered.set()
        assert release.wait(LIMIT_S)
        return original(*arguments, **named)

    monkeypatch.setattr(served.store, method, blocked)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, slow)
        try:
            assert entered.wait(LIMIT_S)
            assert other.server().gpus == 2  # the archive is still being read
            assert other.submit(served.request("true", held=True)).ids
        finally:
            release.set()
        answer.result(LIMIT_S)


def test_a_long_report_does_not_delay_the_history(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(served, 3)
    slow, other = served.client(), served.client()
    entered, release = threading.Event(), threading.Event()
    original = served.store.page

    def blocked(query: HistoryQuery) -> object:
        if query.limit == HISTORY_LIMIT:  # the report's
            entered.set()
            assert release.wait(LIMIT_S)
        return original(query)

    monkeypatch.setattr(served.store, "page", blocked)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(slow.report)
        try:
            assert entered.wait(LIMIT_S)
            assert len(other.history()) == 3
        finally:
            release.set()
        answer.result(LIMIT_S)


def test_dependencies_on_archived_tasks_are_read_beside_the_loop(served: Served) -> None:
    fill(served, 400)
    threads: set[str] = set()
    original = served.store.tasks

    def recorded(ids: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(ids)

    served.store.tasks = recorded  # type: ignore[method-assign]
    after = tuple(Dependency(TaskId(number), "any") for number in range(1, 401))
    task = served.client().submit(served.request("true", after=after, held=True)).ids[0]
    assert served.shell.state.tasks[TaskId(task)].spec.after == ()  # all have ended
    assert threads == {"archive"}


# Numbers.

NUMBERS = (-(2**63) - 1, -1, 0, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 1e308, float("nan"), float("inf"))


def _numeric(route: Route) -> Iterator[str]:
    for query in route.query:
        kind = get_args(query.kind)[0] if get_origin(query.kind) is Annotated else query.kind
        if kind in (int, float):
            yield query.name


@pytest.mark.parametrize("number", NUMBERS)
def test_no_number_in_a_query_or_a_path_is_an_internal_error(served: Served, number: float) -> None:
    task = served.client().submit(served.request("true", held=True)).ids[0]
    client = served.client()
    for route in ROUTES:
        for name in _numeric(route):
            path = API + route.path.format(id=task)
            reply = client._link.request(route.method, f"{path}?{name}={number!r}", None, LIMIT_S)
            reply.read()
            assert reply.status in (200, 400, 404), (route.name, name, number)
        if "{id}" in route.path:
            reply = client._link.request(route.method, API + route.path.format(id=repr(number)), b"{}", LIMIT_S)
            reply.read()
            assert reply.status in (400, 404), (route.name, number)


def _bodies() -> Iterator[tuple[str, Any]]:
    """Every request with an integer or a number somewhere, by its JSON schema; and where that is."""
    spec = msgspec.to_builtins(TaskSpec(command=("true",), directory="/", environment={"PATH": "/bin"}))
    for name in ("gpus", "umask", "gpu_memory_mib", "time_limit_s", "priority", "begin_at", "max_oom_retries"):
        yield name, lambda number, name=name: {"spec": {**spec, name: number}}
    for name in ("grace_s", "threads_percent"):
        yield name, lambda number, name=name: {"spec": {**spec, name: number}}
    yield "after", lambda number: {"spec": {**spec, "after": [{"task": number}]}}
    yield "warn", lambda number: {"spec": {**spec, "warn": {"signal": number, "before_s": number}}}
    yield "checkpoint", lambda number: {"spec": {**spec, "checkpoint": {"signal": number, "grace_s": number}}}
    yield "array", lambda number: {"spec": {**spec, "array": {"array": number, "index": number}}}
    yield "indices", lambda number: {"spec": spec, "array": {"indices": [number]}}
    yield "at_once", lambda number: {"spec": spec, "array": {"indices": [1, 2], "at_once": number}}


@pytest.mark.parametrize(("name", "body"), list(_bodies()))
def test_no_number_in_a_submission_is_an_internal_error(served: Served, name: str, body: Callable[..., Any]) -> None:
    client = served.client()
    for number in (*NUMBERS[:9], 10**400):
        raw = msgspec.json.encode({**body(0), "held": True}).decode()
        raw = raw.replace(msgspec.json.encode(body(0)).decode()[1:-1], _json(body, number))
        reply = client._link.request("POST", f"{API}/tasks", raw.encode(), LIMIT_S)
        problem = reply.read()
        assert reply.status in (201, 400, 403, 404, 409, 413), (name, number, problem)


def _json(body: Callable[..., Any], number: float) -> str:
    """msgspec encodes no integer above 64 bits."""
    mark = 123_456_789
    return msgspec.json.encode(body(mark)).decode()[1:-1].replace(str(mark), repr(number))


def test_a_dependency_on_an_id_that_no_task_can_have_is_refused_with_the_place_of_the_mistake(served: Served) -> None:
    spec = TaskSpec(command=("true",), directory="/", after=(Dependency(TaskId(2**63 - 1)),))
    request = replace(served.request("true"), spec=spec)
    with pytest.raises(errors.Usage, match=r"\$\.spec\.after\[0\]\.task"):
        served.client().submit(request)


# The limit of waiting tasks.


def test_the_default_limit_of_waiting_tasks_holds_for_an_administrator_and_says_what_to_do(served: Served) -> None:
    client = served.client()
    request = served.request("true", array=ArrayAsk(tuple(range(10_000))), held=True)
    client.submit(request)
    client.submit(request)
    with pytest.raises(errors.QuotaReached, match=r"20000 .*quota\.waiting") as caught:
        client.submit(served.request("true"))
    assert "cancel some" in caught.value.hint


def test_submissions_that_are_stored_together_do_not_pass_the_limit_together(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests become one transaction; each is checked against the state before it."""
    clients = [served.client() for _ in range(7)]
    entered, release = threading.Event(), threading.Event()
    original = served.store.append

    def blocked(events: Any) -> int:
        entered.set()
        assert release.wait(LIMIT_S)
        return original(events)

    def submit(client: Client, count: int) -> str:
        try:
            client.submit(served.request("true", array=ArrayAsk(tuple(range(count))), held=True))
        except errors.QuotaReached:
            return "refused"
        return "accepted"

    monkeypatch.setattr(served.store, "append", blocked)
    with ThreadPoolExecutor(len(clients)) as pool:
        try:
            pool.submit(submit, clients[0], 1)
            assert entered.wait(LIMIT_S)
            answers = [pool.submit(submit, client, 6_000) for client in clients[1:]]
            until(lambda: len(served.shell.changes) == 6)  # all of them will be in the next transaction
        finally:
            release.set()
        results = [answer.result(LIMIT_S) for answer in answers]
    assert results.count("accepted") == 3
    assert len(served.shell.state.tasks) == 18_001
