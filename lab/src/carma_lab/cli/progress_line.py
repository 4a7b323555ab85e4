"""Progress of a simulation on standard error, if it is a terminal; and the check of an output file for a run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from carma.core.model.units import show_s

if TYPE_CHECKING:
    from rich.progress import Progress
from pathlib import Path

from carma.errors import CarmaError, Usage

AFTER_S = 1.0  # most simulations are shorter and show no progress
BETWEEN_S = 0.2
BAR = 10

OnCaseProgress = Callable[[str, int, int, float], None]  # name, ended tasks, all tasks, simulated seconds


@contextlib.contextmanager
def simulating(*, quiet: bool = False) -> Iterator[OnCaseProgress | None]:
    """The progress callback; None without a terminal. Other output to standard error appears above the line."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    line = ProgressLine()
    try:
        yield line
    finally:
        line.clear()


class ProgressLine:
    """Drawn when called, at most every 0.2 s, without a thread that would slow the simulation down."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what = ""
        self._began = self._next = clock()
        self._progress: Progress | None = None

    def __call__(self, what: str, done: int, total: int, at_s: float) -> None:
        now = self._clock()
        if what != self._what:
            self.clear()
            self._what, self._began, self._next = what, now, now + AFTER_S
        if done >= total:
            self.clear()
        elif now >= self._next:
            self._next = now + BETWEEN_S
            self._draw(done, total, at_s, done / max(1e-9, now - self._began))

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._what = None, ""

    def _draw(self, done: int, total: int, at_s: float, rate: float) -> None:
        if self._progress is None:
            self._progress = _line(self._what, total)
            self._progress.start()
        text = f"{done:,} of {total:,} tasks, {show_s(at_s)} simulated, {rate:,.0f}/s"
        self._progress.update(self._progress.task_ids[0], completed=done, text=text, refresh=True)


def _line(what: str, total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR),
        TextColumn("{task.fields[text]}", markup=False),
    )
    console = Console(stderr=True, highlight=False)
    made = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False)
    made.add_task(what, total=total, text="")
    return made


def check_run_file(typed: str, force: bool, *, simulated: bool) -> None:
    """An earlier run may be overwritten, but not a real one by a simulated one; other files need --force."""
    from carma_lab.runs.record import read
    from gpumemnet.output_file import holds_something

    if force or not holds_something(typed):
        return
    try:
        there = read(Path(typed))
    except CarmaError:
        raise Usage(f"{typed} exists and is not a run", "Choose another file, or add --force.") from None
    if simulated and not there.about.simulated:
        raise Usage(
            f"{typed} exists and contains a real run, which a simulation cannot restore",
            "Choose another file, or add --force.",
        )
