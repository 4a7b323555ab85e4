"""Writes the figures of GPUMemNet into the pages: `python -m lab.tools.gpumemnet_tables`.

`--check` writes nothing and reports whether they are up to date. A figure comes from a file of results, from the facts
of the shipped models, or from running the program. It is placed between two comments of a page. If its file is
missing, the place stays empty: no figure without a measurement.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from carma_lab.bench import gpumemnet as speedbench
from carma_lab.bench.machine import Machine
from carma_lab.bench.memory.comparison_file import Comparison
from carma_lab.bench.memory.comparison_file import read as read_comparison
from carma_lab.bench.memory.figures import Summary
from carma_lab.bench.results_file import percent
from gpumemnet import FAMILIES
from gpumemnet.serving.model_facts import SHIPPED, Facts, read_facts
from gpumemnet.training import SERVED
from gpumemnet.training.accuracy_report import Report
from gpumemnet.training.accuracy_report import read as read_report
from lab.tools import gpumemnet_accuracy as accuracy
from tools.markdown import folded, placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "gpumemnet"
PAGE = "docs/gpumemnet.md"
TRAINING_PAGE = "docs/gpumemnet-training.md"
SHOWN = {
    "batch": "batch",
    "layers": "layers",
    "parameters": "parameters",
    "activations_batch": "outputs of all layers, elements",
}
QUIET = 0.5  # the load of a machine on which times can be trusted
ZOO = ("answered", "median error", "p90", "worst", "too small", "by more than 5 %", "bound holds", "over-booked")


T = TypeVar("T")


def of_file(name: str, read: Callable[[Path], T]) -> Callable[[Callable[[T], str]], Callable[[Path], str]]:
    """Makes a function of a directory from a function of a file of results. There is no text if the file is missing."""

    def of_directory(make: Callable[[T], str]) -> Callable[[Path], str]:
        return lambda results: make(read(results / name)) if (results / name).exists() else ""

    return of_directory


of_report = of_file("accuracy.json", read_report)


def headed(make: Callable[[Report], str]) -> Callable[[Path], str]:
    """The text of a report below its versions and its command."""
    return of_report(lambda report: f"{_head(report)}\n\n{text}" if (text := make(report)) else "")


def _head(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    said = f"Made on {report.date} with {versions}, on {report.cores} cores, seed {report.seed}, by"
    return f"{folded(said)}\n\n    {report.command}"


def pictures(results: Path) -> str:
    """Links to the existing confusion matrices, relative to the page of results."""
    files = sorted(results.glob("confusion-*.png"))
    return "".join(f"- [{file.stem.removeprefix('confusion-').replace('-', ' ')}]({file.name})\n" for file in files)


@of_file("speed.json", lambda file: msgspec.json.decode(file.read_bytes(), type=speedbench.Report))
def speed(report: speedbench.Report) -> str:
    lines = [
        (
            timing.part,
            timing.of,
            str(timing.layers),
            f"{timing.median_ms:.2f} ms",
            f"{timing.p95_ms:.2f} ms",
            "-" if timing.published_ms is None else _span(*timing.published_ms),
        )
        for timing in report.timings
    ]
    said = (
        f"One core of {report.machine.cpu}, {report.runs} repetitions, one sample at a time; "
        f"the aim is {report.limit_ms:g} ms{_busy(report.machine)}:"
    )
    missed = "; ".join(f"{one.part} of {one.of}" for one in report.timings if one.median_ms > report.limit_ms)
    ends = folded(f"Slower than the aim: {missed}." if missed else "All times are within the aim.")
    return f"{folded(said)}\n\n{table(('part', 'of', 'layers', 'median', 'p95', 'published'), lines)}\n{ends}\n"


@of_file("zoo.json", read_comparison)
def zoo(comparison: Comparison) -> str:
    """Every estimator on models in real use."""
    runs = len({row.case for row in comparison.rows})
    said = (
        f"{runs} training runs of models in real use, measured on an {comparison.gpu}; none was generated. Bounds are "
        f"at {100 * comparison.level:g} %. A formula has no bound; its result is booked:"
    )
    text = f"{folded(said)}\n\n{table(('estimator', *ZOO), map(_summed, comparison.estimators))}"
    if comparison.networks:
        text += "\n" + table(("networks: estimator", *ZOO), map(_summed, comparison.networks))
    return text


@of_file("blind.json", lambda file: msgspec.json.decode(file.read_bytes()))
def blind(judged: Any) -> str:
    """Rows that were measured after the arithmetic and the models were finished."""
    lines = []
    for family, found in judged["families"].items():
        for width, answers in found["classes"].items():
            for name, shares in answers.items():
                shown = (shares["right"], shares["too_low"], found["median_error"][name])
                lines.append((accuracy.DATA[family], str(found["rows"]), width, name, *map(percent, shown)))
    return table(("networks", "runs", "class", "answer", "right", "too low", "median error"), lines)


def _summed(one: Summary) -> tuple[str, ...]:
    errors = (one.error_median, one.error_p90, one.error_worst)
    shares = (one.under_share, one.under_by_5_percent_share, one.bound_holds_share, one.overbooked_median)
    return (one.name, f"{one.answered} of {one.cases}", *map(percent, (*errors, *shares)))


def ranges(_results: Path, models: Path = SHIPPED) -> str:
    """The ranges of the training data; outside of them an estimate is refused."""
    lines = [(accuracy.DATA[facts.family], *(_range(facts, name) for name in SHOWN)) for facts in _facts(models)]
    return table(("networks", *SHOWN.values()), lines) if lines else ""


def _facts(models: Path) -> Iterator[Facts]:
    """The facts of one model of each family: both kinds were trained on the same runs."""
    for family in FAMILIES:
        files = (models / f"{family}-{kind}.json" for kind in SERVED.values())
        if file := next((file for file in files if file.exists()), None):
            yield read_facts(file)


def _range(facts: Facts, name: str) -> str:
    least, most = (2.0**value - 1 for value in facts.ranges[name])
    return f"{least:,.0f} to {most:,.0f}"


def example(_results: Path, models: Path = SHIPPED) -> str:
    """The page's own commands and their output with the shipped models."""
    if not list(_facts(models)):
        return ""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    summary = re.search(r"^```text (\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if summary is None:
        raise ValueError(f"{PAGE} has no summary to ask about")
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / summary[1]).write_text(summary[2], encoding="utf-8")
        asked = (f"{ASKED} {summary[1]} {more}".strip() for more in MORE)
        return "```console\n" + "".join(f"$ {command}\n{_printed(command, home)}" for command in asked) + "```\n"


ASKED = "carma estimate --gpu h200 --estimator gpumemnet --summary"
MORE = ("--input 784 --batch 4096 --optimizer adamw", "--input 784 --batch 200000", "--batch 4096")


def _printed(command: str, home: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CARMA_")}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=home,
        env={**environ, "CARMA_HOME": home, "COLUMNS": "100", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = re.sub(r"; took [\d.]+ s", "; took …", done.stdout)
    return "".join(textwrap.fill(line, 118, break_on_hyphens=False) + "\n" for line in text.splitlines())


class Place(NamedTuple):
    page: str
    mark: str
    make: Callable[[Path], str]


PLACES = (
    Place(PAGE, "example", example),
    Place(PAGE, "short", of_report(accuracy.short)),
    Place(PAGE, "ranges", ranges),
    Place(TRAINING_PAGE, "published", headed(accuracy.published)),
    Place(TRAINING_PAGE, "learners", of_report(accuracy.learners)),
    Place(TRAINING_PAGE, "points", of_report(accuracy.points)),
    Place(TRAINING_PAGE, "shapes", of_report(accuracy.shapes)),
    Place(TRAINING_PAGE, "bounds", of_report(accuracy.bounds)),
    Place(TRAINING_PAGE, "blind", blind),
    Place(PAGE, "zoo", zoo),
    Place(PAGE, "speed", speed),
    Place("lab/results/gpumemnet/README.md", "data", headed(accuracy.data)),
    Place("lab/results/gpumemnet/README.md", "classes", of_report(accuracy.classes)),
    Place("lab/results/gpumemnet/README.md", "pictures", pictures),
)


def pages(root: Path = ROOT, results: Path = RESULTS, places: tuple[Place, ...] = PLACES) -> dict[Path, str]:
    """The required text of every page with such figures."""
    made = ((place, place.make(results)) for place in places)
    return placed((root / place.page, place.mark, f"\n{text}\n" if text else "") for place, text in made)


def _busy(machine: Machine) -> str:
    """The load of the machine, if it was too high for reliable times."""
    load, cores = machine.load_before, machine.cores
    return f". The machine was busy: load {load:g} on {cores} cores" if load > QUIET else ""


def _span(least: float, most: float) -> str:
    return f"{least:g} ms" if least == most else f"{least:g}–{most:g} ms"


if __name__ == "__main__":
    sys.exit(renew("lab.tools.gpumemnet_tables", __doc__, sys.argv[1:], pages))
