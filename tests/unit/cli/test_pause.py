"""`carma pause` and `carma unpause`: which tasks they select, and what lists say of paused ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from carma.cli import carma
from carma.wire import api_types as t
from tests.unit.cli.scripted_daemon import FakeDaemon, running


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        said = "paused by alice 12 s ago: a demo"
        fake.tasks = {1: running(1), 2: replace(running(2), paused_at=5.0, code="S", reason=said, reason_code="Paused")}
        yield fake


def call(*words: str) -> str:
    result = CliRunner().invoke(carma, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_selects_those_that_can_change(daemon: FakeDaemon) -> None:
    call("pause", "--all", "--reason", "a demo")
    call("unpause", "--all")
    call("pause", "2")
    asked = [(route, task) for route, task, _query, _body in daemon.requests if "pause" in route]
    assert asked == [("pause", 1), ("unpause", 2), ("pause", 2)]
    assert daemon.asked("pause") == [t.PauseRequest(reason="a demo"), t.PauseRequest()]


@pytest.mark.usefixtures("daemon")
def test_lists_and_a_card_say_why_it_stands_still() -> None:
    for words in (("queue", "--wide"), ("show", "2")):
        assert "paused by alice 12 s ago: a demo" in call(*words)
    assert "(S)" in call("show", "2")


def test_a_submission_says_that_carma_must_not_pause_it(daemon: FakeDaemon) -> None:
    call("submit", "--no-pause", "--", "true")
    call("submit", "--", "true")
    assert [request.spec.pause for request in daemon.asked("submit")] == [False, True]
