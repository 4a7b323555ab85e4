"""`carma wait`: the exit codes of tasks, when they have ended."""

from __future__ import annotations

import click

from carma.cli.parsers import parse_grace
from carma.cli.task_flags import Parsed
from carma.cli.verb import task_ids, verb

EXAMPLES = """
carma wait 12
carma wait 12 13 40-49 --timeout 1h
carma wait $(carma submit --parsable -- python train.py) && echo done
"""


@verb("wait", examples=EXAMPLES)
@task_ids()
@click.option(
    "--timeout", type=Parsed("TIME", parse_grace), help="Give up after so long (exit 124): seconds, or 15m, 2h."
)
def command(ids: list[int], timeout: float | None) -> int:
    """Wait until tasks have ended; return their exit code, the highest of several.

    Ctrl-C stops waiting (exit 130); the tasks go on.
    """
    from carma.cli.follow import wait_for

    return wait_for(ids, timeout)
