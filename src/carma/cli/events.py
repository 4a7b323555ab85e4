"""`carma events`: events of the daemon as they happen."""

from __future__ import annotations

import click
import msgspec

from carma.cli.connection import connect
from carma.cli.output import moment, safe
from carma.cli.verb import verb

EXAMPLES = """
carma events
carma events --json   one JSON object on each line
"""


@verb("events", examples=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on each line.")
@click.option("--task", type=int, metavar="ID", help="Events of this task only.")
def command(as_json: bool, task: int | None) -> None:
    """Events of the daemon as they happen, until Ctrl-C."""
    with connect() as client:
        for event in client.events():
            if task is not None and event.task != task:
                continue
            line = msgspec.json.encode(event) if as_json else f"{moment(event.at)}  {safe(event.text or event.event)}"
            click.echo(line)
