"""What is old enough goes: finished tasks, then the directories of attempts that nobody knows any more.

A little at a time: a directory with a hundred thousand entries must not hold up anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from carma.core.model import TaskId
from carma.core.units import show_count
from carma.daemon.shell import Shell
from carma.daemon.worker import Worker

log = logging.getLogger("carma.daemon")

FIRST_S = 60.0
EVERY_S = 3600.0
AT_ONCE = 500  # directories in one go
DAY_S = 86_400.0


class Prunable(Protocol):
    def prune(self, ended_before: float) -> Sequence[TaskId]: ...


async def keep_tidy(shell: Shell, archive: Prunable, log_dir: Path) -> None:
    """Now and then, for as long as the daemon runs. What it raises is logged; the next time comes anyway."""
    keep_days = shell.settings.daemon.keep_logs_days
    worker = Worker("housekeeping")
    pause_s = FIRST_S
    while keep_days > 0:
        await asyncio.sleep(pause_s)
        try:
            await shell.in_store(lambda: archive.prune(shell.clock.now() - keep_days * DAY_S))
            live = frozenset(shell.state.tasks)
            before = time.time() - keep_days * DAY_S  # files carry the machine's time, whatever the daemon's clock says
            removed = await worker.call(partial(remove_old, log_dir, live, before))
            pause_s = FIRST_S if removed >= AT_ONCE else EVERY_S
        except Exception:
            log.exception("removing old logs failed")
            pause_s = EVERY_S


def remove_old(log_dir: Path, live: frozenset[TaskId], before: float) -> int:
    """Remove attempt directories that were last touched before that time and whose task is not live; returns how many.

    That covers those that an earlier run of this did not get to, and those of a database that is no longer there.
    """
    removed = 0
    for directory in _old(log_dir, live, before):
        shutil.rmtree(directory, ignore_errors=True)
        removed += 1
        if removed >= AT_ONCE:
            break
    if removed:
        log.info("removed the logs of %s", show_count(removed, "old attempt"))
    return removed


def _old(log_dir: Path, live: frozenset[TaskId], before: float) -> Iterator[Path]:
    with os.scandir(log_dir) as entries:
        for entry in entries:
            task = task_of(entry.name)
            if task is None or task in live or not entry.is_dir(follow_symlinks=False):
                continue
            if _touched_at(entry.path) < before:
                yield Path(entry.path)


def _touched_at(directory: str) -> float:
    """The newest change of the directory or anything directly in it; a log that is still written is new."""
    try:
        with os.scandir(directory) as entries:
            newest = max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)
        return max(newest, os.stat(directory, follow_symlinks=False).st_mtime)
    except OSError:
        return float("inf")


def task_of(name: str) -> TaskId | None:
    """The task of an attempt's directory, which is named `<task>.<attempt>`."""
    task, dot, attempt = name.partition(".")
    good = dot and task.isascii() and task.isdigit() and attempt.isascii() and attempt.isdigit()
    return TaskId(int(task)) if good else None
