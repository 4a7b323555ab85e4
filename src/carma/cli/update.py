"""`carma update`: changes a waiting task."""

from __future__ import annotations

import click

from carma.cli.task_flags import Parsed, filled
from carma.cli.verb import task_ids, verb, whole
from carma.core.model.units import parse_duration_s, parse_mib
from carma.errors import Usage

EXAMPLES = """
carma update 12 --gpu-mem 16GiB
carma update 12 13 --priority 10 --time 02:00:00
"""


@verb("update", examples=EXAMPLES)
@task_ids()
@click.option("-J", "--job-name", "--name", "name", type=filled("NAME"), help="Another name.")
@click.option("--priority", type=whole(-10_000, 10_000), help="Larger goes first.")
@click.option("--gpu-mem", type=Parsed("SIZE", parse_mib), help="Memory it takes on each GPU.")
@click.option("-t", "--time", "limit", type=Parsed("TIME", parse_duration_s), help="Another time limit.")
@click.option("--comment", metavar="TEXT", help="Another remark.")
def command(
    ids: list[int],
    name: str | None,
    priority: int | None,
    gpu_mem: int | None,
    limit: float | None,
    comment: str | None,
) -> int:
    """Change tasks that have not started. Only what is given changes."""
    from carma.cli.bulk import for_each
    from carma.cli.connection import connect
    from carma.client import Client
    from carma.wire.api_types import Done, UpdateRequest

    request = UpdateRequest(name=name, priority=priority, gpu_memory_mib=gpu_mem, time_limit_s=limit, comment=comment)
    if request == UpdateRequest():
        raise Usage("nothing to change was given", "try: carma update 12 --gpu-mem 16GiB")

    def change(client: Client, task: int) -> Done:
        client.update(task, request)
        return Done(note=f"task {task} changed")

    with connect() as client:
        return for_each(client, ids, change)
