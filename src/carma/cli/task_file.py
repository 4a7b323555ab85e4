"""Files that say what to submit: TOML task files and scripts.

The keys of a TOML file are the options of `submit`, `command` and `environment`. A script has options in `#CARMA` or
`#SBATCH` lines, and runs with the interpreter of its `#!` line, or with sh.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from carma.errors import BadTaskFile

MAX_BYTES = 4 << 20
_DIRECTIVE = re.compile(r"^#(CARMA|SBATCH)\s+(.*)$")


class TaskFile(NamedTuple):
    words: tuple[str, ...]  # the options, as on the command line
    command: tuple[str, ...]
    environment: dict[str, str]


def read_task_file(path: Path, flags: Iterable[str]) -> TaskFile:
    """`flags` are the long names of the allowed options, without dashes."""
    values = _flat(path, _load(path))
    command = _command(path, values.pop("command", None))
    environment = _environment(path, values.pop("environment", {}))
    known = {flag.replace("_", "-") for flag in flags}
    words: list[str] = []
    for key, value in values.items():
        flag = key.replace("_", "-")
        if flag not in known:
            near = difflib.get_close_matches(flag, [*known, "command", "environment"], n=1)
            raise BadTaskFile(
                f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                "the keys are the options in `carma submit --help`, command and environment",
            )
        words += _option(path, flag, value)
    return TaskFile(tuple(words), command, environment)


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BadTaskFile(f"{path} is larger than 4 MiB, so it is not a task file")
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        hint = 'a task file contains for example: command = ["python", "train.py"]'
        raise BadTaskFile(f"{path} is not TOML: {error}", hint) from None


def _flat(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The keys at the top level, or in a table [task]."""
    table = values.get("task")
    if not isinstance(table, dict):
        return values
    rest = {key: value for key, value in values.items() if key != "task"}
    if twice := sorted(rest.keys() & table.keys()):
        raise BadTaskFile(f"{path}: {twice[0]!r} occurs at the top level and in [task]", "remove one of them")
    return {**rest, **table}


def _command(path: Path, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise BadTaskFile(f"{path}, command: {error}", "close the quotes; no shell interprets it") from None
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise BadTaskFile(f"{path}: command is not a list of texts", 'write command = ["python", "train.py"]')
    return tuple(value)


def _environment(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str | int | float) for each in value.values()):
        raise BadTaskFile(f"{path}: environment is not a table of texts", '[environment]\\nSEED = "1"')
    return {name: str(each) for name, each in value.items()}


def _option(path: Path, flag: str, value: object) -> list[str]:
    if flag == "param" and isinstance(value, dict):
        each = {name: values if isinstance(values, list) else [values] for name, values in value.items()}
        return [f"--param={name}={','.join(str(item) for item in items)}" for name, items in each.items()]
    if flag == "notify" and isinstance(value, list):
        return [f"--notify={target}" for target in value]
    if isinstance(value, bool):
        return [f"--{flag}"] if value else [f"--no-{flag}"] if flag in ("requeue", "progress") else []
    if isinstance(value, str | int | float):
        return [f"--{flag}={value}"]
    if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        return [f"--{flag}={','.join(str(item) for item in value)}"]
    raise BadTaskFile(f"{path}: {flag!r} has a value of the wrong type", f'write {flag} = "..." as after --{flag}')


# Scripts.


class Directive(NamedTuple):
    line: int
    dialect: str  # CARMA or SBATCH
    words: tuple[str, ...]


def is_script(path: Path) -> bool:
    """Whether the file is named .sh, or is a text with a `#!` line or directives."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(65536)
    except OSError:
        return path.suffix == ".sh"
    if b"\0" in head:
        return False
    return head.startswith(b"#!") or path.suffix == ".sh" or re.search(rb"^#(CARMA|SBATCH)\s", head, re.M) is not None


def read_directives(path: Path) -> list[Directive]:
    """The directives before the first line that is not a comment, as in sbatch."""
    found = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        try:
            words = tuple(shlex.split(match[2], comments=True))
        except ValueError as error:
            raise BadTaskFile(f"{path}, line {number}: {error}", "close the quotes") from None
        found.append(Directive(number, match[1], words))
    return found


def script_command(path: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The interpreter of the `#!` line with at most one argument, as in the kernel; otherwise sh."""
    first = _text(path).split("\n", 1)[0]
    if first.startswith("#!") and (words := first[2:].strip().split(None, 1)):
        return (*(word.strip() for word in words), str(path.absolute()), *arguments)
    if path.suffix == ".py":
        raise BadTaskFile(
            f"{path} has no #! line, so its interpreter is unknown", f"try: carma submit -- python {path}"
        )
    return ("/bin/sh", str(path.absolute()), *arguments)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadTaskFile(f"{path} is not UTF-8 text, so it is not a script", f"try: carma submit -- {path}") from None
