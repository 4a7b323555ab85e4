"""`carma release`: lets held tasks start."""

from __future__ import annotations

from carma.cli.verb import chosen_tasks, verb

WHICH = "that are held"
EXAMPLES = """
carma release 12 13
carma release --all
"""


@verb("release", examples=EXAMPLES)
@chosen_tasks(WHICH)
def command(ids: list[int], everything: bool, name: str | None) -> int:
    """Let held tasks start."""
    from carma.cli.bulk import for_chosen

    return for_chosen(WHICH, ids, everything, name, lambda client, task: client.release(task), lambda task: task.held)
