"""`carma events`: the daemon's stream, a line an event."""

from __future__ import annotations

import click

from carma.cli.verb import verb

EXAMPLES = """
carma events
carma events --json   one JSON object a line
"""


@verb("events", examples=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--task", type=int, metavar="ID", help="Only this task's.")
def command(as_json: bool, task: int | None) -> None:
    """What happens, as it happens, until Ctrl-C."""
    import msgspec

    from carma.cli.connection import connect

    with connect() as client:
        for event in client.events():
            if task is not None and event.task != task:
                continue
            if as_json:
                click.echo(msgspec.json.encode(event))
            else:
                from carma.cli.output import moment, safe

                click.echo(f"{moment(event.at)}  {safe(event.text or event.event)}")
