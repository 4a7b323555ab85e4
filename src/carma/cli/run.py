"""`carma run`: submit and follow, as if the command ran here."""

from __future__ import annotations

from typing import Any

import click

from carma.cli.task_flags import SubmitVerb, submit_flags
from carma.cli.verb import verb
from carma.errors import Usage

EXAMPLES = """
carma run -- python train.py
carma run --gpu-mem 8GiB --time 10 -- python train.py   ten minutes at most
"""


@verb("run", cls=SubmitVerb, examples=EXAMPLES, context_settings={"allow_interspersed_args": False})
@submit_flags
@click.option("--quiet", is_flag=True, help="The task's output only.")
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...], quiet: bool, **flags: Any) -> int:
    """Submit one task, follow its output, return its exit code.

    Ctrl-C detaches: the task goes on, and you are told how to return.
    """
    from carma.cli.follow import follow
    from carma.cli.submission import requests
    from carma.cli.submit import send

    made = requests(ctx, flags, words)
    if len(made) != 1 or made[0].array is not None or made[0].dry_run:
        raise Usage("run follows one task; arrays, sweeps and dry runs are for submit", "try: carma submit ...")
    answer = send(made)[0]
    task = answer.ids[0]
    if not quiet:
        click.echo(f"carma: submitted task {task}", err=True)
    return follow(task, quiet)
