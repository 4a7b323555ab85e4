"""`carma release`: allow held tasks to start."""

from __future__ import annotations

from carma.cli.connection import for_chosen
from carma.cli.verb import Chosen, chosen_tasks, verb
from carma.client import Client

EXAMPLES = """
carma release 12 13
carma release --all
"""


@verb("release", examples=EXAMPLES)
@chosen_tasks("held tasks")
def command(chosen: Chosen) -> int:
    """Allow held tasks to start."""
    return for_chosen(chosen, Client.release, lambda task: task.held)
