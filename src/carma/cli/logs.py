"""`carma logs`: a task's output, byte for byte."""

from __future__ import annotations

import sys

import click

from carma.cli.verb import task_id, verb, whole
from carma.wire.api_types import TaskView

EXAMPLES = """
carma logs 12
carma logs -f 12            follow it; Ctrl-C stops following, the task goes on
carma logs -n 20 --stderr 12
carma logs --attempt 1 12   of the first attempt
"""


@verb("logs", examples=EXAMPLES)
@task_id
@click.option("-f", "--follow", is_flag=True, help="Go on until the task has ended.")
@click.option("-n", "--tail", type=whole(0), metavar="N", help="Only the last N lines.")
@click.option("--stderr", "-e", "errors", is_flag=True, help="Its stderr instead of its stdout.")
@click.option("--attempt", type=whole(1), metavar="N", help="Which attempt (the newest).")
def command(task: int, follow: bool, tail: int | None, errors: bool, attempt: int | None) -> int | None:
    """A task's output, as it was written."""
    from carma.cli.connection import connect
    from carma.cli.follow import copy, detached
    from carma.cli.owned_output import open_output
    from carma.cli.reconnect import output_of, whole_output

    stream = "stderr" if errors else "stdout"
    try:
        with connect() as client:
            if not follow:
                output = open_output(client, task, stream=stream, attempt=attempt, tail=tail, follow=False).pieces
            elif attempt is None:
                output = whole_output(task, stream, tail)
            else:
                client.task(task)  # without a daemon there is nothing to wait for
                output = output_of(task, attempt, stream, tail)
            if not copy(output, sys.stdout.buffer) and tail != 0:
                _say_why(client.task(task), errors)
    except KeyboardInterrupt:
        if follow:
            return detached([task])
        raise
    return None


def _say_why(view: TaskView, errors: bool) -> None:
    """Nothing came: because it has not started, or never did, or wrote to the other stream."""
    from carma.cli.error_output import note
    from carma.cli.wording import ending

    if view.attempts:
        other = f"carma logs {view.id}" if errors else f"carma logs --stderr {view.id}"
        return note(f"nothing was written there; {other} has the other stream")
    if view.state == "finished":
        return note(f"{ending(view)} before it started")
    return note(f"task {view.id} has not started; carma explain {view.id} says why")
