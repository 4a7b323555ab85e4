"""`carma bench estimators`: compares estimators with the measured memory of training runs. They are called as by `carma
estimate`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from carma.config import load_settings
from carma.core.model.settings import Rules
from carma.core.model.values import Gpu, Record
from carma.errors import Usage
from carma.estimate.local import make_trials
from carma.paths import find_paths
from carma.trial.cards import DEFAULT, as_gpu, find_card, unknown_card
from carma_lab.bench.machine import Machine, facts
from carma_lab.bench.memory import comparison_file as written
from carma_lab.bench.memory import figures, published18
from carma_lab.bench.memory.figures import Row, Summary
from carma_lab.bench.memory.measured import Head, Measured, drawn, read_truth
from carma_lab.bench.memory.queries import BEST, Asker, ClosingTrials, Folds, chosen_estimators
from carma_lab.bench.memory.truth import Interpreter, find_interpreter
from carma_lab.bench.results_file import check_place, command_of, say, write

SAVED_EVERY_S = 20.0


class Options(Record, frozen=True, kw_only=True):
    truth: str | None = None
    python: str | None = None
    estimators: tuple[str, ...] = ("all",)
    first: int = 0
    seed: int = 0
    out: str = "estimators.json"
    gpu: str | None = None
    published18: bool = False
    folds: str | None = None
    redraw: str | None = None


def run(options: Options, *, interpreter: Interpreter | None = None, trials: ClosingTrials | None = None) -> int:
    if options.redraw is not None:
        return _redraw(options.redraw)
    if options.published18 == (options.truth is not None):
        raise Usage(
            "either a file of measured runs is needed, or --published18",
            "try: carma bench estimators lab/results/h200/memory/truth.jsonl --first 20",
        )
    check_place(options.out)
    comparison = Study(options, interpreter, trials).compare()
    _show(comparison)
    return 0 if any(row.refused is None for row in comparison.rows) else 1


class Study:
    """One comparison. Mistakes of the user are reported before anything is run."""

    def __init__(self, options: Options, interpreter: Interpreter | None, trials: ClosingTrials | None) -> None:
        self._options = options
        self._head, self._runs, self._source = _truth(options)
        names = chosen_estimators(options.estimators)
        self._gpu = _gpu(options.gpu or (published18.GPU if options.published18 else DEFAULT))
        self._rules: Rules = load_settings(find_paths(os.environ), os.environ).settings
        self._interpreter = interpreter or find_interpreter(options.python)
        trials = trials or make_trials(self._rules, os.environ, None)
        script = published18.SCRIPT if options.published18 else "case.py"
        folds = None if options.folds is None else Folds(Path(options.folds))
        self._asker = Asker(trials, self._rules, self._gpu, names, self._interpreter.path, script, folds)
        self._machine: Machine = facts()

    def compare(self) -> written.Comparison:
        """Asks about every run. What was found so far is in the file at any time; Ctrl-C ends it in good order."""
        rows: list[Row] = []
        saved_s = time.monotonic()
        try:
            for number, found in enumerate(self._asker.ask_all(self._runs), 1):
                rows += found
                _tell(number, len(self._runs), found)
                if time.monotonic() - saved_s > SAVED_EVERY_S:
                    write(self._comparison(rows), self._options.out)
                    saved_s = time.monotonic()
        except KeyboardInterrupt:
            say("broken off; what was found so far is kept")
        comparison = self._comparison(rows)
        write(comparison, self._options.out)
        return comparison

    def _comparison(self, rows: Sequence[Row]) -> written.Comparison:
        level = self._rules.memory.level
        ours = [row for row in rows if row.estimator == BEST]
        # Bounds rest on runs that we measured, and the published ones are others: nothing is to be left out.
        judged = () if self._options.published18 else figures.left_out_bounds(ours, level)
        shown = [*(judged or ours), *(row for row in rows if row.estimator != BEST)]
        return written.Comparison(
            command=command_of("estimators", replace(self._options, python=self._interpreter.path)),
            source=self._source,
            gpu=self._gpu.name,
            measured_on={"gpu": self._head.gpu or "", "torch": self._head.torch, "date": self._head.date},
            seed=self._options.seed,
            level=level,
            caution=caution(judged),
            whole=len({row.case for row in rows}) == len(self._runs),
            versions=self._interpreter.versions,
            machine=self._machine,
            estimators=(*_parts(judged), *figures.by_estimator(shown)),
            families=figures.by_family(judged),
            networks=figures.by_network(shown),
            refusals=figures.refusals(shown),
            published=_published(rows) if self._options.published18 else (),
            rows=tuple(rows),
            judged=judged,
        )


def caution(judged: Sequence[Row]) -> str:
    """Said wherever the figures are shown: an error on what was learnt from is no error on what is new."""
    known = sum(row.is_known for row in judged)
    if not known:
        return ""
    return (
        f"{known} of {len(judged)} runs have convolutions and were replayed with the shipped model of cuDNN's "
        "workspaces, which has learnt from these very runs; --folds judges them by models that have not"
    )


def _published(rows: Sequence[Row]) -> tuple[published18.Off, ...]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.estimator, {})[row.case] = row
    return published18.errors(found.pop(BEST, {}), found)


def _parts(judged: Sequence[Row]) -> tuple[Summary, ...]:
    """The main estimator on what it has learnt from and on what it has not, where there is both."""
    known = [row for row in judged if row.is_known]
    new = [row for row in judged if not row.is_known and row.refused is None]
    if not known or not new:
        return ()
    return (figures.summarise(f"{BEST}, unseen", new), figures.summarise(f"{BEST}, learnt from", known))


def _truth(options: Options) -> tuple[Head, tuple[Measured, ...], str]:
    if options.truth is None:
        runs = tuple(one.run for one in published18.PUBLISHED)
        head = Head(gpu="NVIDIA A100, 40 GiB", torch="not published", date="not published")
        return head, runs[: options.first] if options.first else runs, published18.SOURCE
    head, measured = read_truth(Path(options.truth))
    return head, drawn(measured, options.first, options.seed), options.truth


def _gpu(wanted: str) -> Gpu:
    card = find_card(wanted)
    if card is None:
        raise unknown_card(wanted)
    return as_gpu(card)


def _tell(number: int, total: int, found: Sequence[Row]) -> None:
    """One line a run: the main estimator's error, or why there is none."""
    row = found[0]
    result = f"{100 * row.error:+.1f} %" if row.error is not None else f"refused: {row.refused}"
    print(f"{number}/{total} {row.case} {result} ({row.took_s:.1f} s)", file=sys.stderr, flush=True)


def _show(comparison: written.Comparison) -> None:
    if comparison.published:
        written.print_published(comparison, BEST)
    else:
        written.print_comparison(comparison, BEST)


def _redraw(path: str) -> int:
    """The tables of an earlier comparison; nothing is run."""
    try:
        _show(written.read(Path(path)))
    except (OSError, ValueError) as error:
        raise Usage(f"{path} is no file of a comparison: {error}", "`carma bench estimators` makes one.") from error
    return 0
