"""The published `.rad` task file: each line has a meaning by its number, counted from 0.

The published server took the first line with the word "python" for the command, ignored the environment and crashed
on a short file. This reader takes each line at its place, and its errors name the line.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

from carma.errors import BadTaskFile, NotRunnable

LINES = (
    "comment",
    "conda activation",
    "command",
    "model summary",
    "data set",
    "batch size",
    "exclusive",
    "number of GPUs",
    "measured memory in MiB",
    "Horus estimate in MiB",
    "FakeTensor estimate in MiB",
    "GPUMemNet estimate in MiB",
)
MIN_LINES = 8  # a published file ends after the number of GPUs, without the memory
MAX_BYTES = 1 << 20
_HINT = "its lines, counted from 0: " + ", ".join(LINES)


class RadTask(NamedTuple):
    command: tuple[str, ...]
    gpus: int
    exclusive: bool
    memory_mib: int | None
    environment_name: str | None


def read_rad(path: Path) -> RadTask:
    lines = _lines(path)
    # The estimates after the measured memory are only checked: CARMA makes its own.
    figures = [_number(path, lines, place) if lines[place].strip() else 0 for place in range(8, min(len(lines), 12))]
    return RadTask(
        command=_command(path, lines[2]),
        gpus=max(1, _number(path, lines, 7, least=1)),
        exclusive=lines[6].strip().lower() == "exclusive",
        memory_mib=figures[0] or None if figures else None,
        environment_name=_conda_name(path, lines[1]),
    )


def in_environment(task: RadTask) -> tuple[str, ...]:
    """The command, run inside the conda environment of the file."""
    if task.environment_name is None:
        return task.command
    if shutil.which("conda") is None:
        raise NotRunnable(
            f"the .rad file names the conda environment {task.environment_name!r}, but conda is not on PATH",
            f"empty its line 1, or: carma submit -- {shlex.join(task.command)}",
        )
    return ("conda", "run", "--no-capture-output", "-n", task.environment_name, *task.command)


def _lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BadTaskFile(f"{path} is larger than 1 MiB, so it is no .rad file")
    if not data.strip():
        raise BadTaskFile(f"{path} is empty; a .rad file has at least {MIN_LINES} lines", _HINT)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise BadTaskFile(f"{path} is binary, so it is no .rad file", _HINT)
    lines = text.splitlines()
    if len(lines) < MIN_LINES:
        raise BadTaskFile(f"{path} is too short: {_line(len(lines))} is missing", _HINT)
    return lines


def _line(place: int) -> str:
    return f"line {place} ({LINES[place]}, counted from 0)"


def _command(path: Path, line: str) -> tuple[str, ...]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise BadTaskFile(f"{path}, {_line(2)}: {error}", "close the quotes; no shell interprets it") from None
    if not words:
        raise BadTaskFile(f"{path}, {_line(2)} is empty", _HINT)
    return tuple(words)


def _number(path: Path, lines: list[str], place: int, least: int = 0) -> int:
    text = lines[place].strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < 1e9:
        raise BadTaskFile(f"{path}, {_line(place)}: {text!r} is not a number of at least {least}")
    return math.ceil(value)


def _conda_name(path: Path, line: str) -> str | None:
    if not line.strip() or line.strip().startswith("#"):
        return None
    match = re.search(r"\bactivate\s+(['\"]?)([\w./-]+)\1\s*;?\s*$", line)
    if match is None:
        raise BadTaskFile(
            f"{path}, {_line(1)}: {line.strip()!r} is no activation of an environment",
            "write `conda activate NAME`, or leave the line empty",
        )
    return match[2]
