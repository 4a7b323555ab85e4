"""`carma update`: change waiting tasks."""

from __future__ import annotations

import click

from carma.cli.connection import connect, for_each
from carma.cli.option_types import GPU_MEMORY, Parsed, non_empty, whole
from carma.cli.verb import task_ids, verb
from carma.client import Client
from carma.core.model.units import parse_duration_s
from carma.errors import Usage
from carma.wire.api_types import Done, UpdateRequest

EXAMPLES = """
carma update 12 --gpu-mem 16GiB
carma update 12 13 --priority 10 --time 02:00:00
"""


@verb("update", examples=EXAMPLES)
@task_ids()
@click.option("-J", "--job-name", "--name", "name", type=non_empty("NAME"), help="New name.")
@click.option("--priority", type=whole(-10_000, 10_000), help="New priority; higher starts first.")
@click.option("--gpu-mem", "gpu_memory_mib", type=GPU_MEMORY, help="New memory on each GPU.")
@click.option("-t", "--time", "time_limit_s", type=Parsed("TIME", parse_duration_s), help="New time limit.")
@click.option("--comment", metavar="TEXT", help="New comment.")
def command(ids: list[int], **changes: str | int | float | None) -> int:
    """Change waiting tasks. Properties that are not given stay as they are."""
    if all(value is None for value in changes.values()):
        raise Usage("no change was given", "try: carma update 12 --gpu-mem 16GiB")
    request = UpdateRequest(**changes)  # type: ignore[arg-type]  # the options have the names and types of the fields

    def change(client: Client, task: int) -> Done:
        client.update(task, request)
        return Done(note=f"task {task} changed")

    with connect() as client:
        return for_each(client, ids, change)
