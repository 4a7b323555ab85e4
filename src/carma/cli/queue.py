"""`carma queue`: what waits and what runs, with the reason of each wait."""

from __future__ import annotations

import click

from carma.cli.task_flags import filled
from carma.cli.verb import table_flags, verb, whole

USUAL = ("id", "name", "st", "time", "asks", "where")
ROWS = 1_000  # of a table; JSON has all
STATES = ("estimating", "queued", "starting", "running", "recovering")
EXAMPLES = """
carma queue                     your tasks
carma queue -u all              everybody's
carma queue -o id,st,reason     other columns
carma queue --json              for programs
"""


@verb("queue", examples=EXAMPLES)
@click.option("-u", "--user", metavar="NAME", help="Somebody else's tasks; `all` for everybody's.")
@click.option("-a", "--all", "everybody", is_flag=True, help="The same as -u all.")
@click.option("-s", "--state", type=click.Choice(STATES), help="Only tasks in this state.")
@click.option("-n", "--limit", type=whole(0), help=f"At most so many rows ({ROWS:,}); 0 for all.")
@click.option("-o", "--format", "columns", type=filled("A,B"), help="Columns, see above.")
@table_flags
def command(
    user: str | None,
    everybody: bool,
    state: str | None,
    limit: int | None,
    columns: str | None,
    as_json: bool,
    no_header: bool,
    wide: bool,
) -> None:
    """Tasks that are not finished, in the order in which they go.

    ST: PD waits, H held, R runs, CG is ending. GPUS is how many it asks for
    and the memory on each. Columns: id array name user st state time waited asks want gpus mem peak energy sm
    mechanism guard prio tries exit submitted ended where reason code command directory comment.
    """
    from carma.cli.connection import connect
    from carma.cli.error_output import note
    from carma.client import MOST_LISTED

    with connect() as client:
        tasks = client.tasks(user="all" if everybody else user, state=state, limit=limit or MOST_LISTED)
        if len(tasks) == MOST_LISTED:
            note(f"these are the first {MOST_LISTED:,}; the daemon lists no more at a time")
        if as_json:
            from carma.cli.output import print_json

            return print_json(tasks)
        now = client.server().now
    from carma.cli.columns import choose, print_tasks

    usual = ("id", "name", "user", *USUAL[2:]) if everybody or user else USUAL
    names = choose(columns, usual)
    if not tasks and not no_header:
        whose = "no task" if everybody or user == "all" else f"no task of {user}" if user else "none of your tasks"
        does = f"is {state}" if state else "waits or runs"
        click.echo(f"{whose} {does}; carma history shows those that have ended", err=True)
        return None
    shown = tasks[:ROWS] if limit is None else tasks
    print_tasks(shown, names, now, header=not no_header, wide=wide)
    if left := len(tasks) - len(shown):
        click.echo(f"… and {left:,} more; -n 0 shows all", err=True)
    return None
