"""The published `.rad` task file: a meaning for each line, counted from 0 (CARMA's own README and shipped files).

The published server took the first line with the word "python" in it for the command, ignored the environment and
crashed on a short file. Here each line is read at its place, and what is wrong is said with its line.
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
NEEDED = 8  # a file the authors ship ends after the number of GPUs; its memory is then unknown
MOST_BYTES = 1 << 20


class RadTask(NamedTuple):
    command: tuple[str, ...]
    gpus: int
    exclusive: bool
    memory_mib: int | None
    environment_name: str | None


def read_rad(path: Path) -> RadTask:
    lines = _lines(path)
    return RadTask(
        command=_command(path, lines[2]),
        gpus=max(1, _number(path, lines, 7, least=1)),
        exclusive=lines[6].strip().lower() == "exclusive",
        memory_mib=_memory(path, lines),
        environment_name=_conda_name(path, lines[1]),
    )


def in_environment(task: RadTask) -> tuple[str, ...]:
    """The command, run inside the conda environment that the file names."""
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
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadTaskFile(f"{path} is larger than 1 MiB; that is not a .rad file")
    if not data.strip():
        raise BadTaskFile(f"{path} is empty; a .rad file has at least {NEEDED} lines", _hint())
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadTaskFile(f"{path} is binary, not a .rad file", _hint()) from None
    if "\0" in text:
        raise BadTaskFile(f"{path} is binary, not a .rad file", _hint())
    lines = text.splitlines()
    if len(lines) < NEEDED:
        missing = len(lines)
        raise BadTaskFile(f"{path} is too short: line {missing} ({LINES[missing]}, counted from 0) is missing", _hint())
    return lines


def _hint() -> str:
    return "its lines, from 0: " + ", ".join(LINES)


def _command(path: Path, line: str) -> tuple[str, ...]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise BadTaskFile(
            f"{path}, line 2 (command): {error}", "quotes must be closed; it does not go through a shell"
        ) from None
    if not words:
        raise BadTaskFile(f"{path}, line 2 (command, counted from 0) is empty", _hint())
    return tuple(words)


def _number(path: Path, lines: list[str], place: int, least: int = 0) -> int:
    text = lines[place].strip() if place < len(lines) else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < 1e9:
        raise BadTaskFile(
            f"{path}, line {place} ({LINES[place]}, counted from 0): {text!r} is not a number from {least}"
        )
    return math.ceil(value)


def _memory(path: Path, lines: list[str]) -> int | None:
    """The measured figure. The estimates after it are checked and left alone: estimates are made here, not typed in."""
    figures = [_number(path, lines, place) if lines[place].strip() else 0 for place in range(8, min(len(lines), 12))]
    return figures[0] or None if figures else None


def _conda_name(path: Path, line: str) -> str | None:
    if not line.strip() or line.strip().startswith("#"):
        return None
    match = re.search(r"\bactivate\s+(['\"]?)([\w./-]+)\1\s*;?\s*$", line)
    if match is None:
        raise BadTaskFile(
            f"{path}, line 1 (conda activation, counted from 0): {line.strip()!r} is not understood",
            "write `conda activate NAME`, or leave the line empty",
        )
    return match[2]
