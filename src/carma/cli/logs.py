"""`carma logs`: output of a task; -f follows it."""

from __future__ import annotations

import sys

import click

from carma.cli.connection import connect
from carma.cli.error_output import note
from carma.cli.follow import copy, detached, open_output, output_of, whole_output
from carma.cli.option_types import whole
from carma.cli.verb import task_id, verb
from carma.cli.wording import ending
from carma.wire.api_types import TaskView

EXAMPLES = """
carma logs 12
carma logs -f 12            follow the output; Ctrl-C stops following, the task continues
carma logs -n 20 --stderr 12
carma logs --attempt 1 12   output of the first attempt
"""


@verb("logs", examples=EXAMPLES)
@task_id
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the task has ended.")
@click.option("-n", "--tail", type=whole(0), metavar="N", help="Print the last N lines only.")
@click.option("--stderr", "-e", "errors", is_flag=True, help="Print stderr instead of stdout.")
@click.option("--attempt", type=whole(1), metavar="N", help="Number of the attempt (default: the newest).")
def command(task: int, follow: bool, tail: int | None, errors: bool, attempt: int | None) -> int | None:
    """Output of a task, byte for byte."""
    stream = "stderr" if errors else "stdout"
    try:
        with connect() as client:
            if not follow:
                output = open_output(client, task, stream=stream, attempt=attempt, tail=tail, follow=False).pieces
            elif attempt is None:
                output = whole_output(task, stream, tail)
            else:
                client.task(task)  # raises if no daemon answers, where output_of would wait for one
                output = output_of(task, attempt, stream, tail)
            if not copy(output, sys.stdout.buffer) and tail != 0:
                _note_reason(client.task(task), errors)
    except KeyboardInterrupt:
        if follow:
            return detached([task])
        raise
    return None


def _note_reason(view: TaskView, errors: bool) -> None:
    """The reason why there is no output."""
    if view.attempts:
        this, other = ("stderr", "") if errors else ("stdout", " --stderr")
        note(f"{this} is empty; `carma logs{other} {view.id}` prints the other stream")
    elif view.state == "finished":
        note(f"{ending(view)} before it started")
    else:
        note(f"task {view.id} has not started; `carma explain {view.id}` prints the reason")
