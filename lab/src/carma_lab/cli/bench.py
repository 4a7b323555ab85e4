"""`carma bench`: the experiments of carma_lab.bench."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from carma.cli import parsers as parse
from carma.cli.option_types import Function, Parsed, names, number, read_pairs, whole
from carma.cli.verb import Renamed, Verb, VerbGroup

# Equal to bench/paper/variants.py, bench/gpu/trial*.py and bench/trace/study.py, which are imported only when used.
PAPER_PARTS = ("tables", "curves", "limits", "seeds", "philly", "speed")
PARTS = ("tasks", "oom", "restart", "exclusive")
TRACE_RUNS = ("alone", "exclusive", "magm", "default", "default:known", "none")
RUNGS = ("mps", "framework", "watchdog", "nothing", "watchdog-jump", "mps-jump")
FIGURES = "File for the figures (JSON); - for standard output."
LONGEST_S = 604_800.0  # a week


def _percentages(text: str) -> tuple[int, ...]:
    """`25,50,75`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 100 for word in words):
        raise ValueError(f"{text!r} is not a list of whole numbers between 1 and 99, as in 25,50,75")
    return tuple(dict.fromkeys(map(int, words)))


def _words(text: str) -> tuple[str, ...]:
    """`trace,horus`: names that the study checks."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ValueError("no name was given")
    return words


PERCENT, NAMES = Parsed("PERCENT", _percentages), Parsed("NAMES", _words)


def _figures(
    text: str = "File for the figures (JSON); - for standard output.", **more: Any
) -> Callable[[Function], Function]:
    return click.option("--out", "json", cls=Renamed, was=("--json",), metavar="FILE", help=text, **more)


def _all_of_it(text: str) -> float:
    limit_s = parse.parse_grace(text)
    if not 1 <= limit_s <= LONGEST_S:
        raise ValueError(f"{text!r} is not possible; it must be between a second and a week")
    return limit_s


def _limit(function: Function) -> Function:
    about = "Time limit of the whole benchmark: 120s, 5m (900s)."
    return click.option("--limit", "limit_s", type=Parsed("TIME", _all_of_it), default="900s", help=about)(function)


def _study(name: str, module: str, examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A verb that passes its options to the `run` of a module, which is imported only when used."""

    def decorate(documented: Callable[..., Any]) -> click.Command:
        @functools.wraps(documented)
        def run(**flags: Any) -> Any:
            study = importlib.import_module(f"carma_lab.bench.{module}")
            return study.run(study.Options(**flags))

        return command.command(name, cls=Verb, examples=examples)(run)

    return decorate


@click.group("bench", cls=VerbGroup, examples="carma bench daemon --quick\ncarma bench collocation")
def command() -> None:
    """Measure CARMA. `crash` and `gpu` fail if CARMA breaks a guarantee; all others only print figures."""


@_study("daemon", "daemon", "carma bench daemon --quick\ncarma bench daemon --out figures.json")
@_figures()
@click.option("--quick", is_flag=True, help="Fewer repetitions: under a minute.")
def daemon() -> None:
    """Daemon: submissions, latency, decisions, processor time."""


@_study("crash", "crash.study", "carma bench crash\ncarma bench crash --kills 50 --seed 7 --out crash.json")
@click.option("--out", "json", metavar="FILE", help=FIGURES)
@click.option("--kills", type=whole(1, 100_000), default=1000, help="Number of kills (1000).")
@click.option("--restores", type=whole(0, 10_000), default=20, help="Times that a copy replaces the database (20).")
@click.option("--seed", type=whole(0), default=1, help="Seed of the choice of kills and moments (1).")
def crash() -> None:
    """Kill daemon, runners and tasks at random moments.

    A private daemon on virtual GPUs, with a stream of submissions and copies of its database. Fails if an
    acknowledged task is lost, run twice or stuck.
    """


@_study("soak", "soak", "carma bench soak\ncarma bench soak --tasks 1500 --out soak.json")
@click.option("--out", "json", metavar="FILE", help=FIGURES)
@click.option("--tasks", type=whole(100, 1_000_000), default=10_000, help="Number of tasks (10000).")
@click.option(
    "--retention", "retention_s", type=number(0, 86_400), default=240.0,
    help="Time for the removal of old tasks, in seconds (240).",
)  # fmt: skip
def soak() -> None:
    """Many tasks through one daemon: memory, files, latency.

    Figures at the beginning, at the end, and after the removal of all finished tasks. A private daemon on virtual GPUs;
    as root with several users.
    """


@_study("steps", "steps", "carma bench steps\ncarma bench steps --python venv/bin/python --out steps.json")
@click.option("--out", "json", metavar="FILE", help=FIGURES)
@click.option("--python", metavar="PATH", help="Interpreter with torch (that of CARMA).")
@click.option("--rounds", type=whole(1, 1000), default=9, help="Repetitions of each part (9).")
def steps() -> None:
    """Cost of counting optimizer steps.

    The import hook that counts the steps of a task: the time of one call and of one write, compared with a training
    step of a small network, on the GPU if there is one. Also the time that it adds to the start of an interpreter.
    """


@_study("sampler", "sampler", "carma bench sampler --seconds 20\ncarma bench sampler --out cost.json")
@_figures()
@click.option("--seconds", type=number(1, 3600), default=60.0, help="Duration of the sampling, in seconds (60).")
@click.option("--gpus", type=whole(1, 64), default=8, help="Number of GPUs; fewer cards are read several times (8).")
def sampler() -> None:
    """Processor time of GPU sampling.

    Full samples, memory samples, and each NVML call. Needs a GPU.
    """


@_study(
    "interference",
    "gpu.interference",
    (
        "carma bench interference\n"
        "carma bench interference --mechanism timeslice --pairs 50 --triples 0 --quadruples 0\n"
        "carma bench interference --percent 25,50,75 --pairs 0 --triples 0 --quadruples 0"
    ),
)
@click.option("--mechanism", type=click.Choice(["mps", "timeslice"]), default="mps", help="Sharing mechanism (mps).")
@click.option("--pairs", type=whole(0), default=70, help="Number of groups of two tasks (70).")
@click.option("--triples", type=whole(0), default=45, help="Number of groups of three tasks (45).")
@click.option("--quadruples", type=whole(0), default=35, help="Number of groups of four tasks (35).")
@click.option(
    "--percent",
    type=Parsed("PERCENT", _percentages),
    default=(),
    help="MPS thread percentages of heavy tasks next to light ones.",
)
@click.option("--seed", type=whole(0), default=1, help="Seed of the random groups (1).")
@click.option("--seconds", type=number(0.2, 600), default=1.6, help="Measured time of a group, in seconds (1.6).")
@click.option("--gpu", metavar="GPU", help="Index or UUID of the GPU (default: the first).")
@_limit
@_figures("File for the table (interference.json).", default="interference.json")
def interference() -> None:
    """How tasks on one GPU slow each other down.

    25 training tasks, each alone, and in pairs, triples and quadruples. Needs a GPU without other work, and torch.
    """


@_study(
    "collocation",
    "gpu.collocation",
    "carma bench collocation\ncarma bench collocation --redraw lab/results/h200/collocation.json",
)
@click.option("--copies", type=whole(1, 64), default=8, help="Largest number of copies (8).")
@click.option(
    "--task",
    type=click.Choice(["small", "large"]),
    multiple=True,
    default=("small", "large"),
    help="Only this task (default: both).",
)
@click.option(
    "--mechanism",
    type=click.Choice(["timeslice", "mps", "mig"]),
    multiple=True,
    help="Only this mechanism (default: all that are available).",
)
@click.option("--seconds", type=number(0.2, 600), default=4.0, help="Measured time of a point, in seconds (4).")
@click.option("--gpu", metavar="GPU", help="Index or UUID of the GPU (default: the first).")
@_limit
@_figures("File for the figures (collocation.json).", default="collocation.json")
@click.option("--plot", metavar="FILE", help="File for the picture (default: a PNG in the directory of --out).")
@click.option("--redraw", metavar="FILE", help="Table and picture of this earlier result; measure nothing.")
def collocation() -> None:
    """Throughput of 1 to 8 copies of a task on one GPU.

    A small and a large training task, time-sliced, under MPS and on MIG instances: throughput, activity and energy,
    with the published figures. Needs a GPU without other work, and torch.
    """


@_study(
    "gpu",
    "gpu.trial",
    "carma bench gpu --out lab/results/h200\ncarma bench gpu --virtual --only oom --limit 2m",
)
@click.option("--out", metavar="DIR", default=".", help="Directory for the JSON files (default: the current one).")
@click.option(
    "--only", "parts", cls=Renamed, was=("--parts",), type=names(PARTS), default=PARTS,
    help=f"Only these parts of {', '.join(PARTS)}.",
)  # fmt: skip
@_limit
@click.option("--tasks", type=whole(1, 200), default=20, help="Number of tasks that share the GPUs (20).")
@click.option("--scale", type=number(0.01, 100), default=1.0, help="Factor of the tasks' duration (1).")
@click.option(
    "--rungs", type=names(RUNGS), default=(), help=f"Only these protections of the part oom: {', '.join(RUNGS)}."
)
@click.option("--virtual", is_flag=True, help="Use virtual GPUs: no card and no torch needed.")
def gpu() -> None:
    """A private daemon on real GPUs: tasks, OOMs, restarts.

    Driven by the command line, as a user would. Fails if a guarantee is broken, or if the time was too short to show
    it.
    """


@_study(
    "trace",
    "trace.study",
    (
        "carma bench trace --out trace --limit 9m\n"
        "carma bench trace --out trace --resume --only default:known,none --limit 9m\n"
        "carma bench trace --virtual --tasks 3 --seconds 2 --span 2 --out try"
    ),
)
@click.option("--out", metavar="DIR", default=".", help="Directory of trace.json, homes and runs (default: .).")
@click.option("--trace", type=click.Choice(["t1", "t2", "mix", "heavy"]), default="t1", help="Arrivals (t1).")
@click.option("--tasks", type=whole(1, 16), default=16, help="Number of tasks (16).")
@click.option("--span", "span_s", type=number(0, 86_400), default=60.0, help="Seconds until the last arrival (60).")
@click.option("--seconds", type=number(1, 3600), default=48.0, help="Duration of a task alone, in seconds (48).")
@click.option("--seed", type=whole(0), default=1, help="Seed of the order of the tasks (1).")
@click.option(
    "--only", type=NAMES, default=TRACE_RUNS,
    help=f"Runs: alone, none (no manager), POLICY or POLICY:known ({','.join(TRACE_RUNS)}).",
)  # fmt: skip
@click.option("--repeat", type=whole(1, 100), default=1, help="Number of runs of each policy (1).")
@click.option("--split", type=whole(1, 16), default=1, help="Number of parts of a run under exclusive (1).")
@click.option(
    "--set", "settings", multiple=True, callback=read_pairs, metavar="NAME=VALUE",
    help="A setting of the daemon (repeatable).",
)  # fmt: skip
@_limit
@click.option("--resume", is_flag=True, help="Make the runs that are missing in DIR.")
@click.option("--virtual", is_flag=True, help="Use a virtual GPU and stand-ins for the scripts.")
@click.option("--redraw", is_flag=True, help="Table of the results in DIR; measure nothing.")
def trace() -> None:
    """Training scripts that arrive as in a trace, per policy.

    Sixteen scripts through a private daemon under each policy, with a fresh or a known home, and without a manager:
    makespan, completion, slowdown relative to each script alone, OOMs, activity, memory and energy. Exits with 1 if
    runs are missing when the time is over; --resume makes them. Needs a GPU without other work, torch and transformers.
    """


@_study(
    "memory-truth",
    "memory.truth",
    "carma bench memory-truth truth\ncarma bench memory-truth truth --python .venv/bin/python --first 50",
)
@click.argument("out", metavar="OUT")
@click.option("--python", metavar="PATH", help="Interpreter with torch (python3).")
@click.option("--parallel", type=whole(1, 64), default=5, help="Number of parallel runs (5).")
@click.option(
    "--limit",
    "limit_s",
    type=Parsed("TIME", parse.parse_grace),
    default="540s",
    help="No run starts after this time (540s).",
)
@click.option("--first", type=whole(1), default=0, help="Maximum number of runs (all).")
@click.option("--seed", type=whole(0), default=0, help="Seed of the order of the runs (0).")
def memory_truth() -> None:
    """Measured memory of about 680 training runs.

    Each run in its own process, with peak allocated, reserved and footprint. Rows go to OUT/truth.jsonl; a second call
    continues with the missing runs. Needs a GPU without other work, and torch, torchvision and transformers.
    """


@_study(
    "estimators",
    "memory.compare",
    (
        "carma bench estimators lab/results/h200/memory/truth.jsonl --python .venv/bin/python --first 40\n"
        "carma bench estimators truth/truth.jsonl --estimators trace,horus --out mine.json\n"
        "carma bench estimators --published18\n"
        "carma bench estimators --redraw lab/results/h200/memory/estimators.json"
    ),
)
@click.argument("truth", metavar="[TRUTH]", required=False)
@click.option("--python", metavar="PATH", help="Interpreter with torch; a CPU build is enough (python3).")
@click.option("--estimators", type=NAMES, default=("all",), help="Only these estimators: trace,horus (all).")
@click.option("--first", type=whole(1), default=0, help="Maximum number of runs (all).")
@click.option("--seed", type=whole(0), default=0, help="Seed of the order of the runs (0).")
@click.option(
    "--out", metavar="FILE", default="estimators.json", help="File for every answer, as JSON (estimators.json)."
)
@click.option(
    "--gpu", metavar="GPU", help="Card of the estimates: h200, a100-40gb (h200; a100-40gb with --published18)."
)
@click.option("--published18", is_flag=True, help="The 18 models of the paper, with its figures.")
@click.option(
    "--folds", metavar="DIR", help="Directory of workspace models that were each fitted without some families."
)
@click.option("--redraw", metavar="FILE", help="Tables of this earlier result; run nothing.")
def estimators() -> None:
    """Estimators against measured runs: errors, bounds, time.

    TRUTH is a file of `carma bench memory-truth`. Each script has one trial run for all estimators, two scripts in
    parallel. The bounds of a family use the errors of all other families. Needs no GPU.
    """


@_study("gpumemnet", "gpumemnet", "carma bench gpumemnet\ncarma bench gpumemnet --out speed.json")
@click.option("--out", metavar="FILE", help=FIGURES)
@click.option("--runs", type=whole(1), default=400, help="Repetitions of each part, after twenty warm-up runs (400).")
@click.option("--models", metavar="DIR", help="Models that carma train wrote (default: those of CARMA).")
def gpumemnet() -> None:
    """Time of GPUMemNet: reading a model summary, one inference.

    Median and p95 of one sample at a time, with the published times. Needs neither a GPU nor torch.
    """


@command.command(
    "paper",
    cls=Verb,
    examples=(
        "carma bench paper --quick --out quick\n"
        "carma bench paper --parallel 8 --philly philly.csv\n"
        "carma bench paper --only seeds,speed"
    ),
)
@click.option("--quick", is_flag=True, help="One trace and few cases, as a test: half a minute.")
@click.option("--only", type=names(PAPER_PARTS), default=(), help=f"Only these parts of {', '.join(PAPER_PARTS)}.")
@click.option(
    "--parallel", "jobs", cls=Renamed, was=("--jobs",), type=whole(1, 256), default=1,
    help="Number of parallel simulations (1).",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", default="lab/results/simulation",
    help="Directory for paper.json, README.md and the pictures (lab/results/simulation).",
)  # fmt: skip
@click.option("--seeds", type=whole(1, 10_000), default=None, help="Number of seeds of the bands (20).")
@click.option("--windows", type=whole(1, 1000), default=None, help="Number of windows of the Philly trace (10).")
@click.option(
    "--philly", type=click.Path(path_type=Path), metavar="FILE",
    help="Public Philly trace, original or imported; without it the part philly is left out.",
)  # fmt: skip
@click.option("--redraw", is_flag=True, help="Page and pictures of the results in DIR; simulate nothing.")
def paper(**flags: Any) -> int:
    """The published experiments, simulated.

    The published tables with ours, goodput's curve over the slowdown cap, the lower bound for all policies, bands over
    seeds, windows of the Philly trace, and the simulator's speed; each aim with its result. A part named with --only
    replaces that part of DIR/paper.json; the others stay. Needs matplotlib and scipy, and no GPU.
    """
    from carma_lab.bench.paper import study
    from carma_lab.cli.progress_line import simulating

    options = study.Options(**flags)
    study.check_packages(options)
    with simulating() as on_progress:
        return study.run(options, on_progress=on_progress)
