"""`carma events`: events of the daemon as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import msgspec

from carma.cli.connection import RETRY_S, PersistentConnection, connect
from carma.cli.error_output import note
from carma.cli.option_types import ID
from carma.cli.output import moment, safe
from carma.cli.verb import verb
from carma.errors import Unreachable
from carma.wire.api_types import StreamEvent

EXAMPLES = """
carma events
carma events --json   one JSON object on each line
"""


@verb("events", examples=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on each line.")
@click.option("--task", type=ID, metavar="ID", help="Events of this task only.")
def command(as_json: bool, task: int | None) -> None:
    """Events of the daemon as they happen, until Ctrl-C. A restart of the daemon does not end it."""
    for event in _events(task):
        if task is not None and event.task != task:
            continue
        line = msgspec.json.encode(event) if as_json else f"{moment(event.at)}  {safe(event.text or event.event)}"
        click.echo(line)


def _events(task: int | None) -> Iterator[StreamEvent]:
    """The events of this daemon and of those that follow it. An unknown task is an error at once."""
    connection = PersistentConnection()
    is_first = True
    while True:
        try:
            with connect() as client:
                if task is not None:
                    client.task(task)
                events = client.events()
                connection.succeeded()
                if not is_first:
                    note("the stream of events was interrupted: earlier events may be missing")
                is_first = False
                yield from events
            time.sleep(RETRY_S)  # the daemon ended the stream: it is stopping, or this reader was too slow
        except Unreachable as error:
            connection.failed(error)
