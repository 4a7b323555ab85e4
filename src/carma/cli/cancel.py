"""`carma cancel`: stops running tasks and takes waiting ones out."""

from __future__ import annotations

import click

from carma.cli.flags import Parsed
from carma.cli.parse import parse_signal
from carma.cli.verb import task_ids, verb
from carma.errors import NotFound, Usage

EXAMPLES = """
carma cancel 12 13
carma cancel 40-49
carma cancel --name sweep
carma cancel --all
carma cancel --signal INT 12
"""


@verb("cancel", examples=EXAMPLES)
@task_ids(required=False)
@click.option("--all", "everything", is_flag=True, help="All your tasks that wait or run.")
@click.option("-n", "--name", metavar="NAME", help="All your tasks of this name.")
@click.option("-s", "--signal", "number", type=Parsed("SIG", parse_signal), default=15, help="First signal (TERM).")
@click.option("--reason", default="", metavar="TEXT", help="Why; kept in its story.")
def command(ids: list[int], everything: bool, name: str | None, number: int, reason: str) -> int:
    """Stop running tasks, take waiting ones out of the queue.

    A running task gets the signal, and SIGKILL after its grace time.
    """
    from carma.cli.connect import connect
    from carma.cli.each import for_each

    if sum((bool(ids), everything, name is not None)) != 1:
        raise Usage("say which tasks: ids, --name or --all, one of them", "carma queue lists your tasks")
    with connect() as client:
        if not ids:
            ids = [task.id for task in client.tasks() if everything or task.name == name]
            if not ids and name is not None:
                raise NotFound(f"none of your tasks that wait or run is named {name!r}", "carma queue lists them")
            if not ids:
                click.echo("none of your tasks waits or runs")
        return for_each(client, ids, lambda client, task: client.cancel(task, signal=number, reason=reason))
