"""Many tasks from one submission: `--param lr=1e-3,1e-4` (every combination) and `--stdin` (one command a line)."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator

from carma.errors import Usage

MOST_TASKS = 10_000


def read_params(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    params: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or not values:
            raise Usage(f"--param {text!r} is not understood", "write --param lr=1e-3,1e-4, and {lr} in the command")
        if name in params:
            raise Usage(f"--param {name} is given twice", f"join its values: --param {name}=1,2,3")
        params[name] = tuple(values.split(","))
    return params


def combinations(
    command: tuple[str, ...], params: dict[str, tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Each command with its values; `{i}` counts them from 0. Other braces are left as they are."""
    for name in params:
        if not any("{" + name + "}" in word for word in command):
            raise Usage(
                f"--param {name}: there is no {{{name}}} in the command", f"write for example --{name} {{{name}}}"
            )
    count = 1
    for values in params.values():
        count *= len(values)
    if count > MOST_TASKS:
        raise Usage(f"these --param make {count:,} tasks; at most {MOST_TASKS:,} at a time", "submit them in parts")
    for number, values in enumerate(itertools.product(*params.values())):
        chosen = dict(zip(params, values, strict=True))
        yield tuple(fill(word, {"i": str(number), **chosen}) for word in command), chosen


def fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{([A-Za-z_]\w*)\}", lambda match: values.get(match[1], match[0]), text)


def read_commands(lines: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """By line. Words are split and unquoted as a shell would, and nothing else a shell does is done."""
    commands = {}
    for number, line in enumerate(lines, start=1):
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as error:
            raise Usage(
                f"standard input, line {number}: {error}", "quotes must be closed; nothing was submitted"
            ) from None
        if words:
            commands[number] = words
    if not commands:
        raise Usage("there is no command on standard input", "try: echo 'python train.py' | carma submit --stdin")
    if len(commands) > MOST_TASKS:
        raise Usage(
            f"{len(commands):,} commands on standard input; at most {MOST_TASKS:,} at a time", "submit them in parts"
        )
    return commands
