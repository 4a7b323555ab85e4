"""`carma release`: allow held tasks to start."""

from __future__ import annotations

from carma.cli.connection import for_chosen
from carma.cli.verb import chosen_tasks, verb
from carma.client import Client

WHICH = "held tasks"
EXAMPLES = """
carma release 12 13
carma release --all
"""


@verb("release", examples=EXAMPLES)
@chosen_tasks(WHICH)
def command(ids: list[int], everything: bool, name: str | None) -> int:
    """Allow held tasks to start."""
    return for_chosen(WHICH, ids, everything, name, Client.release, lambda task: task.held)
