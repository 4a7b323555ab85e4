"""`carma cancel`: stop running tasks; remove waiting tasks from the queue."""

from __future__ import annotations

import click

from carma.cli.connection import for_chosen
from carma.cli.option_types import Parsed
from carma.cli.parsers import parse_signal
from carma.cli.verb import Chosen, chosen_tasks, verb

EXAMPLES = """
carma cancel 12 13
carma cancel 40-49
carma cancel --name sweep
carma cancel --all
carma cancel --signal INT 12
"""


@verb("cancel", examples=EXAMPLES)
@chosen_tasks("waiting or running tasks")
@click.option(
    "-s", "--signal", "number", type=Parsed("SIG", parse_signal), default=15, help="First signal (default TERM)."
)
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown by `carma show`.")
def command(chosen: Chosen, number: int, reason: str) -> int:
    """Stop running tasks and remove waiting tasks from the queue.

    A running task gets the signal, and SIGKILL after its grace period.
    """
    return for_chosen(chosen, lambda client, task: client.cancel(task, signal=number, reason=reason))
