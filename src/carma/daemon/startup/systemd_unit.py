"""A systemd unit for this installation, from the templates beside this file. The administrator checks and copies it;
nothing is installed here."""

from __future__ import annotations

import sys
from pathlib import Path


def text(*, user: bool, program: Path | None = None) -> str:
    """The unit for the whole server (run by root), or for one user."""
    template = Path(__file__).with_name("user.service" if user else "system.service").read_text()
    return template.format(command=_quoted(program or _program()))


def _program() -> Path:
    """The `carma` next to this Python: a unit for a virtual environment needs no activation."""
    return Path(sys.executable).parent / "carma"


def _quoted(program: Path) -> str:
    """As systemd reads a command line: `%` starts a specifier, a space ends a word."""
    escaped = str(program).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if any(character.isspace() for character in escaped) else escaped
