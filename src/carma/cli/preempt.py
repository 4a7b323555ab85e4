"""`carma preempt`: ask running tasks to save a checkpoint and return to the queue."""

from __future__ import annotations

import click

from carma.cli.connection import for_chosen
from carma.cli.verb import Chosen, chosen_tasks, verb
from carma.client import Client
from carma.wire.api_types import Done, TaskView

EXAMPLES = """
carma preempt 12                 save a checkpoint, exit, return to the queue
carma preempt 12 --hold          the same, then wait for `carma release`
carma preempt --all --hold --reason "the server is needed tonight"
"""


@verb("preempt", examples=EXAMPLES)
@chosen_tasks("running tasks that save checkpoints")
@click.option("--hold", is_flag=True, help="Hold the tasks when they are back in the queue.")
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown by `carma show`.")
def command(chosen: Chosen, hold: bool, reason: str) -> int:
    """Ask running tasks to save a checkpoint and return to the queue.

    Only tasks submitted with --checkpoint-signal can be asked. A task that does not exit within its --checkpoint-grace
    continues to run; `preempt` never kills a task.
    """

    def preempt(client: Client, task: int) -> Done:
        return client.preempt(task, hold=hold, reason=reason)

    return for_chosen(chosen, preempt, can_be_asked)


def can_be_asked(task: TaskView) -> bool:
    return task.state == "running" and task.checkpoint_signal is not None and task.asked_to_save_at is None
