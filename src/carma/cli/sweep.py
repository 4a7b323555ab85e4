"""Many tasks from one submission: `--param lr=1e-3,1e-4` (all combinations) and `--stdin` (one command per line)."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterable, Iterator

from carma.errors import Usage

MAX_TASKS = 10_000
MAX_NAME = 200  # characters, as in the daemon


def read_params(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    params: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or not values:
            hint = "write for example --param lr=1e-3,1e-4, and {lr} in the command"
            raise Usage(f"--param {text!r} is not a name with values", hint)
        if name in params:
            raise Usage(f"--param {name} is given twice", f"join its values: --param {name}=1,2,3")
        params[name] = tuple(values.split(","))
    return params


def combinations(
    command: tuple[str, ...], params: dict[str, tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Each command with its values. `{i}` is its number from 0; unknown names in braces stay."""
    for name in params:
        if not any("{" + name + "}" in word for word in command):
            raise Usage(f"--param {name}: the command contains no {{{name}}}", f"write for example --{name} {{{name}}}")
    _check_count(math.prod(len(values) for values in params.values()), "the combinations of --param")
    for number, values in enumerate(itertools.product(*params.values())):
        chosen = dict(zip(params, values, strict=True))
        yield tuple(fill(word, {"i": str(number), **chosen}) for word in command), chosen


def task_name(source: str, chosen: dict[str, str]) -> str:
    """The name of a task that was given none: its file and its values, `train lr=1e-3`."""
    name = " ".join([*filter(None, [source]), *(f"{param}={value}" for param, value in chosen.items())])
    return "".join(char if char.isprintable() else "?" for char in name)[:MAX_NAME]


def fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{([A-Za-z_]\w*)\}", lambda match: values.get(match[1], match[0]), text)


def read_commands(lines: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Commands by line number. Words are split and unquoted as in a shell; nothing else is interpreted."""
    commands = {}
    for number, line in enumerate(lines, start=1):
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as error:
            hint = "close the quotes; nothing was submitted"
            raise Usage(f"standard input, line {number}: {error}", hint) from None
        if words:
            commands[number] = words
    if not commands:
        raise Usage("standard input has no command", "try: echo 'python train.py' | carma submit --stdin")
    _check_count(len(commands), "the lines of standard input")
    return commands


def _check_count(count: int, source: str) -> None:
    if count > MAX_TASKS:
        raise Usage(f"{source} make {count:,} tasks, more than {MAX_TASKS:,}", "submit them in several parts")
