"""`carma submit`: queue a command, a script or a task file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from carma.cli.connection import connect
from carma.cli.error_output import complain, is_closed, note
from carma.cli.explain import entries_table
from carma.cli.follow import wait_for
from carma.cli.output import print_json, print_rich
from carma.cli.submission import note_mistakes, requests
from carma.cli.task_flags import submit_flags
from carma.cli.verb import command_verb
from carma.cli.wording import tasks_text
from carma.errors import CarmaError
from carma.wire.api_types import SubmitAnswer, SubmitRequest

EXAMPLES = """
carma submit -- python train.py --lr 1e-3
carma submit --gpus 2 --gpu-mem 12GiB --time 02:00:00 -- python train.py
carma submit --param lr=1e-3,1e-4 -- python train.py --lr {lr}
carma submit -d afterok:12 -- python evaluate.py
carma submit train.sh            a script with lines such as: #CARMA --gpus 1 --gpu-mem 8G
carma submit --file task.toml    or a .rad file
carma submit --dry-run -- python train.py
"""


@command_verb("submit", examples=EXAMPLES)
@submit_flags
@click.option("--parsable", is_flag=True, help="Print the task IDs only.")
@click.option("-W", "--wait", is_flag=True, help="Wait for the end of the task; return its exit code.")
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, words: tuple[str, ...], parsable: bool, wait: bool, as_json: bool, **flags: Any
) -> int | None:
    """Queue a command, a script or a task file.

    All words after `--` are the command; no shell interprets them. The task gets the current environment, directory
    and umask. Slurm's names of the common options work too.
    """
    answers = send(requests(ctx, flags, words))
    ids = [task for answer in answers for task in answer.ids]
    with _announced(ids):
        if as_json:
            print_json(answers[0] if len(answers) == 1 else answers)
        elif parsable:
            click.echo("".join(f"{task}\n" for task in ids), nl=False)
        else:
            _print(answers, ids)
    return wait_for(ids) if wait and ids else None


@contextlib.contextmanager
def _announced(ids: list[int]) -> Iterator[None]:
    """Names the submitted tasks on stderr if standard output is closed or cannot be written."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if not ids or isinstance(error, BrokenPipeError):
            raise
        raise CarmaError(
            f"submitted {tasks_text(ids)}, but standard output cannot be written: {error.strerror}"
        ) from error
    if ids and is_closed(sys.stdout):
        complain(f"submitted {tasks_text(ids)}, but standard output is closed")


def send(made: list[SubmitRequest]) -> list[SubmitAnswer]:
    """Submits one request after the other. If one fails, the earlier tasks stay, and a note lists them."""
    answers: list[SubmitAnswer] = []
    with connect() as client:
        for request in made:
            try:
                answers.append(client.submit(request))
            except CarmaError:
                if ids := [task for answer in answers for task in answer.ids]:
                    note(f"submitted before the error: {tasks_text(ids)}")
                raise
    note_mistakes(made)
    return answers


def _print(answers: list[SubmitAnswer], ids: list[int]) -> None:
    """One line for all submitted tasks, or the decision for each task of a dry run."""
    if ids:
        note_text = answers[0].note if len(answers) == 1 else ""
        click.echo(f"submitted {tasks_text(ids)}" + (f": {note_text}" if note_text else ""))
        return
    for answer in answers:
        click.echo(f"dry run: {answer.note or 'nothing was submitted'}")
        for table in entries_table(answer.explain):
            print_rich(table)
