"""Following and waiting while the daemon is restarted, and messages without a daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from carma.cli import carma
from carma.cli.checks import run_all
from carma.client import Client
from carma.errors import NotAllowed, Unreachable
from carma.wire.api_types import StreamEvent
from carma.wire.routes import Route
from tests.unit.cli.scripted_daemon import SERVER, FakeDaemon, finished, running, stale_socket
from tests.unit.cli.test_doctor import Machine


class Restarted(FakeDaemon):
    """Gives its first output and is gone; after some questions it is another daemon, and the task has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = {1: running(1)}
        self.output = {"stdout": b"one\n", "stderr": b""}
        self.missing = 3  # this number of requests finds no daemon
        self.followed = 0

    def answer(self, route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        if self.followed and self.missing:
            self.missing -= 1
            if not self.missing:
                self.tasks = {1: finished(1, code=6)}
                self.output["stdout"] = b"one\ntwo\nthree\n"
                self.answers["server"] = msgspec.structs.replace(SERVER, pid=SERVER.pid - 1)
            raise Unreachable("no daemon listens")
        answer = super().answer(route, task, query, body)
        self.followed += route.name == "logs" and query["stream"] == "stdout"
        return answer


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Restarted]:
    monkeypatch.setattr("carma.cli.connection.RETRY_S", 0.01)
    with Restarted() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        yield fake


def call(*words: str) -> Result:
    return CliRunner().invoke(carma, list(words))


@pytest.mark.parametrize("words", [["logs", "-f", "1"], ["logs", "-f", "--attempt", "1", "1"]])
def test_logs_continue_at_the_same_byte_after_a_restart(daemon: Restarted, words: list[str]) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\nthree\n")
    assert result.stderr.count("does not answer") == 1
    assert result.stderr.count("answers again") == 1
    assert daemon.followed == 2


def test_run_goes_on_and_returns_the_code(daemon: Restarted) -> None:
    result = call("run", "--", "true")
    assert (result.exit_code, result.stdout) == (6, "one\ntwo\nthree\n")
    assert "task 1 failed with exit code 6" in result.stderr
    assert daemon.followed == 2


def test_output_between_the_end_of_a_stream_and_the_next_daemon_is_not_lost(daemon: Restarted) -> None:
    """The old daemon closes the stream in good order, and the first thing the new one says is that it is over."""
    daemon.missing = 1
    assert call("logs", "-f", "1").stdout == "one\ntwo\nthree\n"


def test_waiting_outlives_a_restart(daemon: Restarted) -> None:
    usual, asked = daemon.answer, 0

    def answer(route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        nonlocal asked
        asked += 1
        daemon.followed = asked > 1
        return usual(route, task, query, body)

    daemon.answer = answer  # type: ignore[method-assign]
    assert call("wait", "1").exit_code == 6
    assert daemon.missing == 0


@pytest.mark.parametrize("words", [["wait", "1"], ["logs", "-f", "1"], ["logs", "-f", "--attempt", "1", "1"]])
def test_a_daemon_that_never_answered_is_not_waited_for(daemon: Restarted, words: list[str]) -> None:
    daemon.stop()
    (daemon.home / "carma.sock").unlink()
    assert call(*words).exit_code == 3


def test_the_last_lines_of_nothing_are_nothing(daemon: Restarted) -> None:
    daemon.output["stdout"], daemon.missing = b"", 0
    result = call("logs", "-n", "0", "1")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


class Streaming(FakeDaemon):
    """Sends its event, is gone once, sends it again, and then refuses."""

    def answer(self, route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        answer = super().answer(route, task, query, body)
        sent = len(self.asked("events"))
        if route.name == "events" and sent == 2:
            raise Unreachable("no daemon listens")
        if route.name == "events" and sent == 4:
            raise NotAllowed("over")
        return answer


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streaming]:
    monkeypatch.setattr("carma.cli.connection.RETRY_S", 0.0)
    monkeypatch.setattr("carma.cli.events.RETRY_S", 0.0)
    with Streaming() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        event = StreamEvent(sequence=1, at=1_800_000_000.0, event="task_held", task=2, text="task 2: held")
        fake.answers["events"] = b": beat\n\ndata: " + msgspec.json.encode(event) + b"\n\n"
        fake.tasks = {1: running(1), 2: running(2)}
        yield fake


@pytest.mark.usefixtures("stream")
def test_events_continue_after_a_restart() -> None:
    result = call("events")
    assert result.exit_code == 4
    assert [line.split("  ")[1] for line in result.stdout.splitlines()] == ["task 2: held"] * 2
    assert "up to 5 minutes" in result.stderr
    assert "answers again" in result.stderr
    assert "may be missing" in result.stderr


@pytest.mark.parametrize(("words", "count"), [(["--json"], 1), (["--task", "2"], 1), (["--task", "1"], 0)])
@pytest.mark.usefixtures("stream")
def test_events_are_lines(monkeypatch: pytest.MonkeyPatch, words: list[str], count: int) -> None:
    monkeypatch.setattr("carma.cli.connection.MAX_ABSENCE_S", 0.0)
    lines = call("events", *words).stdout.splitlines()
    assert len(lines) == count
    assert "--json" not in words or json.loads(lines[0])["task"] == 2


def test_events_of_an_unknown_task_are_an_error(stream: Streaming) -> None:
    assert call("events", "--task", "99").exit_code == 4
    assert stream.asked("events") == []


def test_a_dead_daemon_of_the_user_hides_the_daemon_for_all_users_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    monkeypatch.setattr("carma.transport.geteuid", lambda: 1001)
    monkeypatch.delenv("CARMA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "carma").mkdir()
    stale_socket(tmp_path / "carma" / "carma.sock")
    with FakeDaemon() as server:
        system = server.home / "carma.sock"
        monkeypatch.setattr("carma.paths.SYSTEM_SOCKET", system)
        result = CliRunner().invoke(carma, ["queue"])
        assert result.exit_code == 3
        (found,) = (finding for finding in run_all(Machine()) if finding.check == "daemon")
    for text in (result.stderr, found.text + found.hint):
        assert str(tmp_path / "carma" / "carma.sock") in text
        assert str(system) in text


def test_the_daemon_for_all_users_is_started_by_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("carma.paths.SYSTEM_SOCKET", tmp_path / "carma.sock")
    for uid, who in ((1001, "administrator"), (0, "carma up")):
        monkeypatch.setattr("carma.transport.geteuid", lambda uid=uid: uid)
        with Client(tmp_path / "carma.sock") as client, pytest.raises(Unreachable) as caught:
            client.server()
        assert "systemctl start carma" in caught.value.hint
        assert who in caught.value.hint
