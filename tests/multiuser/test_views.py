"""What others see of a task: that it exists, and nothing of what it runs, where, with what and why.

Bob's tasks carry a mark in every text that only he and administrators may read. Alice asks for everything there is.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Any

import pytest

from carma.core.model.outcome import Disrupted, describe
from carma.daemon.views.story import without_words
from carma.launch.exit_outcome import ExitRecord, LastWords, MpsState, judge_exit
from tests.harness import LIMIT_S, Daemon, until
from tests.multiuser.hanging import hanging_directory
from tests.multiuser.people import PATH, Person, run_cli
from tests.multiuser.serving import ask_as, ended, root_daemon, running, shell, spec, submit


class Marked:
    """Tasks of Bob's in several states, each with the mark in all its texts."""

    def __init__(self, daemon: Daemon, bob: Person) -> None:
        self.mark = mark = f"mark{secrets.token_hex(8)}"
        folder = bob.folder(mark, 0o711)
        private: dict[str, Any] = {
            "directory": str(folder),
            "comment": f"comment {mark}",
            "environment": {"PATH": PATH, "API_KEY": mark},
            "output": f"{folder}/out-{mark}",
            "error": f"{folder}/err-{mark}",
            "checkpoint": {"signal": 10, "grace_s": 60},
        }
        raises = f"echo 'Traceback (most recent call last):' >&2; echo 'ValueError: {mark}' >&2; exit 3"
        self.failed = shell(bob, daemon, raises, **private)
        gone = bob.folder(f"{mark}/gone-{mark}")
        self.not_started = submit(bob, daemon, "true", **{**private, "output": f"{gone}/out"}, held=True)
        gone.rmdir()
        ask_as(bob, daemon, "POST", f"/tasks/{self.not_started}/release")
        self.cancelled = submit(bob, daemon, "/bin/echo", mark, **private, held=True)
        self.running = submit(bob, daemon, "/bin/sh", "-c", f"trap '' USR1; sleep 600; echo {mark}", **private)
        self.held = submit(bob, daemon, "/bin/echo", mark, **private, held=True)
        ask_as(bob, daemon, "POST", f"/tasks/{self.cancelled}/cancel", {"reason": mark})
        ask_as(bob, daemon, "PATCH", f"/tasks/{self.held}", {"comment": f"changed {mark}"})
        assert [ended(daemon, task).exit_code for task in (self.failed, self.not_started)] == [3, 126]
        running(daemon, self.running)
        self.preempted = shell(bob, daemon, "trap 'exit 0' USR1; while :; do sleep 0.05; done", **private)
        running(daemon, self.preempted)
        for task in (self.running, self.preempted):
            ask_as(bob, daemon, "POST", f"/tasks/{task}/preempt", {"reason": mark, "hold": True})
        until(lambda: daemon.client.task(self.preempted).held, "the preempted task is back in the queue")

    @property
    def tasks(self) -> tuple[int, ...]:
        return (self.failed, self.not_started, self.cancelled, self.running, self.held, self.preempted)


@pytest.fixture
def marked(daemon: Daemon, bob: Person) -> Marked:
    return Marked(daemon, bob)


ROUTES: dict[str, Callable[[Marked], list[str]]] = {
    "tasks": lambda _: ["/tasks?user=all", "/tasks?user=all&state=running", "/tasks?user=all&state=h"],
    "task": lambda marked: [f"/tasks/{task}" for task in marked.tasks],
    "waited_for": lambda marked: [f"/tasks/{task}?wait_s=0.1" for task in marked.tasks],
    "story": lambda marked: [f"/tasks/{task}/story" for task in marked.tasks],
    "explain": lambda marked: [f"/tasks/{task}/explain" for task in marked.tasks],
    "history": lambda _: ["/history?user=all", "/history?user=all&state=failed&limit=1000"],
    "report": lambda _: ["/report", "/report?since=0"],
    "gpus": lambda _: ["/gpus"],
    "users": lambda _: ["/users"],
    "server": lambda _: ["/server", "/settings", "/openapi.json"],
    "output": lambda marked: [f"/tasks/{task}/logs" for task in marked.tasks],
    "error_output": lambda marked: [f"/tasks/{task}/logs?stream=stderr" for task in marked.tasks],
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_a_route_tells_nothing_of_what_another_users_task_runs(
    daemon: Daemon, alice: Person, bob: Person, marked: Marked, route: Callable[[Marked], list[str]]
) -> None:
    for target in route(marked):
        told = ask_as(alice, daemon, "GET", target)
        assert marked.mark.encode() not in told.body, target
    own = [ask_as(bob, daemon, "GET", f"/tasks/{task}").body for task in marked.tasks]
    assert all(marked.mark.encode() in body for body in own)  # the mark is there for its owner


def test_the_report_shows_to_everyone_the_sums_of_what_history_shows(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    task = ended(daemon, shell(bob, daemon, "sleep 0.2")).id
    seen = next(one for one in ask_as(alice, daemon, "GET", "/history?user=all").json if one["id"] == task)
    assert seen["user"] == bob.name
    users = {row["user"]: row["work"] for row in ask_as(alice, daemon, "GET", "/report?since=0").json["users"]}
    assert users == {row["user"]: row["work"] for row in ask_as(bob, daemon, "GET", "/report?since=0").json["users"]}
    assert users[bob.name]["ended"]["succeeded"] >= 1


def test_the_stream_of_events_tells_nothing_of_what_another_users_task_runs(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    """Alice listens while all of it happens, until a last task of hers shows that she has heard everything."""
    reader, writer = socket.socketpair()

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(daemon.paths.socket))
            connection.settimeout(LIMIT_S)
            connection.sendall(b"GET /v1/events HTTP/1.1\r\nhost: carma\r\n\r\n")
            while piece := connection.recv(65536):
                writer.sendall(piece)

    with alice.background(listen, writer.fileno()), reader, writer:
        reader.settimeout(LIMIT_S)
        heard = reader.recv(65536)
        while b": subscribed" not in heard:
            heard += reader.recv(65536)
        marked = Marked(daemon, bob)
        last = submit(alice, daemon, "true", held=True)
        while f"task {last}: submitted".encode() not in heard:
            heard += reader.recv(65536)
    assert f"task {marked.failed}: ".encode() in heard
    assert marked.mark.encode() not in heard


def test_the_refusal_of_a_verb_tells_nothing_of_the_task(daemon: Daemon, alice: Person, marked: Marked) -> None:
    for task in marked.tasks:
        for method, route in (("POST", "/cancel"), ("POST", "/hold"), ("POST", "/retry"), ("PATCH", "")):
            answer = ask_as(alice, daemon, method, f"/tasks/{task}{route}", {})
            assert answer.status == 403
            assert marked.mark.encode() not in answer.body


def test_the_command_line_shows_nothing_of_what_another_users_task_runs(
    daemon: Daemon, alice: Person, marked: Marked
) -> None:
    commands: list[tuple[str, ...]] = [("queue", "--all", "--wide"), ("queue", "--all", "--json")]
    commands += [(verb, str(task)) for verb in ("show", "explain", "logs") for task in marked.tasks]
    for arguments in commands:
        ran = run_cli(alice, daemon.home, *arguments)
        assert marked.mark not in ran.out + ran.err, arguments


@pytest.mark.parametrize("when", ["ok", "any", "notok"])
def test_a_dependency_on_another_users_task_tells_only_how_it_ended(
    daemon: Daemon, alice: Person, marked: Marked, when: str
) -> None:
    """Dependencies on a task that has ended, on one that runs, and on a chain behind it."""
    told = []
    for task in (marked.failed, marked.cancelled, marked.running):
        body = {"spec": spec(alice, "true", after=[{"task": task, "when": when}])}
        answer = ask_as(alice, daemon, "POST", "/tasks", body)
        told.append(answer.body)
        for own in answer.json.get("ids", []):
            link = submit(alice, daemon, "true", after=[{"task": own, "when": "ok"}])
            told += [ask_as(alice, daemon, "GET", f"/tasks/{each}").body for each in (own, link)]
            told += [ask_as(alice, daemon, "GET", f"/tasks/{each}/explain").body for each in (own, link)]
    daemon.client.cancel(marked.running, signal=9, reason=marked.mark)
    ended(daemon, marked.running)
    told.append(ask_as(alice, daemon, "GET", "/history?limit=1000").body)
    told.append(ask_as(alice, daemon, "GET", "/tasks").body)
    assert marked.mark.encode() not in b"".join(told)


def test_a_dry_run_tells_nothing_of_other_users_tasks(daemon: Daemon, alice: Person, marked: Marked) -> None:
    for more in ({"exclusive": True}, {"gpus": 4, "gpu_memory_mib": 40_000}, {"gpu_memory_mib": None}):
        body = {"spec": spec(alice, "true", **more), "dry_run": True}
        answer = ask_as(alice, daemon, "POST", "/tasks", body)
        assert answer.status == 201, answer
        assert marked.mark.encode() not in answer.body
        refused = ask_as(alice, daemon, "POST", "/tasks", {**body, "dry_run": False, "nonblock": True})
        assert marked.mark.encode() not in refused.body


def test_a_user_sees_only_the_own_account(daemon: Daemon, alice: Person, bob: Person, marked: Marked) -> None:
    del marked  # so that Bob has an account
    assert {user["uid"] for user in ask_as(alice, daemon, "GET", "/users").json} == {alice.uid}
    assert {user["uid"] for user in ask_as(bob, daemon, "GET", "/users").json} == {bob.uid}


def test_the_archive_hides_what_the_memory_hides(alice: Person, bob: Person) -> None:
    """Finished tasks come from the database after a restart."""
    with root_daemon() as daemon:
        marked = Marked(daemon, bob)
        daemon.stop()
        daemon.start()
        parts = [f"/tasks/{task}{part}" for task in marked.tasks for part in ("", "/story", "/explain")]
        for target in ("/history?user=all", *parts):
            answer = ask_as(alice, daemon, "GET", target)
            assert answer.status == 200, target
            assert marked.mark.encode() not in answer.body, target
        assert ask_as(alice, daemon, "GET", f"/tasks/{marked.failed}/logs").status == 403
        assert ask_as(alice, daemon, "POST", f"/tasks/{marked.failed}/retry", {}).status == 403


def test_the_directory_that_a_task_hangs_in_at_its_start_is_hidden_from_others(alice: Person, bob: Person) -> None:
    """The outcome names the step that did not finish, with its path."""
    mark = f"mark{secrets.token_hex(8)}"
    folder = bob.folder(mark, 0o755)
    with root_daemon(launch__start_timeout_s=1) as daemon:
        task = submit(bob, daemon, "true", directory=str(folder), held=True)
        with hanging_directory(bob, folder):
            ask_as(bob, daemon, "POST", f"/tasks/{task}/release")
            outcome = ended(daemon, task).outcome or {}
        assert mark in str(outcome)  # for the administrator and the owner
        targets = ["/history?user=all", *(f"/tasks/{task}{part}" for part in ("", "/story", "/explain"))]
        for target in targets:
            assert mark.encode() not in ask_as(alice, daemon, "GET", target).body, target


@pytest.mark.parametrize("said", ["ValueError: secret", "RuntimeError: CUDA error: MPS client terminated secret"])
def test_the_last_words_of_a_task_whose_mps_server_died_are_hidden_from_others(said: str) -> None:
    """MPS needs a real card, so this asks the functions that the daemon asks."""
    words = LastWords(stderr=f"Traceback (most recent call last):\n{said}\n", stdout="")
    outcome = judge_exit(ExitRecord(ended_at=2.0, code=1), words, None, MpsState(used=True, lost=True))
    assert isinstance(outcome, Disrupted)
    assert "secret" in describe(outcome)  # for the owner
    assert "secret" not in describe(without_words(outcome))
