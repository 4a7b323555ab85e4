"""`carma wait`: wait for the end of tasks; return their exit code."""

from __future__ import annotations

import click

from carma.cli.follow import wait_for
from carma.cli.option_types import TIME
from carma.cli.verb import task_ids, verb

EXAMPLES = """
carma wait 12
carma wait 12 13 40-49 --timeout 1h
carma wait $(carma submit --parsable -- python train.py) && echo done
"""


@verb("wait", examples=EXAMPLES)
@task_ids()
@click.option("--timeout", type=TIME, help="Stop waiting after TIME (exit code 124): 90, 15m, 2h.")
def command(ids: list[int], timeout: float | None) -> int:
    """Wait for the end of tasks; return their highest exit code.

    Ctrl-C stops waiting (exit code 130); the tasks continue.
    """
    return wait_for(ids, timeout)
