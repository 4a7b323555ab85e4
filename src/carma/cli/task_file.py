"""A TOML task file: the keys are submit's flags, plus `command` and `environment`."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from carma.errors import BadTaskFile

MOST_BYTES = 4 << 20


class TaskFile(NamedTuple):
    words: tuple[str, ...]  # the flags, spelled as on the command line
    command: tuple[str, ...]
    environment: dict[str, str]


def read_task_file(path: Path, flags: Iterable[str]) -> TaskFile:
    """`flags` are the long names that may be used, without their dashes."""
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
                f"{path}: there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                "the keys are the flags of `carma submit --help`, and command, environment",
            )
        words += _spelled(path, flag, value)
    return TaskFile(tuple(words), command, environment)


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadTaskFile(f"{path} is larger than 4 MiB; that is not a task file")
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadTaskFile(
            f"{path} is not TOML: {error}", 'a task file says for example: command = ["python", "train.py"]'
        ) from None


def _flat(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The keys stand at the top; a table [task] around them is as good."""
    table = values.get("task")
    if not isinstance(table, dict):
        return values
    rest = {key: value for key, value in values.items() if key != "task"}
    if twice := sorted(rest.keys() & table.keys()):
        raise BadTaskFile(f"{path}: {twice[0]!r} stands at the top and in [task]", "say it once")
    return {**rest, **table}


def _command(path: Path, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise BadTaskFile(
                f"{path}, command: {error}", "quotes must be closed; it does not go through a shell"
            ) from None
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise BadTaskFile(f"{path}: command must be words", 'write command = ["python", "train.py"]')
    return tuple(value)


def _environment(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str | int | float) for each in value.values()):
        raise BadTaskFile(f"{path}: environment must be a table of texts", '[environment]\\nSEED = "1"')
    return {name: str(each) for name, each in value.items()}


def _spelled(path: Path, flag: str, value: object) -> list[str]:
    if flag == "param" and isinstance(value, dict):
        each = {name: values if isinstance(values, list) else [values] for name, values in value.items()}
        return [f"--param={name}={','.join(str(item) for item in items)}" for name, items in each.items()]
    if isinstance(value, bool):
        return [f"--{flag}"] if value else ["--no-requeue"] if flag == "requeue" else []
    if isinstance(value, str | int | float):
        return [f"--{flag}={value}"]
    if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        return [f"--{flag}={','.join(str(item) for item in value)}"]
    raise BadTaskFile(f"{path}: the value of {flag!r} is not understood", f'write {flag} = "..." as after --{flag}')
