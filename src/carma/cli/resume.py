"""`carma resume`: accept new tasks again."""

from __future__ import annotations

import click

from carma.cli.connection import connect
from carma.cli.verb import verb

EXAMPLES = """
carma resume 2
carma resume     the whole server
"""


@verb("resume", examples=EXAMPLES)
@click.argument("gpus", nargs=-1, metavar="[GPU...]")
def command(gpus: tuple[str, ...]) -> None:
    """Accept new tasks again on these GPUs (index or UUID), or on the whole server."""
    with connect() as client:
        for gpu in gpus or (None,):
            click.echo(client.resume(gpu).note)
