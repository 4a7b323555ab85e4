"""`carma preempt`: asks running tasks to save and come back."""

from __future__ import annotations

import click

from carma.cli.verb import chosen_tasks, verb

WHICH = "that run and save on a signal"
EXAMPLES = """
carma preempt 12                 save, end, and wait in the queue again
carma preempt 12 --hold          the same, and wait for `carma release`
carma preempt --all --hold --reason "the server is needed tonight"
"""


@verb("preempt", examples=EXAMPLES)
@chosen_tasks(WHICH)
@click.option("--hold", is_flag=True, help="Hold it when it is back in the queue.")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown by `carma show`.")
def command(ids: list[int], everything: bool, name: str | None, hold: bool, reason: str) -> int:
    """Ask running tasks to save and end; they go back into the queue.

    Only for tasks that were submitted with --checkpoint-signal. One that does not end within its
    --checkpoint-grace goes on running; nothing is ever stopped by this.
    """
    from carma.cli.bulk import for_chosen

    return for_chosen(
        WHICH,
        ids,
        everything,
        name,
        lambda client, task: client.preempt(task, hold=hold, reason=reason),
        lambda task: task.state == "running" and task.checkpoint_signal is not None and task.asked_to_save_at is None,
    )
