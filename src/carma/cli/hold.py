"""`carma hold`: keeps waiting tasks from starting."""

from __future__ import annotations

from carma.cli.verb import task_ids, verb

EXAMPLES = """
carma hold 12 13
"""


@verb("hold", examples=EXAMPLES)
@task_ids()
def command(ids: list[int]) -> int:
    """Keep waiting tasks from starting, until `carma release`."""
    from carma.cli.connect import connect
    from carma.cli.each import for_each

    with connect() as client:
        return for_each(client, ids, lambda client, task: client.hold(task))
