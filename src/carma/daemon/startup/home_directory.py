"""The daemon's directories, its pid file and its log; and whether its database is still there, at the start and while
the daemon runs. (The database locks itself; the socket is bound in http/socket_address.py.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from carma.config import Settings
from carma.errors import CarmaError, StoreError
from carma.paths import Paths, make_directories

log = logging.getLogger("carma.daemon")

LOG_LIMIT_BYTES = 16 << 20
CHECK_S = 1.0  # between two checks of the files of the database


def prepare(paths: Paths) -> None:
    """Create directories with their modes. Raises BadSettings."""
    os.umask(os.umask(0o077) | 0o022)  # whatever the shell's umask: other users cannot write files of the daemon
    make_directories(paths)
    shorten(paths.daemon_log)


def shorten(log_file: Path) -> None:
    """Keep one older log, so that the log cannot fill the disk over years."""
    with contextlib.suppress(OSError):
        if log_file.stat().st_size > LOG_LIMIT_BYTES:
            os.replace(log_file, log_file.with_suffix(".log.1"))


def start_logging(settings: Settings) -> None:
    """Logs to standard error: a terminal, systemd's journal, or the file that detach.py opened."""
    handler = logging.StreamHandler(sys.stderr)
    under_systemd = "JOURNAL_STREAM" in os.environ  # adds the time itself
    form = "%(levelname)s %(message)s" if under_systemd else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(form))
    root = logging.getLogger("carma")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(settings.daemon.log_level.upper())


@contextlib.contextmanager
def pid_file(path: Path) -> Iterator[None]:
    """Writes the pid for administrators and their scripts; CARMA itself does not use it."""
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if int(path.read_text()) == os.getpid():
                path.unlink()


@contextlib.contextmanager
def os_errors_explained(paths: Paths) -> Iterator[None]:
    """Turns an OSError during the start into an error that names the file, the reason and what to do."""
    try:
        yield
    except OSError as error:
        from carma.store.store_errors import hint_of, reason_of

        place = error.filename if isinstance(error.filename, str | os.PathLike) else paths.state_dir
        message = f"the daemon could not start: {os.fspath(place)}: {reason_of(error)}"
        raise StoreError(message, hint_of(error)) from error


def refuse_lost_database(paths: Paths) -> None:
    """Raises StoreError if attempts have directories, but there is no database: it was lost, or is elsewhere. A daemon
    with a new database would not know the tasks that may still run."""
    if os.path.lexists(paths.database):
        return
    from carma.launch.attempt_files import AttemptFiles
    from carma.store.store_errors import missing

    for key in AttemptFiles(paths.log_dir).attempts():
        raise missing(paths.database, paths.log_dir / str(key))


async def watch_database(
    in_place: Callable[[], Awaitable[bool]], give_up: Callable[[CarmaError], None], file: Path
) -> None:
    """End the daemon once two checks in a row find that the database was removed or replaced: another daemon may serve
    the same GPUs. Until then nothing is stored or started either (store/database.py, executor.py)."""
    missed = 0
    while missed < 2:
        await asyncio.sleep(CHECK_S)
        missed = 0 if await in_place() else missed + 1
    from carma.store.store_errors import removed

    give_up(removed(file, "go on with"))
