"""`carma retry`: queue finished tasks again."""

from __future__ import annotations

import click

from carma.cli.connection import connect, for_each
from carma.cli.verb import task_ids, verb

EXAMPLES = """
carma retry 12
carma retry --fresh 12   discard the booking that recovery has found
"""


@verb("retry", examples=EXAMPLES)
@task_ids()
@click.option("--fresh", is_flag=True, help="Discard the booking that recovery has found.")
def command(ids: list[int], fresh: bool) -> int:
    """Queue finished tasks again, under the same IDs and as they were submitted."""
    with connect() as client:
        return for_each(client, ids, lambda client, task: client.retry(task, fresh=fresh))
