"""`carma release`: lets held tasks start."""

from __future__ import annotations

from carma.cli.verb import task_ids, verb

EXAMPLES = """
carma release 12 13
"""


@verb("release", examples=EXAMPLES)
@task_ids()
def command(ids: list[int]) -> int:
    """Let held tasks start."""
    from carma.cli.connect import connect
    from carma.cli.each import for_each

    with connect() as client:
        return for_each(client, ids, lambda client, task: client.release(task))
