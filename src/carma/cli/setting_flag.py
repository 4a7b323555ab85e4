"""`--set NAME=VALUE`, as `carma up` and `carma simulate` take it."""

from __future__ import annotations

import click

from carma.errors import Usage


def pairs(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in value:
        name, equals, setting = text.partition("=")
        if not equals or "." not in name:
            raise Usage(f"--set {text!r} is not understood", "write --set gate.sm_active=0.7; see carma config show")
        found[name.strip()] = setting
    return found
