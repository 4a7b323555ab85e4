"""The output files that a submitter names, with their placeholders (`--output slurm-%A_%a.out`), and the name that a
task is shown under if it has none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from carma.core.model.values import AttemptKey, Owner, TaskSpec

PLACEHOLDERS: Mapping[str, str] = {
    "j": "the task's id",
    "A": "the array's id (the task's, outside an array)",
    "a": "the index in the array (0 outside one)",
    "x": "the name",
    "t": "the attempt",
    "u": "the user",
    "%": "a per cent sign",
}
_PLACEHOLDER = re.compile(r"%(.?)", re.DOTALL)
_INTERPRETER = re.compile(r"(python|bash|sh|zsh|perl|ruby|node|Rscript|julia|torchrun)[\d.]*")


def named_outputs(key: AttemptKey, owner: Owner, spec: TaskSpec) -> tuple[str | None, str | None]:
    """The files that the submitter named for stdout and stderr; None: CARMA's own log file. With an output file alone,
    both streams go there, as in Slurm."""
    stdout, stderr = (
        os.path.join(spec.directory, fill(template, key, owner, spec)) if template else None
        for template in (spec.output, spec.error)
    )
    return stdout, stderr or stdout


def fill(template: str, key: AttemptKey, owner: Owner, spec: TaskSpec) -> str:
    """An unknown placeholder stays as it is: a submission with one is refused, so it is of an older version."""
    array = spec.array
    values = {
        "%": "%",
        "j": str(key.task),
        "A": str(array.array if array is not None else key.task),
        "a": str(array.index) if array is not None else "0",
        "x": _file_name(spec.name or program_name(spec.command)),
        "t": str(key.attempt),
        "u": _file_name(owner.name),
    }
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _file_name(text: str) -> str:
    """A slash in a name must not lead into another directory."""
    return re.sub(r"[/\0]", "_", text) or "task"


def unknown_placeholder(template: str) -> str | None:
    """The first `%` that is no placeholder, with the letter after it."""
    return next((match[0] for match in _PLACEHOLDER.finditer(template) if match[1] not in PLACEHOLDERS), None)


def before_placeholders(template: str) -> str:
    """The part of a path that is the same for every task and attempt."""
    match = re.search(r"%(?!%)", template.replace("%%", "\0\0"))
    return (template if match is None else template[: match.start()]).replace("%%", "%")


def program_name(command: Sequence[str]) -> str:
    """The name of a task that has none: its program, or the script or module that an interpreter runs."""
    words = [word.rsplit("/", 1)[-1] for word in command[:3]]
    if not words or not _INTERPRETER.fullmatch(words[0]):
        return words[0] if words else ""
    if words[1:2] == ["-m"] and len(words) == 3:
        return words[2]
    return words[0] if len(words) == 1 or words[1].startswith("-") else words[1]
