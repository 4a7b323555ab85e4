"""`carma bench daemon`: the daemon's own figures. It measures and prints; it never passes or fails.

Every part runs on private daemons with virtual GPUs at real speed. `--quick` does the same with fewer repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from carma.bench import atwork, decisions, peers, submissions
from carma.bench.machine import Figure, Machine, facts, write
from carma.core.model import Record
from carma.errors import Usage

COMMAND = "carma bench daemon --out results/daemon/daemon.json"


class Options(Record, frozen=True, kw_only=True):
    """`json` is a file to write, or "-" for standard output instead of the table."""

    json: str | None = None
    quick: bool = False


class Report(Record, frozen=True, kw_only=True):
    """What the JSON file holds."""

    command: str
    quick: bool
    machine: Machine
    figures: tuple[Figure, ...]
    skipped: tuple[str, ...] = ()


def run(options: Options) -> int:
    """Measures everything, prints each figure as it comes, writes the file. The exit code is 0."""
    if options.json not in (None, "-") and not Path(str(options.json)).absolute().parent.is_dir():
        raise Usage(f"{options.json}: its directory does not exist")
    machine = facts()
    say = _to_stderr if options.json == "-" else _to_stdout
    say(_headline(machine))
    figures: list[Figure] = []
    skipped: list[str] = []

    def skip(reason: str) -> None:
        skipped.append(reason)
        say(reason)

    for figure in _measure(options.quick, skip):
        figures.append(figure)
        say(f"  {figure.name:<34} {show(figure.value):>9} {figure.unit:<12} {figure.how}")
    report = Report(
        command=COMMAND + (" --quick" if options.quick else ""),
        quick=options.quick,
        machine=machine,
        figures=tuple(figures),
        skipped=tuple(skipped),
    )
    write(report, options.json)
    return 0


def _measure(quick: bool, skip: Callable[[str], None]) -> Iterator[Figure]:
    yield from atwork.help_time(5 if quick else 20)
    yield from decisions.measure(5 if quick else 50)
    yield from submissions.measure(50 if quick else 500)
    yield from atwork.submit_to_running(10 if quick else 100)
    yield from atwork.cpu(4.0 if quick else 30.0)
    yield from peers.measure(20 if quick else 200, skip, defaults_too=not quick)


def _headline(machine: Machine) -> str:
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_gib:g} GiB, {machine.kernel}, "
        f"Python {machine.python}, CARMA {machine.carma}, {machine.date}, load {machine.load_before:g}"
    )


def show(value: float) -> str:
    """Three figures, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _to_stdout(text: str) -> None:
    print(text, flush=True)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
