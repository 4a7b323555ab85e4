"""Scripts with `#CARMA --gpus 1` or `#SBATCH` lines. They run by their `#!`, or with sh."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from carma.errors import BadTaskFile

_DIRECTIVE = re.compile(r"^#(CARMA|SBATCH)\s+(.*)$")
MOST_BYTES = 4 << 20


class Directive(NamedTuple):
    line: int
    dialect: str  # CARMA or SBATCH
    words: tuple[str, ...]


def is_script(path: Path) -> bool:
    """A text file that says how it is run, or what it needs, or that is named .sh."""
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
    """Those before the first line that is not a comment, as sbatch does."""
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
            raise BadTaskFile(f"{path}, line {number}: {error}", "quotes must be closed") from None
        found.append(Directive(number, match[1], words))
    return found


def script_command(path: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The interpreter of its `#!` (its argument is one word, as for the kernel), else sh."""
    first = _text(path).split("\n", 1)[0]
    if first.startswith("#!") and (words := first[2:].strip().split(None, 1)):
        return (*(word.strip() for word in words), str(path.absolute()), *arguments)
    if path.suffix == ".py":
        raise BadTaskFile(f"{path} has no #! line that says how to run it", f"try: carma submit -- python {path}")
    return ("/bin/sh", str(path.absolute()), *arguments)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadTaskFile(
            f"{path} is not text (UTF-8), so it is not a script", f"try: carma submit -- {path}"
        ) from None
