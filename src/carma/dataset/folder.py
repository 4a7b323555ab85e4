"""The directory that results go to: made, and known to be writable, before hours are spent on what goes there."""

from __future__ import annotations

import os
from pathlib import Path

from carma.errors import Usage

HINT = "--out names a directory that you may write to."


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Usage(f"{out} cannot be made: {error.strerror}", HINT) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise Usage(f"{out} cannot be written to", HINT)
