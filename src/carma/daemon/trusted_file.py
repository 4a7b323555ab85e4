"""Files of the administrator that settings name. Whoever can change one has the rights of the daemon, so it must belong
to the daemon's user or to root, and only its owner may write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from carma.errors import BadSettings

WRITABLE_BY_OTHERS = 0o022


def read_trusted(setting: str, file: str, forbidden: int = 0) -> str:
    """`forbidden`: further permissions that it must not have. Raises BadSettings."""
    path, own = Path(file), os.geteuid()
    try:
        text, found = path.read_text(encoding="utf-8"), path.stat()
    except (OSError, ValueError) as error:
        raise BadSettings(f"{setting} {file} cannot be read: {error}") from error
    if found.st_uid not in (0, own) or stat.S_IMODE(found.st_mode) & (WRITABLE_BY_OTHERS | forbidden):
        raise BadSettings(
            f"{setting} {file} can be read or changed by users who must not", f"chown {own} {file} && chmod 600 {file}"
        )
    return text
