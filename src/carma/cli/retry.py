"""`carma retry`: a finished task once more, under the same id."""

from __future__ import annotations

import click

from carma.cli.verb import task_ids, verb

EXAMPLES = """
carma retry 12
carma retry --fresh 12   forget what recovery learnt about its memory
"""


@verb("retry", examples=EXAMPLES)
@task_ids()
@click.option("--fresh", is_flag=True, help="Forget the booking that recovery found.")
def command(ids: list[int], fresh: bool) -> int:
    """Queue finished tasks again, each under its id, as they were submitted."""
    from carma.cli.bulk import for_each
    from carma.cli.connection import connect

    with connect() as client:
        return for_each(client, ids, lambda client, task: client.retry(task, fresh=fresh))
