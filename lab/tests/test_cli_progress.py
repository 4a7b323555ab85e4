"""Progress of a simulation: shown only on a terminal, at intervals, and erased at the end."""

from __future__ import annotations

import io
import sys

import pytest

from carma.traces import find
from carma_lab.bench.paper.cases import Case, Results
from carma_lab.bench.paper.variants import EXCLUSIVE
from carma_lab.cli import progress_line as progress
from carma_lab.cli.progress_line import AFTER_S, BETWEEN_S, ProgressLine, simulating
from carma_lab.simulator.request import Request, recorded, simulation

GONE = "\x1b[2K"  # the line is erased


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def looking(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: what pytest captures takes its place before the test begins."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return made


def test_a_run_that_is_followed_is_the_same_run() -> None:
    told: list[tuple[int, int, float]] = []
    request = Request(trace="t1", policy="goodput")
    made = simulation(request)
    made.run(lambda *each: told.append(each))
    other = simulation(request)
    other.run()
    assert made.runs == other.runs
    assert len(told) > 3
    assert told == sorted(told)
    assert told[-1] == (60, 60, made.now)


def test_progress_is_not_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looking(monkeypatch)
    with simulating(quiet=True) as follow:
        assert follow is None
    monkeypatch.setenv("TERM", "dumb")
    with simulating() as follow:
        assert follow is None
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with simulating() as follow:
        assert follow is None
    assert terminal.getvalue() == ""


def test_the_line_comes_after_a_while_and_goes_when_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looking(monkeypatch)
    now = 100.0
    shown = ProgressLine(lambda: now)
    shown("t1 magm", 0, 2_000, 0.0)
    now += AFTER_S / 2
    shown("t1 magm", 500, 2_000, 50.0)
    assert terminal.getvalue() == ""
    now += AFTER_S
    shown("t1 magm", 1_200, 2_000, 3_700.0)
    assert "1,200 of 2,000 tasks, 01:01:40 simulated, 800/s" in terminal.getvalue()
    assert "t1 magm" in terminal.getvalue()
    now += BETWEEN_S / 2
    shown("t1 magm", 1_300, 2_000, 3_800.0)
    assert "1,300" not in terminal.getvalue()
    shown("t1 magm", 2_000, 2_000, 4_000.0)
    assert terminal.getvalue().endswith(GONE)


def test_the_line_goes_where_the_run_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looking(monkeypatch)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)

    def broken_off() -> None:
        with simulating() as follow:
            assert follow is not None
            follow("t1 magm", 1, 9, 1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert "1 of 9 tasks" in terminal.getvalue()
    assert terminal.getvalue().endswith(GONE)


def test_a_recorded_run_and_the_study_tell_of_themselves() -> None:
    told: list[int] = []
    recorded(Request(trace="t1"), on_progress=lambda done, *_: told.append(done))
    assert told[-1] == 60
    names: set[str] = set()
    case = Case(EXCLUSIVE, "t1", 4)
    results = Results(1, lambda _line: None, lambda what, *_: names.add(what))
    results.find([case], {"t1": find("t1")})
    assert names == {str(case)}
