"""Following and waiting while the daemon is restarted, and messages without a daemon."""

from __future__ import annotations

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
from carma.errors import Unreachable
from carma.wire.routes import Route
from tests.unit.cli.scripted_daemon import SERVER, FakeDaemon, finished, running, stale_socket
from tests.unit.cli.test_doctor import Machine


class Restarted(FakeDaemon):
    """Gives its first output and is gone; after some questions it is another daemon, and the task has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = {1: running(1)}
        self.output = {"stdout": b"one\n", "stderr": b""}
        self.missing = 3  # so many questions find nobody
        self.followed = 0

    def answer(self, route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        if self.followed and self.missing:
            self.missing -= 1
            if not self.missing:
                self.tasks = {1: finished(1, code=6)}
                self.output["stdout"] = b"one\ntwo\nthree\n"
                self.answers["server"] = msgspec.structs.replace(SERVER, pid=SERVER.pid - 1)
            raise Unreachable("nobody listens")
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
    daemon.output["stdout"] = b""
    result = call("logs", "-n", "0", "1")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


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
