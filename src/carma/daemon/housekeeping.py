"""Retention: removes finished tasks that are old enough, gives their room in the database back, and removes the
directories of attempts that no task has any more.

All in small steps with pauses, so that commits, requests and launches are not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from carma.core.model.units import show_count
from carma.core.model.values import AttemptKey, TaskId
from carma.daemon.background_thread import Worker
from carma.daemon.shell import Shell
from carma.daemon.startup.home_directory import task_of
from carma.launch.attempt_files import AttemptFiles

log = logging.getLogger("carma.daemon")

FIRST_S = 60.0
EVERY_S = 3600.0
PRUNED_AT_ONCE = 200  # tasks in one transaction
REMOVED_AT_ONCE = 50  # directories before a pause
PAUSE_S = 0.02  # at least; a step is followed by a pause as long as it took
DAY_S = 86_400.0

IsLive = Callable[[TaskId], bool]


class Prunable(Protocol):
    def prune(self, ended_before: float, limit: int) -> Sequence[TaskId]: ...

    def shrink(self) -> int: ...


async def keep_tidy(shell: Shell, archive: Prunable, log_dir: Path) -> None:
    """From time to time, for as long as the daemon runs. Errors are logged; the next time comes anyway."""
    keep_days = shell.settings.daemon.keep_logs_days
    worker = Worker("housekeeping")
    await asyncio.sleep(FIRST_S)
    try:
        await drop_records(worker, log_dir, lambda key: shell.state.active.get(key.task) == key)
    except Exception:
        log.exception("removing the records of ended attempts failed")
    while keep_days > 0:
        try:
            await prune(shell, archive, shell.clock.now() - keep_days * DAY_S)
            before = time.time() - keep_days * DAY_S  # files carry the machine's time, whatever the daemon's clock says
            await remove_old(worker, log_dir, shell.state.tasks.__contains__, before)
        except Exception:
            log.exception("removing old tasks and logs failed")
        await asyncio.sleep(EVERY_S)


async def prune(shell: Shell, archive: Prunable, ended_before: float) -> None:
    """Remove tasks that ended before that time, then make the database file smaller."""

    def remove() -> int:
        return len(archive.prune(ended_before, PRUNED_AT_ONCE))

    removed = await _until_none(lambda: shell.in_store(remove))
    if removed:
        log.info("removed %s from the database", show_count(removed, "old task"))
    await _until_none(lambda: shell.in_store(archive.shrink))


async def remove_old(worker: Worker, log_dir: Path, is_live: IsLive, before: float) -> int:
    """Remove attempt directories that were last changed before that time and whose task is not live; returns how many.

    That includes directories of a database that is no longer there.
    """
    old = _old(log_dir, is_live, before)

    def remove() -> int:
        directories = list(islice(old, REMOVED_AT_ONCE))
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        return len(directories)

    removed = await _until_none(lambda: worker.call(remove))
    if removed:
        log.info("removed the logs of %s", show_count(removed, "old attempt"))
    return removed


async def drop_records(worker: Worker, log_dir: Path, is_active: Callable[[AttemptKey], bool]) -> None:
    """Records of ended attempts that are still there: the daemon was killed before it removed them, or they come from
    an older version (its order.json holds the submitter's environment)."""
    files = AttemptFiles(log_dir)
    keys = (key for key in list(files.keys()) if not is_active(key))

    def drop() -> int:
        some = list(islice(keys, REMOVED_AT_ONCE))
        for key in some:
            with contextlib.suppress(OSError):
                files.drop_records(key)
        return len(some)

    await _until_none(lambda: worker.call(drop))


async def _until_none(step: Callable[[], Awaitable[int]]) -> int:
    """Repeat the step until it returns 0, each time after a pause as long as the step took; the sum."""
    total = 0
    began_s = time.monotonic()
    while count := await step():
        total += count
        await asyncio.sleep(max(PAUSE_S, time.monotonic() - began_s))
        began_s = time.monotonic()
    return total


def _old(log_dir: Path, is_live: IsLive, before: float) -> Iterator[str]:
    """One listing for all steps: entries that were returned may be removed meanwhile."""
    with os.scandir(log_dir) as entries:
        for entry in entries:
            task = task_of(entry.name)
            if task is None or is_live(task) or not entry.is_dir(follow_symlinks=False):
                continue
            if _changed_at(entry.path) < before:
                yield entry.path


def _changed_at(directory: str) -> float:
    """The newest change of the directory or anything directly in it; a log that is still written is new."""
    try:
        with os.scandir(directory) as entries:
            newest = max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)
        return max(newest, os.stat(directory, follow_symlinks=False).st_mtime)
    except OSError:
        return float("inf")
