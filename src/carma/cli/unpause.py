"""`carma unpause`: let paused tasks continue."""

from __future__ import annotations

from carma.cli.connection import for_chosen
from carma.cli.verb import Chosen, chosen_tasks, verb
from carma.client import Client

EXAMPLES = """
carma unpause 12 13
carma unpause --all
"""


@verb("unpause", examples=EXAMPLES)
@chosen_tasks("paused tasks")
def command(chosen: Chosen) -> int:
    """Let paused tasks continue."""
    return for_chosen(chosen, Client.unpause, lambda task: task.paused_at is not None)
