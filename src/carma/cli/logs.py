"""`carma logs`: output of a task; -f follows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from carma.cli.connection import connect
from carma.cli.error_output import note
from carma.cli.follow import both_now, both_of, copy, detached, open_output, output_of, whole_output
from carma.cli.option_types import whole
from carma.cli.verb import task_id, verb
from carma.cli.wording import ending
from carma.client import Client
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
@click.option("-n", "--tail", type=whole(0), metavar="N", help="Print the last N lines of each stream only.")
@click.option("--stdout", "stream", flag_value="stdout", help="Print stdout only, byte for byte.")
@click.option("--stderr", "-e", "stream", flag_value="stderr", help="Print stderr only, byte for byte.")
@click.option("--attempt", type=whole(1), metavar="N", help="Number of the attempt (default: the newest).")
def command(task: int, follow: bool, tail: int | None, stream: str | None, attempt: int | None) -> int | None:
    """Output of a task: both streams, with a line `==> stderr <==` where the stream changes.

    The order between the streams is stored nowhere: stdout is printed before stderr, or, while -f follows a running
    task, each as it arrives.
    """
    try:
        with connect() as client:
            if not copy(_output(client, task, follow, tail, stream, attempt), sys.stdout.buffer) and tail != 0:
                _note_reason(client.task(task), stream)
    except KeyboardInterrupt:
        if follow:
            return detached([task])
        raise
    return None


def _output(
    client: Client, task: int, follow: bool, tail: int | None, stream: str | None, attempt: int | None
) -> Iterator[bytes]:
    if follow and attempt is None:
        return whole_output(task, stream, tail)
    if stream is not None and not follow:
        return open_output(client, task, stream=stream, attempt=attempt, tail=tail, follow=False).pieces
    view = client.task(task)  # raises if no daemon answers, where following would wait for one
    if not follow:
        return both_now(client, view, attempt, tail)
    assert attempt is not None
    return both_of(task, attempt, tail) if stream is None else output_of(task, attempt, stream, tail)


def _note_reason(view: TaskView, stream: str | None) -> None:
    """The reason why there is no output."""
    if view.attempts and stream is None:
        note(f"task {view.id} has printed nothing" + ("" if view.state == "finished" else " yet"))
    elif view.attempts:
        note(f"{stream} is empty; `carma logs {view.id}` prints both streams")
    elif view.state == "finished":
        note(f"{ending(view)} before it started")
    else:
        note(f"task {view.id} has not started; `carma explain {view.id}` prints the reason")
