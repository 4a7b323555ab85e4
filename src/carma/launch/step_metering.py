"""Counting the optimizer steps of running attempts.

1. `metered` prepares the environment of a task, so that each of its Python processes runs the import hook
   (hook/sitecustomize.py). The runner makes the file into which it counts.
2. `StepFiles` reads the counts of running attempts.

The file belongs to the user of the task, so its content is untrusted. Its path is safe: it lies in a directory that
only the daemon's user can change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from carma import step_file
from carma.core.model.values import AttemptKey
from carma.core.ports import StepCount
from carma.launch import attempt_records as records
from carma.launch.attempt_files import AttemptFiles

HOOK_DIRECTORY = str(Path(__file__).parent / "hook")
_PATH = "PYTHONPATH"


def metered(environment: Mapping[str, str], file: str | None) -> dict[str, str]:
    """The environment of a task that counts its steps in `file`. With `file` None, the environment of a task whose
    steps are not counted. Python takes the first `sitecustomize` on its path. A submission from inside another task
    inherits that task's variables; they are removed."""
    left = {name: value for name, value in environment.items() if name != step_file.VARIABLE}
    folders = _folders(environment)
    if file is not None:
        return {**left, step_file.VARIABLE: file, _PATH: os.pathsep.join((HOOK_DIRECTORY, *folders))}
    if HOOK_DIRECTORY not in environment.get(_PATH, "").split(os.pathsep):
        return left
    left[_PATH] = os.pathsep.join(folders)
    return left if folders else {name: value for name, value in left.items() if name != _PATH}


def _folders(environment: Mapping[str, str]) -> list[str]:
    """Python ignores an empty PYTHONPATH, but reads an empty entry as the current directory."""
    path = environment.get(_PATH, "")
    return [folder for folder in path.split(os.pathsep) if folder != HOOK_DIRECTORY] if path else []


class StepFiles:
    """core.ports.StepCounters for attempts that ProcessLauncher started in this directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._files = AttemptFiles(directory)

    def read(self, keys: Iterable[AttemptKey]) -> tuple[StepCount, ...]:
        found = (self._read(key) for key in keys)
        return tuple(count for count in found if count is not None)

    def _read(self, key: AttemptKey) -> StepCount | None:
        try:
            data = self._files.read_head(key, records.STEPS, step_file.LIMIT_BYTES)
        except OSError:  # too many open files: read next time
            return None
        now_ns = time.monotonic_ns()
        steps = step_file.count(data, now_ns)
        return None if steps is None else StepCount(key, steps.steps, (now_ns - steps.last_ns) / 1e9)
