"""`--watch`: in place on a terminal, one table after the other elsewhere, until Ctrl-C."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.cli.watch import watch
from carma.errors import NotFound, Unreachable
from tests.unit.cli.scripted_daemon import FakeDaemon, gpu_view, running


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        fake.tasks = {1: running(1)}
        fake.answers["gpus"] = [gpu_view(0)]
        yield fake


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> list[float]:
    """The waits; Ctrl-C comes in that one."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    return waits


@pytest.mark.parametrize(("words", "wait_s"), [(("queue", "--watch"), 2.0), (("gpus", "--watch", "5"), 5.0)])
@pytest.mark.usefixtures("daemon")
def test_without_a_terminal_the_tables_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], wait_s: float
) -> None:
    waits = interrupted(monkeypatch, after=3)
    result = CliRunner().invoke(carma, list(words))
    assert result.exit_code == 0
    assert waits == [wait_s] * 3
    assert result.stdout.count("GPU") >= 3
    assert len(result.stdout.split("\n\n")) == 4
    assert "\033" not in result.stdout


def test_on_a_terminal_the_table_is_overwritten_and_cut_to_its_height(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = Terminal(), iter(("one\ntwo\nthree\nfour\n", "short\n"))
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "4")
    interrupted(monkeypatch, after=2)
    watch(lambda: print(next(shown), end=""), 1.0)
    entered, first, second = terminal.getvalue().split("\033[H")
    assert entered == "\033[?1049h\033[?25l"
    assert first.split("\033[K\n")[1:] == ["one", "two", "… and 2 more lines\033[K\033[J"]
    assert second.endswith("\nshort\033[K\033[J\033[?25h\033[?1049l")


@pytest.mark.usefixtures("daemon")
def test_an_absent_daemon_is_an_error_at_first_and_later_a_line(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, after=2)
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    answers = iter((None, Unreachable("no daemon", "")))

    def ask() -> None:
        if (error := next(answers)) is not None:
            raise error
        print("a table")

    watch(ask, 1.0)
    assert "a table" in shown.getvalue()
    assert "no daemon; trying again" in shown.getvalue()
    daemon.refuses["gpus"] = NotFound("no such thing")
    assert CliRunner().invoke(carma, ["gpus", "--watch"]).exit_code == NotFound.exit_code


def test_json_excludes_it(daemon: FakeDaemon) -> None:
    assert CliRunner().invoke(carma, ["queue", "--watch", "--json"]).exit_code == 2
    assert daemon.requests == []
