"""TOML task files. Their keys are the options of `submit`, `command` and `environment`."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from carma.errors import BadTaskFile

MAX_BYTES = 4 << 20


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
        raise BadTaskFile(f"{path} is larger than 4 MiB, so it is no task file")
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
        raise BadTaskFile(f"{path}: {twice[0]!r} stands at the top level and in [task]", "remove one of them")
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
    if isinstance(value, bool):
        return [f"--{flag}"] if value else ["--no-requeue"] if flag == "requeue" else []
    if isinstance(value, str | int | float):
        return [f"--{flag}={value}"]
    if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        return [f"--{flag}={','.join(str(item) for item in value)}"]
    raise BadTaskFile(f"{path}: {flag!r} has a value of the wrong type", f'write {flag} = "..." as after --{flag}')
