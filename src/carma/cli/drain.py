"""`carma drain`: no new tasks on a GPU, or on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from carma.cli.verb import verb

if TYPE_CHECKING:
    from carma.client import Client
    from carma.wire.api_types import TaskView

EXAMPLES = """
carma drain 2 --reason "fan replaced on Monday"
carma drain 2 --preempt     and ask those on it that can to save and go elsewhere
carma drain                 the whole server
carma resume
"""


@verb("drain", examples=EXAMPLES)
@click.argument("gpus", nargs=-1, metavar="[GPU...]")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown to those who wait.")
@click.option("--preempt", is_flag=True, help="Ask the tasks on it that save on a signal to leave.")
def command(gpus: tuple[str, ...], reason: str, preempt: bool) -> int:
    """No new tasks on these GPUs (index or UUID), or on the whole server.

    Running tasks go on; with --preempt those that were submitted with --checkpoint-signal are asked to
    save and wait in the queue.
    """
    from carma.cli.bulk import for_each
    from carma.cli.connection import connect

    with connect() as client:
        for gpu in gpus or (None,):
            click.echo(client.drain(gpu, reason=reason).note)
        if not preempt:
            return 0
        found = _that_can_leave(client, gpus)
        why = f"it is drained{': ' + reason if reason else ''}"
        return for_each(client, found, lambda client, task: client.preempt(task, reason=why), named=False)


def _that_can_leave(client: Client, gpus: tuple[str, ...]) -> list[int]:
    """Running tasks of all users on those GPUs (none: any) that can be asked to save and were not yet."""
    from carma.client import MOST_LISTED

    def there(task: TaskView) -> bool:
        return not gpus or any(gpu in gpus for gpu in (*task.gpus, *map(str, task.gpu_indices)))

    running = client.tasks(user="all", state="running", limit=MOST_LISTED)
    able = (task for task in running if task.checkpoint_signal is not None and task.asked_to_save_at is None)
    return [task.id for task in able if there(task)]
