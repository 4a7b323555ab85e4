"""`carma history`: how tasks ended, what they took, how long they waited."""

from __future__ import annotations

from collections.abc import Sequence

import click

from carma.cli.task_flags import filled
from carma.cli.time_span import since_at, since_flag
from carma.cli.verb import table_flags, verb, whole
from carma.wire.api_types import TaskView

USUAL = ("id", "name", "st", "exit", "time", "waited", "tries", "peak", "energy", "ended")
EXAMPLES = """
carma history                    your last 20 tasks
carma history --since 2h -u all  everybody's of the last two hours
carma history --csv -n 1000      for a spreadsheet
carma history --json             for programs
"""


@verb("history", examples=EXAMPLES)
@click.option("-u", "--user", metavar="NAME", help="Somebody else's tasks; `all` for everybody's.")
@click.option("-a", "--all", "everybody", is_flag=True, help="The same as -u all.")
@since_flag("Ended after: 2h, 7d, today, 2026-01-31.")
@click.option("-s", "--state", metavar="OUTCOME", help="Only this outcome: succeeded, failed, out_of_memory, ...")
@click.option("-n", "--limit", type=whole(1), default=20, show_default=True, help="Maximum number of tasks.")
@click.option("-o", "--format", "columns", type=filled("A,B"), help="Columns, as for `carma queue`, and exit, ended.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values.")
@table_flags
def command(
    user: str | None,
    everybody: bool,
    since: str | None,
    state: str | None,
    limit: int,
    columns: str | None,
    as_csv: bool,
    as_json: bool,
    no_header: bool,
    wide: bool,
) -> None:
    """Finished tasks, newest first.

    ST: CD succeeded, F failed, OOM out of memory, CA cancelled, TO time limit, LF launch failed, LO lost, DI
    disrupted (what it ran under failed), NF never fits. TIME is the run, WAITED the wait before it, PEAK the most
    memory seen on a GPU, ENERGY that of all attempts above what idle GPUs take. Why a task failed stands at the end
    of its row, or below it. `carma report` sums up a span.
    """
    from carma.cli.connection import connect

    with connect() as client:
        asked = since_at(client, since)
        tasks = client.history(user="all" if everybody else user, state=state, limit=limit, since=asked)
        if as_json:
            from carma.cli.output import print_json

            return print_json(tasks)
        now = client.server().now
    from carma.cli.columns import choose, print_csv, print_tasks

    names = choose(columns, ("id", "name", "user", *USUAL[2:]) if everybody or user else USUAL)
    if as_csv:
        return print_csv(tasks, names, now, header=not no_header)
    if not tasks and not no_header:
        among = "no task like that has ended" if state or since or user else "no task has ended yet"
        click.echo(f"{among}; carma queue shows those that wait or run", err=True)
        return None
    print_tasks(tasks, names, now, header=not no_header, wide=wide, endings=columns is None)
    if columns is None and len(tasks) > 1 and not no_header:
        click.echo(totals(tasks))
    return None


def totals(tasks: Sequence[TaskView]) -> str:
    """`12 tasks, 3.1 GPU-hours, 412 Wh`: of what is listed above."""
    from carma.cli.wording import gpu_hours, many
    from carma.core.model.units import show_j

    ran = [attempt for task in tasks for attempt in task.attempts]
    gpu_s = sum(
        len(attempt.gpus) * (attempt.ended_at - attempt.started_at)
        for attempt in ran
        if attempt.started_at is not None and attempt.ended_at is not None
    )
    known = [task.energy_j for task in tasks if task.energy_j is not None]
    energy = f", {show_j(sum(known))}" if known else ""
    return f"{many(len(tasks), 'task')}, {gpu_hours(gpu_s)}{energy}"
