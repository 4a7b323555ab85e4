"""`carma cancel`: stops running tasks and takes waiting ones out."""

from __future__ import annotations

import click

from carma.cli.parsers import parse_signal
from carma.cli.task_flags import Parsed
from carma.cli.verb import chosen_tasks, verb

WHICH = "that wait or run"
EXAMPLES = """
carma cancel 12 13
carma cancel 40-49
carma cancel --name sweep
carma cancel --all
carma cancel --signal INT 12
"""


@verb("cancel", examples=EXAMPLES)
@chosen_tasks(WHICH)
@click.option("-s", "--signal", "number", type=Parsed("SIG", parse_signal), default=15, help="First signal (TERM).")
@click.option("--reason", default="", metavar="TEXT", help="Why; kept in its story.")
def command(ids: list[int], everything: bool, name: str | None, number: int, reason: str) -> int:
    """Stop running tasks, take waiting ones out of the queue.

    A running task gets the signal, and SIGKILL after its grace time.
    """
    from carma.cli.bulk import for_chosen

    return for_chosen(
        WHICH, ids, everything, name, lambda client, task: client.cancel(task, signal=number, reason=reason)
    )
