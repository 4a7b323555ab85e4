"""`carma history`: finished tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from carma.cli.columns import choose, print_csv, print_tasks
from carma.cli.completion_items import column_items
from carma.cli.connection import connect
from carma.cli.option_types import non_empty, since_at, since_flag, whole
from carma.cli.output import print_json
from carma.cli.verb import Listing, table_flags, user_flags, verb
from carma.cli.wording import gpu_hours, short_ending
from carma.core.model.units import show_count, show_j
from carma.errors import Usage
from carma.wire.api_types import TaskView

USUAL = ("id", "name", "st", "exit", "time", "waited", "tries", "peak", "energy", "ended")
EFFICIENCY = ("id", "name", "st", "time", "waited", "mem", "peak", "sm", "slowdown", "energy")
PROGRESS = ("steps", "rate", "slowdown")  # with --wide
EXAMPLES = """
carma history                    your last 20 tasks
carma history --since 2h -u all  tasks of all users that ended in the last two hours
carma history --csv -n 1000      for a spreadsheet
carma history --efficiency       memory booked and used, SM activity, slowdown, energy, and advice
carma history --json             for programs
"""


@verb("history", examples=EXAMPLES)
@user_flags
@since_flag("Tasks that ended after TIME: 2h, 7d, today, 2026-01-31.")
@click.option("-s", "--state", metavar="OUTCOME", help="Tasks with this outcome: succeeded, failed, out_of_memory, ...")
@click.option("-n", "--limit", type=whole(1), default=20, help="Maximum number of tasks (default 20).")
@click.option(
    "-o",
    "--format",
    "columns",
    type=non_empty("A,B"),
    shell_complete=column_items,
    help="Columns, as for `carma queue`.",
)
@click.option("--efficiency", is_flag=True, help="Columns of how well each task used its GPUs, and advice.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@table_flags
def command(
    owner: str | None,
    since: str | None,
    columns: str | None,
    efficiency: bool,
    as_csv: bool,
    listing: Listing,
    **query: Any,
) -> None:
    """Finished tasks, newest first.

    ST: CD succeeded, F failed, OOM out of memory, CA cancelled, TO time limit, LF launch failed, LO lost, DI disrupted
    (its MPS server or GPU failed), NF never fits. TIME: run time. WAITED: time queued, held and between attempts. PEAK:
    maximum memory on a GPU. ENERGY: energy of all attempts above idle power. The reason of a failure is at the end of
    the row or below it. `carma report` has totals. --wide adds STEPS, STEP/S (optimizer steps, per second) and
    SLOWDOWN: time taken / time alone, ~ if it is inferred from activity. --efficiency shows SLOWDOWN, MEM (booked
    memory on a GPU), SM (activity in percent), and advice where the figures support it. A dash: not measured.
    """
    if efficiency and columns is not None:
        raise Usage("--efficiency chooses the columns, so it excludes --format", "leave out one of them")
    usual = EFFICIENCY if efficiency else (*USUAL[:-1], *PROGRESS, USUAL[-1]) if listing.wide else USUAL
    names = choose(columns, usual, with_user=owner is not None, as_json=listing.as_json)
    with connect() as client:
        tasks = client.history(user=owner, since=since_at(client, since), **query)
        if listing.as_json:
            return print_json(tasks)
        now = client.server().now
    if as_csv:
        return print_csv(tasks, [*names, "advice"] if efficiency else names, now, header=listing.header)
    if not tasks and listing.header:
        is_filtered = query["state"] or since or owner not in (None, "all")
        among = "no task with these properties has ended" if is_filtered else "no task has ended yet"
        return click.echo(f"{among}; `carma queue` lists waiting and running tasks", err=True)
    if efficiency:
        print_tasks(tasks, names, now, listing, title="ADVICE", remark=lambda task: task.advice)
    else:
        print_tasks(tasks, names, now, listing, remark=short_ending if columns is None else None)
    if columns is None and len(tasks) > 1 and listing.header:
        click.echo(totals(tasks))
    return None


def totals(tasks: Sequence[TaskView]) -> str:
    """`12 tasks, 3.1 GPU-hours, 412 Wh`."""
    gpu_s = sum(
        len(attempt.gpus) * (attempt.ended_at - attempt.started_at)
        for task in tasks
        for attempt in task.attempts
        if attempt.started_at is not None and attempt.ended_at is not None
    )
    known = [task.energy_j for task in tasks if task.energy_j is not None]
    energy = f", {show_j(sum(known))}" if known else ""
    return f"{show_count(len(tasks), 'task')}, {gpu_hours(gpu_s)}{energy}"
