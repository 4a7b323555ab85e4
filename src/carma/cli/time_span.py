"""`--since`: a span counts back by the daemon's clock, which is not this one's where virtual GPUs run faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from carma.cli import parsers as parse
from carma.cli.task_flags import Parsed

if TYPE_CHECKING:
    from carma.client import Client

Function = TypeVar("Function", bound=Callable[..., Any])


def _form(text: str) -> str:
    parse.parse_past(text)
    return text  # it is read once more, by the daemon's clock


def since_flag(about: str) -> Callable[[Function], Function]:
    return click.option("-S", "--since", type=Parsed("TIME", _form), help=about)


def since_at(client: Client, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse.parse_past(text, client.server().now)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'-S' / '--since'") from None
