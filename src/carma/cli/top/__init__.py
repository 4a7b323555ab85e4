"""`carma top`: GPUs and tasks, live. Textual is imported only when the view starts."""

from __future__ import annotations

import os
import sys

import click

from carma.cli.connection import ask
from carma.cli.option_types import number
from carma.cli.verb import verb
from carma.client import Client
from carma.errors import Usage

EXAMPLES = """
carma top                 GPUs and the tasks of all users
carma top -u ada          tasks of one user
carma top --interval 10   over a slow connection
"""


@verb("top", examples=EXAMPLES)
@click.option("-u", "--user", metavar="NAME", default="all", help="Tasks of this user only.")
@click.option(
    "--interval", type=number(0.2, 3600), default=2.0, metavar="SECONDS", help="Time between two updates (default 2)."
)
def command(user: str, interval: float) -> None:
    """GPUs, running tasks and waiting tasks, live.

    `?` lists the keys: sort, filter, open a task with its decision, memory and log, cancel, hold, pause. A dash is a
    figure that is not measured. Colours are those of the terminal; NO_COLOR=1 shows none.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        hint = "`carma queue --watch` and `carma gpus --watch` print to any output"
        raise Usage("carma top needs a terminal with a cursor", hint)
    ask(Client.server)  # a daemon that does not answer is an error before the screen changes
    from carma.cli.top.app import Top

    Top(user, interval).run(mouse=False)  # the terminal's own selection keeps working
