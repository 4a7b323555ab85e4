"""`carma submit`: captures the command with its environment, directory and umask, and queues it."""

from __future__ import annotations

import sys
from typing import Any

import click

from carma.cli.error_output import complain, is_closed, note
from carma.cli.task_flags import SubmitVerb, submit_flags
from carma.cli.verb import verb
from carma.cli.wording import which_tasks
from carma.wire.api_types import SubmitAnswer, SubmitRequest

EXAMPLES = """
carma submit -- python train.py --lr 1e-3
carma submit --gpus 2 --gpu-mem 12GiB --time 02:00:00 -- python train.py
carma submit --param lr=1e-3,1e-4 -- python train.py --lr {lr}
carma submit -d afterok:12 -- python evaluate.py
carma submit train.sh            a script with lines like: #CARMA --gpus 1 --gpu-mem 8G
carma submit --file task.toml    or the published .rad file
carma submit --dry-run -- python train.py
"""


@verb("submit", cls=SubmitVerb, examples=EXAMPLES, context_settings={"allow_interspersed_args": False})
@submit_flags
@click.option("--parsable", is_flag=True, help="Print the id and nothing else.")
@click.option("-W", "--wait", is_flag=True, help="Wait for its end; return its exit code.")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, words: tuple[str, ...], parsable: bool, wait: bool, as_json: bool, **flags: Any
) -> int | None:
    """Queue a command, a script or a task file.

    Everything after `--` is the command, word by word; it never goes through a shell. Environment, directory
    and umask are those of this moment. Slurm's spellings of the common flags work.
    """
    from carma.cli.submission import requests

    made = requests(ctx, flags, words)
    answers = send(made)
    ids = [task for answer in answers for task in answer.ids]
    if as_json:
        from carma.cli.output import print_json

        print_json(answers[0] if len(answers) == 1 else answers)
    elif parsable:
        click.echo("\n".join(str(task) for task in ids) if ids else "", nl=bool(ids))
    else:
        _say(answers)
    if ids and is_closed(sys.stdout):
        complain(f"submitted {which_tasks(ids)}, and could not say so on standard output")
    if wait and ids:
        from carma.cli.follow import wait_for

        return wait_for(ids)
    return None


def send(made: list[SubmitRequest]) -> list[SubmitAnswer]:
    """One after the other. When one is refused, those before it stay, and the message says which."""
    from carma.cli.connection import connect
    from carma.errors import CarmaError

    answers: list[SubmitAnswer] = []
    with connect() as client:
        for request in made:
            try:
                answers.append(client.submit(request))
            except CarmaError:
                ids = [task for answer in answers for task in answer.ids]
                if ids:
                    note(f"submitted before this: {which_tasks(ids)}")
                raise
    return answers


def _say(answers: list[SubmitAnswer]) -> None:
    """One line for all that were submitted; what a dry run found for each."""
    ids = [task for answer in answers for task in answer.ids]
    if ids:
        notes = {answer.note for answer in answers} if len(answers) == 1 else set()
        click.echo(": ".join((f"submitted {which_tasks(ids)}", *(each for each in notes if each))))
        return
    from carma.cli.explain import print_entries

    for answer in answers:
        click.echo(f"dry run: {answer.note or 'nothing was submitted'}")
        print_entries(answer.explain)
