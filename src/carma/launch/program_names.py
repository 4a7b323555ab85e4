"""What a task is called by people, and what the places in `--output slurm-%A_%a.out` stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from carma.core.model.values import AttemptKey, Owner, TaskSpec

PLACES: Mapping[str, str] = {
    "j": "the task's id",
    "A": "the array's id (the task's, outside an array)",
    "a": "the index in the array (0 outside one)",
    "x": "the name",
    "t": "the attempt",
    "u": "the user",
    "%": "a per cent sign",
}
_PLACE = re.compile(r"%(.?)", re.DOTALL)
_INTERPRETER = re.compile(r"(python|bash|sh|zsh|perl|ruby|node|Rscript|julia|torchrun)[\d.]*")


def called(command: Sequence[str]) -> str:
    """What people call a task without a name: its program, or what an interpreter was told to run."""
    words = [word.rsplit("/", 1)[-1] for word in command[:3]]
    if not words or not _INTERPRETER.fullmatch(words[0]):
        return words[0] if words else ""
    if words[1:2] == ["-m"] and len(words) == 3:
        return words[2]
    return words[0] if len(words) == 1 or words[1].startswith("-") else words[1]


def fill(template: str, key: AttemptKey, owner: Owner, spec: TaskSpec) -> str:
    """An unknown place stays as it is: a submission with one is refused, so it can only come from an older version."""
    array = spec.array
    values = {
        "%": "%",
        "j": str(key.task),
        "A": str(array.array if array is not None else key.task),
        "a": str(array.index) if array is not None else "0",
        "x": _in_one_name(spec.name or called(spec.command)),
        "t": str(key.attempt),
        "u": _in_one_name(owner.name),
    }
    return _PLACE.sub(lambda match: values.get(match[1], match[0]), template)


def _in_one_name(text: str) -> str:
    """A slash in a name must not lead into another directory."""
    return re.sub(r"[/\0]", "_", text) or "task"


def unknown_place(template: str) -> str | None:
    """The first `%` in it that stands for nothing, with the letter after it."""
    return next((match[0] for match in _PLACE.finditer(template) if match[1] not in PLACES), None)


def before_places(template: str) -> str:
    """As much of a path as is the same for every task and attempt."""
    match = re.search(r"%(?!%)", template.replace("%%", "\0\0"))
    return (template if match is None else template[: match.start()]).replace("%%", "%")
