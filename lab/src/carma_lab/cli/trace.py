"""`carma trace`: describes, cuts, scales, imports and generates traces, with the functions of carma_lab.traces."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carma.cli.option_types import Function, Parsed, number, whole
from carma.cli.parsers import parse_grace
from carma.cli.verb import Renamed, Verb, VerbGroup
from gpumemnet.cli.output_file_option import STDOUT, check_pictures, file_flag, folder_flag, force_flag

if TYPE_CHECKING:
    from carma.traces import Trace
    from carma.traces.table import Table

MOST_TASKS = 10_000_000
SHARES = "65,27,8"


def parse_shares(text: str) -> tuple[float, float, float]:
    """`65,27,8`: light, medium and heavy."""
    parts = [part.strip() for part in text.split(",")]
    wrong = ValueError(f"{text!r} are not three shares; write light, medium and heavy, for example {SHARES}")
    if len(parts) != 3 or not all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) for part in parts):
        raise wrong
    light, medium, heavy = map(float, parts)
    if light + medium + heavy <= 0:
        raise wrong
    return light, medium, heavy


def parse_day(text: str) -> datetime.datetime:
    """`2017-10-09`, or with the time of day."""
    with contextlib.suppress(ValueError):
        day = datetime.datetime.fromisoformat(text.strip())
        if day.tzinfo is None:
            return day
    raise ValueError(f"{text!r} is not a date; write 2017-10-09 or 2017-10-09T06:00")


@click.group(
    "trace",
    cls=VerbGroup,
    examples="carma trace describe t1\ncarma trace generate --tasks 200 --out mine.csv",
)
def command() -> None:
    """Describe, cut, scale, import and generate traces.

    TRACE is the name of a shipped trace (t1, t2, mix, heavy) or a CSV file. docs/traces.md has its columns.
    """


def _output(function: Function) -> Function:
    return file_flag("--out", "File for the trace (default: standard output).")(force_flag(function))


def _drawing(function: Function) -> Function:
    """The options of random traces."""
    seed = click.option("--seed", type=whole(0), default=0, help="Seed of the random choices (0).")
    shares = click.option(
        "--shares",
        type=Parsed("L,M,H", parse_shares),
        default=SHARES,
        help=f"Shares of light, medium and heavy tasks ({SHARES}).",
    )
    table = click.option(
        "--map", "table", metavar="FILE", help="Table of tasks to draw from: a trace without arrival_s."
    )
    return seed(shares(table(function)))


def _subcommand(name: str, examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    return command.command(name, cls=Verb, examples=examples)


@_subcommand("describe", "carma trace describe t1\ncarma trace describe mine.csv --out pictures --json")
@click.argument("trace", metavar="TRACE")
@folder_flag("Directory for pictures of arrivals, run times and memory (PNG).", cls=Renamed, was=("--plots",))
@force_flag
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
def describe(trace: str, out: Path | None, force: bool, as_json: bool) -> None:
    """Figures of a trace: tasks, arrivals, run times and memory.

    The class of a task follows from its memory on all GPUs times its duration: light below 1 GiB-hour, heavy from 14.
    """
    from carma.cli import output
    from carma.traces import find
    from carma_lab.traces import describe as described

    if out is not None:
        from carma_lab.reports.drawing import files_of, save
        from carma_lab.traces.plots import NAMES, pictures

        check_pictures(out, files_of(NAMES, ["png"]), force)
    found = find(trace)
    figures = described.describe(found)
    paths = save(pictures(found), out, ["png"]) if out is not None else []
    if as_json:
        output.print_json(figures)
    else:
        output.print_facts(described.facts(figures))
    for path in paths:
        click.echo(str(path), err=True)


@_subcommand(
    "import",
    "carma trace import philly philly.csv --start 2017-10-09 --days 7 --out week.csv\n"
    "carma trace import philly philly.csv --tasks 1000 --cluster 6214e9 --durations task --out tasks.csv",
)
@click.argument("kind", type=click.Choice(["philly"]), metavar="philly", expose_value=False)
@click.argument("file", metavar="FILE")
@click.option("--start", type=Parsed("DATE", parse_day), help="Start of the window (default: the first job).")
@click.option("--days", type=number(0.001, 10_000), help="Length of the window, in days.")
@click.option("--tasks", type=whole(1, MOST_TASKS), help="Number of tasks, instead of --days.")
@click.option("--cluster", metavar="HASH", help="Only jobs of this virtual cluster.")
@click.option("--gpus-most", type=whole(1, 100_000), default=4, help="Maximum number of GPUs of a job (4).")
@click.option(
    "--durations",
    type=click.Choice(["philly", "task"]),
    default="philly",
    help="Run times: those of the jobs, or of the tasks that replace them (philly).",
)
@_drawing
@_output
def import_(file: str, out: str | None, force: bool, table: str | None, **given: Any) -> None:
    """Make a trace from a window of the public Philly trace.

    The file has arrivals, run times, GPUs and clusters, but not the models. The shortest jobs become light tasks and
    the longest heavy ones, drawn from a table of tasks. The user of a task is its cluster.
    """
    from carma_lab.traces.philly import MapRules, Window, import_philly
    from carma_lab.traces.task_classes import Shares

    if given["days"] is not None and given["tasks"] is not None:
        raise click.UsageError("--days and --tasks cannot be combined: both set the end of the window")
    shares, durations, seed = Shares(*given.pop("shares")), given.pop("durations"), given.pop("seed")
    window = Window(**given)
    rules = MapRules(shares=shares, durations=durations, seed=seed)
    imported = import_philly(Path(file), window, rules, _table(table))
    _write(imported.trace, out, force)
    if imported.dropped:
        from carma.cli.error_output import note
        from carma.core.model.units import show_count

        gpus = show_count(window.gpus_most, "GPU")
        were = "was" if imported.dropped == 1 else "were"
        note(f"{show_count(imported.dropped, 'job')} with more than {gpus} {were} left out (--gpus-most)")


@_subcommand("cut", "carma trace cut t1 --from 1h --to 2h --out hour.csv\ncarma trace cut week.csv --to 86400")
@click.argument("trace", metavar="TRACE")
@click.option("--from", "from_s", type=Parsed("TIME", parse_grace), default=0.0, help="Start of the window (0).")
@click.option(
    "--to", "to_s", type=Parsed("TIME", parse_grace), help="End of the window (default: the end of the trace)."
)
@_output
def cut(trace: str, from_s: float, to_s: float | None, out: str | None, force: bool) -> None:
    """Keep the tasks that arrive in a window of a trace. The first of them arrives at 0.

    Times count from the start of the trace: 90, 90s, 15m, 2h.
    """
    from carma.traces import find
    from carma_lab.traces.transform import cut

    _write(cut(find(trace), from_s, float("inf") if to_s is None else to_s), out, force)


@_subcommand("scale", "carma trace scale t1 --rate 2 --out fast.csv\ncarma trace scale mix --length 0.5 --tasks 1000")
@click.argument("trace", metavar="TRACE")
@click.option("--rate", type=number(1e-6, 1e6), default=1.0, help="Factor of the arrival rate (1).")
@click.option("--length", type=number(1e-6, 1e6), default=1.0, help="Factor of the run times (1).")
@click.option("--tasks", type=whole(1, MOST_TASKS), help="Number of tasks; a shorter trace is repeated.")
@_output
def scale(trace: str, rate: float, length: float, tasks: int | None, out: str | None, force: bool) -> None:
    """Change arrival rate, run times or number of tasks of a trace.

    A trace with too few tasks is repeated, a mean gap after its last arrival, so that the rate stays.
    """
    from carma.traces import find
    from carma_lab.traces.transform import scale

    _write(scale(find(trace), rate, length, tasks), out, force)


@_subcommand(
    "generate",
    "carma trace generate --tasks 200 --rate 30 --seed 1 --out mine.csv\n"
    "carma trace generate --tasks 100000 --rate 3000 --burst --users 20 --out large.csv",
)
@click.option("--tasks", type=whole(1, MOST_TASKS), required=True, help="Number of tasks.")
@click.option("--rate", "rate_per_hour", type=number(1e-6, 1e9), default=30.0, help="Mean arrivals per hour (30).")
@click.option("--burst", is_flag=True, help="Arrivals in bursts, as in the Philly trace (default: Poisson).")
@click.option("--users", type=whole(1, 100_000), default=None, help="Number of users (default: no user names).")
@_drawing
@_output
def generate(table: str | None, out: str | None, force: bool, **given: Any) -> None:
    """Generate a random trace.

    Arrivals at a mean rate; tasks drawn by class, with the exact shares, in random order.
    """
    from carma_lab.traces.generate import Recipe, generate
    from carma_lab.traces.task_classes import Shares

    shares, users = Shares(*given.pop("shares")), given.pop("users") or 0
    _write(generate(Recipe(shares=shares, users=users, **given), _table(table)), out, force)


def _table(file: str | None) -> Table:
    from carma.traces.table import read_table, shipped_table

    return shipped_table() if file is None else read_table(Path(file))


def _write(trace: Trace, out: str | None, force: bool) -> None:
    """Writes the trace to the file or to standard output, and its totals to standard error."""
    from carma.errors import Usage
    from carma.traces.schema import unreadable
    from carma_lab.traces.writer import text
    from gpumemnet.output_file import holds_something, write_file

    for place, task in enumerate(trace.tasks, 1):
        if why := unreadable(task):
            raise Usage(f"task {place} {why}", "Such a trace could not be read: use smaller values.")
    spelled = text(trace)
    if out is None or out == STDOUT:
        click.echo(spelled, nl=False)
    else:
        if not force and holds_something(out) and Path(out).read_bytes() != spelled.encode():
            raise Usage(f"{out} exists with other content", "Choose another file, or add --force.")
        write_file(out, spelled.encode())
    summary = f"{len(trace.tasks):,} tasks, {trace.gpu_seconds / 3600:,.1f} GPU-hours, last arrival after "
    click.echo(f"{summary}{trace.tasks[-1].arrival_s:,.0f} s", err=True)
