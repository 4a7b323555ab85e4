"""`carma run`: submit a command, follow its output, return its exit code."""

from __future__ import annotations

from typing import Any

import click

from carma.cli.follow import follow
from carma.cli.submission import requests
from carma.cli.submit import send
from carma.cli.task_flags import submit_flags
from carma.cli.verb import command_verb
from carma.errors import Usage

EXAMPLES = """
carma run -- python train.py
carma run --gpu-mem 8GiB --time 10 -- python train.py   at most ten minutes
"""


@command_verb("run", examples=EXAMPLES)
@submit_flags
@click.option("--quiet", is_flag=True, help="Print the output of the task only.")
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...], quiet: bool, **flags: Any) -> int:
    """Submit one task, follow its output, return its exit code.

    Ctrl-C detaches: the task continues, and CARMA prints how to return.
    """
    made = requests(ctx, flags, words)
    if len(made) != 1 or made[0].array is not None or made[0].dry_run:
        raise Usage("`run` follows one task; arrays, sweeps and dry runs need `submit`", "try: carma submit ...")
    task = send(made)[0].ids[0]
    if not quiet:
        click.echo(f"carma: submitted task {task}", err=True)
    return follow(task, quiet)


for option in command.params:
    if option.name in ("array", "param", "stdin", "dry_run"):  # of `submit`; here they are refused
        option.hidden = True  # type: ignore[attr-defined]
