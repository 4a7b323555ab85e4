"""What the shell completes: IDs and names of tasks, policies, columns.

Each function has click's signature of `shell_complete`. A daemon that does not answer within a second gives no IDs and
names: completion prints no error. Imports are late, because every verb imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from carma.errors import CarmaError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from carma.client import Client
    from carma.wire.api_types import TaskView

ANSWER_S = 1.0
ENDED = 20  # finished tasks, the newest
OF_FINISHED, OF_ALL = ("retry",), ("show", "logs", "explain")  # verbs; the others are for tasks that have not ended


def task_id_items(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(((str(task.id), f"{task.name} {task.state}") for task in _tasks(ctx)), incomplete)


def task_name_items(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(dict.fromkeys((task.name, "") for task in _tasks(ctx)), incomplete)


def policy_items(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Policies, also after a comma."""
    from carma.plugins import POLICIES, names

    return _listed(((name, "") for name in names(POLICIES)), incomplete)


def column_items(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Columns of `queue` and `history`, also after a comma."""
    from carma.cli.columns import FIELDS

    return _listed(((name, field.about) for name, field in FIELDS.items()), incomplete)


def _tasks(ctx: click.Context) -> list[TaskView]:
    from carma.cli.connection import ask

    def found(client: Client) -> list[TaskView]:
        waiting = [] if ctx.info_name in OF_FINISHED else client.tasks()
        return waiting + (client.history(limit=ENDED) if ctx.info_name in (*OF_FINISHED, *OF_ALL) else [])

    try:
        return ask(found, ANSWER_S)
    except (CarmaError, OSError):
        return []


def _matching(words: Iterable[tuple[str, str]], begin: str, before: str = "") -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(before + word, help=about) for word, about in words if word.startswith(begin)]


def _listed(words: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """The last of several words separated by commas."""
    before, comma, begin = incomplete.rpartition(",")
    return _matching(words, begin, before + comma)
