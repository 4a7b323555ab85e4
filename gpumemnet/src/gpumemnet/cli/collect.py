"""`carma dataset collect`: what training runs take on this machine's GPU, row by row."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
TERMINATED = 143  # as a shell says it of SIGTERM
TELL_S = 10.0  # between two lines where there is no terminal


@verb("collect", examples=EXAMPLES)
@click.argument("configs", metavar="CONFIGS", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Where rows.jsonl goes.")
@click.option("--python", metavar="PATH", help="The interpreter that has torch (python3).")
@click.option("--parallel", type=whole(1, 64), help="So many runs side by side (24).")
@click.option("--limit", "limit_s", type=Parsed("TIME", parse_grace), default="1h", help="No run begins after it (1h).")
@click.option("--run-limit", "run_limit_s", type=Parsed("TIME", parse_grace), default="60s",
              help="A run that takes longer has failed (60s).")  # fmt: skip
@click.option("--activity", is_flag=True, help="Step time, SM activity and power too: each alone, in turn.")
@click.option("--resume/--no-resume", default=True, help="Go on with what DIR has, or begin anew.")
@click.option("--seed", type=whole(0), default=0, help="The order of the runs (0).")
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", help="cpu: a rehearsal, no figures.")
@json_flag
def command(
    configs: Path,
    out: Path,
    python: str | None,
    parallel: int | None,
    limit_s: float,
    run_limit_s: float,
    activity: bool,
    resume: bool,
    seed: int,
    device: str,
    as_json: bool,
) -> int:
    """Measure training runs on this machine's GPU.

    CONFIGS is a file of `carma dataset generate`. Each run is a process of its own, several side by side where memory
    allows. Rows go to DIR/rows.jsonl as they come; run again, it goes on with what is missing. It wants the GPU for
    itself, and an interpreter that has torch.

    Exit status: 1 where no run was measured, or where more than half of those done failed for another reason than
    memory; one that is out of memory is a result.
    """
    from carma.errors import Usage
    from gpumemnet.dataset import collect
    from gpumemnet.dataset.torch_interpreter import find_torch

    if not run_limit_s:
        raise Usage("--run-limit 0 leaves a run no time", "Such as --run-limit 60s.")
    options = collect.Options(
        configs=configs,
        out=out,
        parallel=parallel,
        limit_s=limit_s,
        run_limit_s=run_limit_s,
        activity=activity,
        resume=resume,
        seed=seed,
        device=device,
    )
    collect.check_configs(configs)  # before the seconds that torch takes
    found = find_torch(python, with_gpu=device == "cuda")
    try:
        with _progress() as tell:
            tally = collect.collect(options, found.path, tell)
    except KeyboardInterrupt as stop:
        again = "the same command" if resume else "the same command without --no-resume"
        note(f"stopped; what was measured is in {out / collect.ROWS}, and {again} goes on from there")
        return TERMINATED if isinstance(stop, collect.Stopped) else INTERRUPTED
    if as_json:
        from carma.cli.output import print_json

        print_json(tally)
    else:
        _print(tally, out / collect.ROWS)
    return _verdict(tally)


def _verdict(tally: Tally) -> int:
    """Out of memory is a result, and some that failed are as they are; most of them, or nothing at all, is not."""
    from carma.errors import Refused

    if 2 * tally.failed > tally.done:
        error, times = next(iter(tally.errors.items()))
        why = f"not for want of memory, {_times(times)} so: {error}"
        hint = "Once that is mended, or with a longer --run-limit, --no-resume tries them all again."
        raise Refused(f"{tally.failed:,} of {tally.done:,} runs failed, {why}", hint)
    if tally.done:
        return 0
    raise Refused("no run was measured before the limit", "Run it again with a longer --limit.")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr; elsewhere a line now and then."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as shown:
        task = shown.add_task("measuring", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _lines() -> Callable[[int, int], None]:
    last = (float("-inf"), -1)

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done != last[1] and (now - last[0] >= TELL_S or done == total):
            last = (now, done)
            note(f"{done:,} of {total:,} runs are done")

    return tell


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
