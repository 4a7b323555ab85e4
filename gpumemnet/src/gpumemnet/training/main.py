"""`carma train`: reads the data, evaluates the learners on folds, writes the shipped models."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path

from carma import __version__
from carma.core.model.values import Record
from carma.errors import Usage
from gpumemnet.directories import HINT as OUT_HINT
from gpumemnet.directories import check_folder
from gpumemnet.training import NAMES, PUBLISHED, SERVED
from gpumemnet.training.accuracy_report import HINT as REPORT_HINT
from gpumemnet.training.accuracy_report import Entry, Report, about, entries, write
from gpumemnet.training.cross_validation import Job, Tell, by_chance, by_shape, compete, workers
from gpumemnet.training.plots import draw
from gpumemnet.training.samples import Samples, read_public, read_tables
from gpumemnet.training.shipped_models import make_held, scores_of

PUBLIC = "public-mlp"
LEAST_RUNS = 30  # with fewer, folds and members of an ensemble are too small
# The most expensive first; cheap ones fill the gaps at the end.
COSTLY = ("graph", PUBLISHED, "transformer-based", "boosted", "mlp-based", "extra-trees")

PACKAGES = ("torch", "scikit-learn", "numpy", "onnxruntime")  # whose versions a report names
OF_SHAPES = ("mlp-based", "extra-trees")  # there are many shapes: the default learner and the fastest


class Options(Record, frozen=True, kw_only=True):
    data: tuple[str, ...] = ()
    out: str = ""
    install: bool = False  # `out` is the user's own directory
    families: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seed: int = 0
    evaluate: bool = False
    shapes: bool = True
    public_mlp: str = ""
    report: str = "lab/results/gpumemnet"

    @property
    def report_file(self) -> Path:
        return Path(self.report) / "accuracy.json"


class Done(Record, frozen=True, kw_only=True):
    models: tuple[str, ...]
    entries: tuple[Entry, ...]
    report: str = ""


def run(options: Options, tell: Tell) -> Done:
    check(options)
    own, public = _read(options, tell)
    learners = options.only or NAMES
    found: tuple[Entry, ...] = ()
    if options.evaluate:
        found = _evaluate(options, {**own, **public}, learners, tell)
    models = _make(options, own, learners, found, tell) if options.out and own else ()
    return Done(models=models, entries=found, report=str(options.report_file) if options.evaluate else "")


def check(options: Options) -> None:
    """Refuses, before an hour is spent, what would write no model or could not be written."""
    if options.out and options.only and not set(options.only) & set(SERVED):
        named = f"of {', '.join(options.only)} there are no models to write to {options.out}"
        raise Usage(named, f"--out makes those of {' and '.join(SERVED)}; --evaluate judges any learner.")
    if options.out and not options.data:
        raise Usage(f"there is no data to make models for {options.out} from", "Name files of `carma dataset pack`.")
    if options.out:
        hint = "--install writes there; --out DIR names another place." if options.install else OUT_HINT
        check_folder(Path(options.out), hint)
    if options.evaluate:
        check_folder(options.report_file.parent, REPORT_HINT)


def _make(
    options: Options, own: Mapping[str, Samples], learners: Sequence[str], found: Sequence[Entry], tell: Tell
) -> tuple[str, ...]:
    wanted = [(data, learner) for learner in reversed(tuple(SERVED)) if learner in learners for data in own]
    models = []
    with workers(own) as pool:
        waiting = [
            pool.submit(make_held, data, learner, options.out, options.seed, scores_of(found, data, learner))
            for data, learner in wanted
        ]
        for future in as_completed(waiting):
            models.append(future.result())
            tell(f"{len(models)}/{len(wanted)}  {models[-1]}")
    return tuple(sorted(models))


def _read(options: Options, tell: Tell) -> tuple[dict[str, Samples], dict[str, Samples]]:
    tables = read_tables([Path(path) for path in options.data])
    own: dict[str, Samples] = {
        family: samples for family, samples in tables.items() if not options.families or family in options.families
    }
    if tables and not own:
        there = f"there are no runs of {', '.join(options.families)} in {', '.join(options.data)}"
        raise Usage(there, f"--families: there are some of {', '.join(tables)}.")
    public = {PUBLIC: read_public(Path(options.public_mlp))} if options.public_mlp else {}
    if not own and not public:
        raise Usage("there is no data to learn from", "Name files of `carma dataset pack`, or --public-mlp FILE.")
    for name, samples in {**own, **public}.items():
        if len(samples) < LEAST_RUNS:
            few = f"{name}: {len(samples):,} runs are too few to learn from"
            raise Usage(few, f"{LEAST_RUNS} are needed, hundreds to be of use; carma dataset collect adds some.")
        tell(f"{name}: {len(samples):,} runs on {samples.origin.gpu}")
    return own, public


def _evaluate(
    options: Options, samples: Mapping[str, Samples], learners: Sequence[str], tell: Tell
) -> tuple[Entry, ...]:
    jobs = _jobs(options, samples, learners)
    found = entries(samples, list(compete(samples, jobs, tell)))
    report = Report(
        command=_command(options),
        seed=options.seed,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions={"carma": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        cores=len(os.sched_getaffinity(0)),
        data={name: about(one) for name, one in samples.items()},
        entries=found,
    )
    write(report, options.report_file)
    for path in draw(found, options.report_file.parent):
        tell(f"{path}")
    return found


def _jobs(options: Options, samples: Mapping[str, Samples], learners: Sequence[str]) -> list[Job]:
    jobs = []
    for learner in (name for name in COSTLY if name in learners):
        for data, one in samples.items():
            chance = by_chance(len(one), options.seed)
            jobs += [Job(data, learner, "folds", split, options.seed) for split in chance]
            if options.shapes and learner in OF_SHAPES:
                jobs += [Job(data, learner, "shapes", split, options.seed) for split in by_shape(one.shapes)]
    return jobs


def _command(options: Options) -> str:
    words = ["carma", "train", *options.data]
    named = {
        "--out": "" if options.install else options.out,
        "--public-mlp": options.public_mlp and Path(options.public_mlp).name,
        "--families": ",".join(options.families),
        "--only": ",".join(options.only),
        "--seed": str(options.seed),
    }
    words += [word for flag, value in named.items() if value for word in (flag, value)]
    words += ["--install"] if options.install else []
    words += ["--evaluate"] if options.evaluate else []
    words += [] if options.shapes else ["--no-shapes"]
    return shlex.join(words)
