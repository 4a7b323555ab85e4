"""Doing one thing to several tasks: each is tried, each says what became of it, the worst exit code is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from carma.cli.failures import complain
from carma.client import Client
from carma.errors import CarmaError, Unreachable
from carma.wire.types import Done


def for_each(client: Client, tasks: Iterable[int], act: Callable[[Client, int], Done]) -> int:
    worst = 0
    for task in tasks:
        try:
            done = act(client, task)
        except Unreachable:
            raise
        except CarmaError as error:
            complain(str(error), error.hint)
            worst = max(worst, error.exit_code)
        else:
            click.echo(done.note or f"task {task}: done")
    return worst
