"""`carma queue`: waiting and running tasks."""

from __future__ import annotations

import click

from carma.cli.columns import choose, print_tasks
from carma.cli.completion_items import column_items
from carma.cli.connection import connect
from carma.cli.error_output import note
from carma.cli.option_types import non_empty, whole
from carma.cli.output import print_json
from carma.cli.verb import Listing, table_flags, user_flags, verb
from carma.cli.watch import watch_flag
from carma.client import MOST_LISTED

USUAL = ("id", "name", "st", "time", "asks", "where")
MAX_ROWS = 1_000  # of a table; JSON has all
STATES = ("estimating", "queued", "starting", "running", "recovering")
EXAMPLES = """
carma queue                     your tasks
carma queue -u all              tasks of all users
carma queue -o id,st,reason     other columns
carma queue --watch             again every 2 seconds, until Ctrl-C
carma queue --json              for programs
"""


@verb("queue", examples=EXAMPLES)
@user_flags
@click.option("-s", "--state", type=click.Choice(STATES), help="Tasks in this state only.")
@click.option("-n", "--limit", type=whole(0), help=f"Maximum number of rows (default {MAX_ROWS:,}); 0: all.")
@click.option(
    "-o", "--format", "columns", type=non_empty("A,B"), shell_complete=column_items, help="Columns, see above."
)
@table_flags
@watch_flag
def command(owner: str | None, state: str | None, limit: int | None, columns: str | None, listing: Listing) -> None:
    """Waiting and running tasks, in queue order.

    ST: PD waiting, H held, R running, S paused, CG ending. GPUS: number of GPUs and memory on each. Columns: id array
    name user st state time waited asks want gpus mem peak energy sm mechanism guard prio tries exit submitted ended
    where reason code command directory comment.
    """
    names = choose(columns, USUAL, with_user=owner is not None, as_json=listing.as_json)
    with connect() as client:
        tasks = client.tasks(user=owner, state=state, limit=limit or MOST_LISTED)
        if len(tasks) == MOST_LISTED:
            note(f"the list has the first {MOST_LISTED:,} tasks, the limit of the daemon")
        if listing.as_json:
            return print_json(tasks)
        now = client.server().now
    if not tasks and listing.header:
        whose = "no task" if owner == "all" else f"no task of {owner}" if owner else "none of your tasks"
        does = f"is {state}" if state else "waits or runs"
        return click.echo(f"{whose} {does}; `carma history` lists finished tasks", err=True)
    shown = tasks[:MAX_ROWS] if limit is None else tasks
    print_tasks(shown, names, now, listing)
    if left := len(tasks) - len(shown):
        click.echo(f"… and {left:,} more; -n 0 shows all", err=True)
    return None
