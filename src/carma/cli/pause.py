"""`carma pause`: stop the processes of running tasks without ending them."""

from __future__ import annotations

import click

from carma.cli.connection import for_chosen
from carma.cli.verb import Chosen, chosen_tasks, verb
from carma.wire.api_types import TaskView

EXAMPLES = """
carma pause 12
carma pause 12 13 --reason "a demo until noon"
carma pause --all
"""


@verb("pause", examples=EXAMPLES)
@chosen_tasks("running tasks")
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown by `carma show`.")
def command(chosen: Chosen, reason: str) -> int:
    """Pause running tasks until `carma unpause`.

    A paused task uses no GPU and keeps its GPU memory. Its time limit stands still. Tasks with several processes or
    GPUs cannot be paused.
    """

    def is_wanted(task: TaskView) -> bool:
        return task.state == "running" and task.paused_at is None

    return for_chosen(chosen, lambda client, task: client.pause(task, reason=reason), is_wanted)
