"""`carma drain`: start no new tasks on a GPU or on the whole server."""

from __future__ import annotations

import click

from carma.cli.connection import connect, for_each
from carma.cli.preempt import can_be_asked
from carma.cli.verb import verb
from carma.client import MOST_LISTED, Client

EXAMPLES = """
carma drain 2 --reason "fan replaced on Monday"
carma drain 2 --preempt     also ask its tasks to save a checkpoint and leave
carma drain                 the whole server
carma resume
"""


@verb("drain", examples=EXAMPLES)
@click.argument("gpus", nargs=-1, metavar="[GPU...]")
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown to users whose tasks wait.")
@click.option("--preempt", is_flag=True, help="Ask running tasks that save checkpoints to leave.")
def command(gpus: tuple[str, ...], reason: str, preempt: bool) -> int:
    """Start no new tasks on these GPUs (index or UUID), or on the whole server.

    Running tasks continue. With --preempt, tasks submitted with --checkpoint-signal are asked to save a checkpoint and
    return to the queue.
    """
    with connect() as client:
        for gpu in gpus or (None,):
            click.echo(client.drain(gpu, reason=reason).note)
        if not preempt:
            return 0
        why = "GPU drained" + (f": {reason}" if reason else "")
        return for_each(
            client, _preemptible(client, gpus), lambda client, task: client.preempt(task, reason=why), explicit=False
        )


def _preemptible(client: Client, gpus: tuple[str, ...]) -> list[int]:
    """Running tasks of all users on these GPUs (empty: on any) that can be asked to save and have not been asked."""
    running = client.tasks(user="all", state="running", limit=MOST_LISTED)
    return [
        task.id
        for task in running
        if can_be_asked(task) and (not gpus or any(gpu in gpus for gpu in (*task.gpus, *map(str, task.gpu_indices))))
    ]
