"""Retention: removes old finished tasks from the database, shrinks the database file, and removes the directories of
attempts whose task no longer exists.

All work is done in small steps with pauses, so that commits, requests and launches are not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, TaskId
from carma.daemon.runtime import BackgroundThread
from carma.daemon.shell import Shell
from carma.launch.attempt_files import AttemptFiles, key_of
from carma.launch.attempt_records import EXIT
from carma.store.sqlite import SqliteStore

log = logging.getLogger("carma.daemon")

FIRST_S = 60.0  # after the start
EVERY_S = 3600.0
PRUNED_AT_ONCE = 200  # tasks in one transaction
REMOVED_AT_ONCE = 50  # directories before a pause
PAUSE_S = 0.02  # at least; a step is followed by a pause as long as it took
DAY_S = 86_400.0

T = TypeVar("T")
IsLive = Callable[[TaskId], bool]


async def keep_tidy(shell: Shell, store: SqliteStore, log_dir: Path) -> None:
    """Every EVERY_S seconds while the daemon runs. An error is logged and does not prevent the next round."""
    keep_days = shell.settings.daemon.keep_logs_days
    thread = BackgroundThread("housekeeping")
    await asyncio.sleep(FIRST_S)
    try:
        await drop_records(thread, log_dir, lambda key: shell.state.active.get(key.task) == key)
    except Exception:
        log.exception("removing the records of ended attempts failed")
    while keep_days > 0:
        try:
            await prune(shell, store, shell.clock.now() - keep_days * DAY_S)
            before = time.time() - keep_days * DAY_S  # files have the machine's time, not that of the daemon's clock
            await remove_old(thread, log_dir, shell.state.tasks.__contains__, before)
        except Exception:
            log.exception("removing old tasks and logs failed")
        await asyncio.sleep(EVERY_S)


async def prune(shell: Shell, store: SqliteStore, ended_before: float) -> None:
    """Remove tasks that ended before that time, then make the database file smaller."""
    removed = await _until_none(lambda: shell.in_store(lambda: len(store.prune(ended_before, PRUNED_AT_ONCE))))
    if removed:
        log.info("removed %s from the database", show_count(removed, "old task"))
    await _until_none(lambda: shell.in_store(store.shrink))


async def remove_old(thread: BackgroundThread, log_dir: Path, is_live: IsLive, before: float) -> int:
    """Remove directories of attempts that ended before that time and whose task is not in memory, also those
    of a database that no longer exists. Returns their number."""
    old = _old(log_dir, is_live, before)
    removed = await _for_each(thread, old, lambda directory: shutil.rmtree(directory, ignore_errors=True))
    if removed:
        log.info("removed the logs of %s", show_count(removed, "old attempt"))
    return removed


async def drop_records(thread: BackgroundThread, log_dir: Path, is_active: Callable[[AttemptKey], bool]) -> None:
    """Remove records of ended attempts that the daemon did not remove because it was killed, or that come from an older
    version (its order.json holds the submitter's environment, and its output belongs to the submitter). Output is not
    shortened: older versions had no limit, or the limit was another."""
    files = AttemptFiles(log_dir)

    def drop(key: AttemptKey) -> None:
        with contextlib.suppress(OSError):
            files.drop_records(key)

    await _for_each(thread, (key for key in list(files.attempts()) if not is_active(key)), drop)


async def _for_each(thread: BackgroundThread, items: Iterator[T], remove: Callable[[T], None]) -> int:
    """Returns the number of items. They are found in the thread, too."""

    def step() -> int:
        some = list(islice(items, REMOVED_AT_ONCE))
        for item in some:
            remove(item)
        return len(some)

    return await _until_none(lambda: thread.call(step))


async def _until_none(step: Callable[[], Awaitable[int]]) -> int:
    """Repeat the step until it returns 0, with pauses as long as the steps took. Returns the sum."""
    total = 0
    began_s = time.monotonic()
    while count := await step():
        total += count
        await asyncio.sleep(max(PAUSE_S, time.monotonic() - began_s))
        began_s = time.monotonic()
    return total


def _old(log_dir: Path, is_live: IsLive, before: float) -> Iterator[str]:
    """One listing for all steps: the caller may remove the entries that it got."""
    with os.scandir(log_dir) as entries:
        for entry in entries:
            key = key_of(entry.name)
            if key is None or is_live(key.task) or not entry.is_dir(follow_symlinks=False):
                continue
            if _ended_at(entry.path) < before:
                yield entry.path


def _ended_at(directory: str) -> float:
    """The end of the attempt. Not the times of its output, which an older version left to the submitter. Without a
    record of the end: the newest change of the directory or of a file in it; a log that is still written is new.
    Infinite if it cannot be read."""
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(os.path.join(directory, EXIT), follow_symlinks=False).st_mtime
        with os.scandir(directory) as entries:
            newest = max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)
        return max(newest, os.stat(directory, follow_symlinks=False).st_mtime)
    except OSError:
        return float("inf")
