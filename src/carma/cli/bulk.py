"""Doing one thing to several tasks: each is tried, each says what became of it, the worst exit code is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from carma.cli.error_output import complain
from carma.client import MOST_LISTED, Client
from carma.errors import CarmaError, NotFound, Unreachable, Usage, WrongState
from carma.wire.api_types import Done, TaskView

Act = Callable[[Client, int], Done]


def for_chosen(
    which: str,
    ids: list[int],
    everything: bool,
    name: str | None,
    act: Act,
    wanted: Callable[[TaskView], bool] = lambda _task: True,
) -> int:
    """Tasks that were given by their ids; or all of the caller's, or those of a name, that are `wanted`: `which`."""
    from carma.cli.connection import connect

    if sum((bool(ids), everything, name is not None)) != 1:
        raise Usage("say which tasks: ids, --name or --all, one of them", "carma queue lists your tasks")
    with connect() as client:
        if ids:
            return for_each(client, ids, act)
        found = [task.id for task in client.tasks(limit=MOST_LISTED) if wanted(task) and name in (None, task.name)]
        if not found and name is not None:
            raise NotFound(f"none of your tasks {which} is named {name!r}", "carma queue lists them")
        if not found:
            click.echo(f"there are no tasks of yours {which}")
        return for_each(client, found, act, named=False)


def for_each(client: Client, tasks: Iterable[int], act: Act, *, named: bool = True) -> int:
    """Not `named`: they were found, and one that has gone its way meanwhile (over, or started) is no mistake."""
    worst = 0
    for task in tasks:
        try:
            done = act(client, task)
        except Unreachable:
            raise
        except WrongState as error:
            if named:
                complain(str(error), error.hint)
                worst = max(worst, error.exit_code)
        except CarmaError as error:
            complain(str(error), error.hint)
            worst = max(worst, error.exit_code)
        else:
            click.echo(done.note or f"task {task}: done")
    return worst
