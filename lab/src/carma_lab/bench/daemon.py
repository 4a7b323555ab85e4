"""`carma bench daemon`: the daemon's own figures. It measures and prints; it never passes or fails.

Every part runs on private daemons with virtual GPUs at real speed. `--quick` does the same with fewer repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from carma.core.model.values import Record
from carma_lab.bench import daemon_load as atwork
from carma_lab.bench import decisions, peers, submissions
from carma_lab.bench.machine import Figure, FigureLog, Machine, write

COMMAND = "carma bench daemon --out lab/results/daemon/daemon.json"


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
    log = FigureLog(options.json)
    skipped: list[str] = []

    def skip(reason: str) -> None:
        skipped.append(reason)
        log.say(reason)

    for figure in _measure(options.quick, skip):
        log.add(figure)
    report = Report(
        command=COMMAND + (" --quick" if options.quick else ""),
        quick=options.quick,
        machine=log.machine,
        figures=tuple(log.figures),
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
