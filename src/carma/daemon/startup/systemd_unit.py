"""A systemd unit for this installation, from the templates beside this file. The administrator checks and copies it;
nothing is installed here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def text(*, user: bool, program: Path | None = None, arguments: Sequence[str] = ()) -> str:
    """The unit for the whole server (run by root), or for one user. `arguments` are those of `carma up`."""
    template = Path(__file__).with_name("user.service" if user else "system.service").read_text()
    words = (str(program or _program()), "up", *arguments)
    return template.format(command=" ".join(_quoted(word) for word in words))


def _program() -> Path:
    """The `carma` next to this Python: a unit for a virtual environment needs no activation."""
    return Path(sys.executable).parent / "carma"


def _quoted(word: str) -> str:
    """The word quoted for systemd: `%` starts a specifier, `$` a variable, a space ends a word."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    needs_quotes = any(character.isspace() or character in "'\";" for character in escaped)
    return f'"{escaped}"' if needs_quotes else escaped
