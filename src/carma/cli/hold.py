"""`carma hold`: prevent waiting tasks from starting."""

from __future__ import annotations

from carma.cli.connection import for_chosen
from carma.cli.verb import Chosen, chosen_tasks, verb
from carma.cli.wording import WAITING
from carma.client import Client
from carma.wire.api_types import TaskView

EXAMPLES = """
carma hold 12 13
carma hold --all
"""


@verb("hold", examples=EXAMPLES)
@chosen_tasks("waiting tasks")
def command(chosen: Chosen) -> int:
    """Prevent waiting tasks from starting until `carma release`."""

    def is_wanted(task: TaskView) -> bool:
        return task.state in WAITING and not task.held

    return for_chosen(chosen, Client.hold, is_wanted)
