"""`carma hold`: prevent waiting tasks from starting."""

from __future__ import annotations

from carma.cli.connection import for_chosen
from carma.cli.verb import chosen_tasks, verb
from carma.cli.wording import WAITING
from carma.client import Client
from carma.wire.api_types import TaskView

WHICH = "waiting tasks"
EXAMPLES = """
carma hold 12 13
carma hold --all
"""


@verb("hold", examples=EXAMPLES)
@chosen_tasks(WHICH)
def command(ids: list[int], everything: bool, name: str | None) -> int:
    """Prevent waiting tasks from starting until `carma release`."""

    def is_wanted(task: TaskView) -> bool:
        return task.state in WAITING and not task.held

    return for_chosen(WHICH, ids, everything, name, Client.hold, is_wanted)
