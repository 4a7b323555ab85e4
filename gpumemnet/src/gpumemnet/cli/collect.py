"""`carma dataset collect`: measures training runs on this server's GPU, row by row."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carma.cli.error_output import INTERRUPTED, note
from carma.cli.option_types import Parsed, whole
from carma.cli.parsers import parse_grace
from carma.cli.verb import json_flag, verb

if TYPE_CHECKING:
    from gpumemnet.dataset.collect import Tally

EXAMPLES = """
carma dataset collect configs.jsonl --out rows
carma dataset collect configs.jsonl --out rows --limit 10m --python .venv/bin/python
carma dataset collect some.jsonl --out activity --activity
"""
TERMINATED = 143  # exit status after SIGTERM, as of a shell
PROGRESS_S = 10.0  # between two lines of progress without a terminal


@verb("collect", examples=EXAMPLES, short_help="Run configs on a GPU and record their memory and activity.")
@click.argument("configs", metavar="CONFIGS", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Directory of rows.jsonl.")
@click.option("--python", metavar="PATH", help="Python interpreter with torch (default: python3).")
@click.option("--parallel", type=whole(1, 64), help="Maximum number of parallel runs (default 24).")
@click.option(
    "--limit",
    "limit_s",
    type=Parsed("TIME", parse_grace),
    default="1h",
    help="Start no more runs after this time (default 1h).",
)
@click.option("--run-limit", "run_limit_s", type=Parsed("TIME", parse_grace), default="60s",
              help="Maximum time of one run (default 60s).")  # fmt: skip
@click.option("--activity", is_flag=True, help="Also measure step time, SM activity and power, one run at a time.")
@click.option(
    "--resume/--no-resume", default=True, help="Continue with the rows in DIR, or set them aside (default: continue)."
)
@click.option("--seed", type=whole(0), default=0, help="Seed of the order of the runs (default 0).")
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    default="cuda",
    help="cpu is for tests and measures no memory (default cuda).",
)
@json_flag
def command(python: str | None, as_json: bool, **flags: Any) -> int:
    """Measure training runs on this server's GPU.

    CONFIGS is a file of `carma dataset generate`. Each run is a process; as many run in parallel as memory allows. Rows
    are appended to DIR/rows.jsonl, and the same command continues with the missing runs. The GPU must be free, and
    torch must be installed for the interpreter.

    The exit status is 1 if no run was measured, or if more than half of the runs failed for another reason than memory.
    A run that is out of memory is a result.
    """
    from carma.errors import Usage
    from gpumemnet.dataset import collect
    from gpumemnet.dataset.torch_interpreter import find_torch

    options = collect.CollectOptions(**flags)
    if not options.run_limit_s:
        raise Usage("--run-limit 0 leaves a run no time", "Use for example --run-limit 60s.")
    collect.check_configs(options.configs)  # before torch is imported, which takes seconds
    interpreter = find_torch(python, with_gpu=options.device == "cuda")
    rows = options.out / collect.ROWS
    try:
        with _progress() as report:
            tally = collect.collect(options, interpreter, report)
    except KeyboardInterrupt as stop:
        again = "the same command" if options.resume else "the same command without --no-resume"
        note(f"stopped; what was measured is in {rows}, and {again} goes on from there")
        return TERMINATED if isinstance(stop, collect.Terminated) else INTERRUPTED
    if as_json:
        from carma.cli.output import print_json

        print_json(tally)
    else:
        _print(tally, rows)
    return _verdict(tally)


def _verdict(tally: Tally) -> int:
    """The exit status; raises Refused if more than half of the runs failed, or none was measured."""
    from carma.errors import Refused

    if 2 * tally.failed > tally.done:
        error, times = next(iter(tally.errors.items()))
        why = f"not for want of memory, {_times(times)} so: {error}"
        hint = "Correct the cause, or set a longer --run-limit; then repeat all runs with --no-resume."
        raise Refused(f"{tally.failed:,} of {tally.done:,} runs failed, {why}", hint)
    if tally.done:
        return 0
    raise Refused("no run was measured before the limit", "Run it again with a longer --limit.")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar if stderr is a terminal, else a line every PROGRESS_S."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("measuring"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with progress.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("measuring", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _lines() -> Callable[[int, int], None]:
    last = (float("-inf"), -1)

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done != last[1] and (now - last[0] >= PROGRESS_S or done == total):
            last = (now, done)
            note(f"{done:,} of {total:,} runs are done")

    return report


def _print(tally: Tally, rows: Path) -> None:
    from carma.cli.output import print_facts
    from carma.core.model.units import show_s

    print_facts(
        [
            ("measured", f"{tally.measured:,}"),
            ("out of memory", f"{tally.oom:,}"),
            ("failed", f"{tally.failed:,}"),
            *(("", f"{_times(times)}: {error}") for error, times in tally.errors.items()),
            ("left", f"{tally.left:,}" + (": run it again to go on" if tally.left else "")),
            ("took", f"{show_s(tally.seconds)}, {tally.per_s:g} a second"),
            ("rows", str(rows)),
        ]
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
