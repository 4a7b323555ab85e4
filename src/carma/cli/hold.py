"""`carma hold`: keeps waiting tasks from starting."""

from __future__ import annotations

from carma.cli.verb import chosen_tasks, verb

WHICH = "that wait"
EXAMPLES = """
carma hold 12 13
carma hold --all
"""


@verb("hold", examples=EXAMPLES)
@chosen_tasks(WHICH)
def command(ids: list[int], everything: bool, name: str | None) -> int:
    """Keep waiting tasks from starting, until `carma release`."""
    from carma.cli.bulk import for_chosen
    from carma.cli.wording import WAITING

    return for_chosen(
        WHICH,
        ids,
        everything,
        name,
        lambda client, task: client.hold(task),
        lambda task: task.state in WAITING and not task.held,
    )
