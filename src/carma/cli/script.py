"""Scripts with options in `#CARMA` or `#SBATCH` lines. They run with the interpreter of their `#!` line, or with sh."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from carma.errors import BadTaskFile

_DIRECTIVE = re.compile(r"^#(CARMA|SBATCH)\s+(.*)$")
MAX_BYTES = 4 << 20


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
    """The directives before the first line that is no comment, as in sbatch."""
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
        raise BadTaskFile(f"{path} is not UTF-8 text, so it is no script", f"try: carma submit -- {path}") from None
