"""`carma drain`: no new tasks on a GPU, or on the server."""

from __future__ import annotations

import click

from carma.cli.verb import verb

EXAMPLES = """
carma drain 2 --reason "fan replaced on Monday"
carma drain                 the whole server
carma resume
"""


@verb("drain", examples=EXAMPLES)
@click.argument("gpus", nargs=-1, metavar="[GPU...]")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown to those who wait.")
def command(gpus: tuple[str, ...], reason: str) -> None:
    """No new tasks on these GPUs (index or UUID), or on the whole server. Running tasks go on."""
    from carma.cli.connect import connect

    with connect() as client:
        for gpu in gpus or (None,):
            click.echo(client.drain(gpu, reason=reason).note)
