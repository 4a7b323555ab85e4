"""The daemon's directories, its pid file and its log. (The database locks itself; the socket is bound by http.py.)"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from carma.config import Settings
from carma.paths import Paths, make_directories

LOG_LIMIT_BYTES = 16 << 20


def prepare(paths: Paths) -> None:
    """Directories with their modes. Raises BadSettings."""
    make_directories(paths)
    shorten(paths.daemon_log)


def shorten(log_file: Path) -> None:
    """One older log is kept, so that a daemon that complains for years does not fill the disk."""
    with contextlib.suppress(OSError):
        if log_file.stat().st_size > LOG_LIMIT_BYTES:
            os.replace(log_file, log_file.with_suffix(".log.1"))


def start_logging(settings: Settings) -> None:
    """To standard error: a terminal, systemd's journal, or the file that detach.py put there."""
    handler = logging.StreamHandler(sys.stderr)
    under_systemd = "JOURNAL_STREAM" in os.environ  # which adds the time itself
    form = "%(levelname)s %(message)s" if under_systemd else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(form))
    root = logging.getLogger("carma")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(settings.daemon.log_level.upper())


@contextlib.contextmanager
def pid_file(path: Path) -> Iterator[None]:
    """For people and their scripts; nothing in CARMA relies on it."""
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if int(path.read_text()) == os.getpid():
                path.unlink()
