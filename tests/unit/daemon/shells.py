"""A shell over a store, without the daemon around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

from carma.config import LoadedSettings
from carma.core.model.values import GpuUsage, Owner, TaskSpec
from carma.core.ports import Estimator, Launcher
from carma.core.state import State
from carma.core.telemetry.measurements import Hour
from carma.daemon.estimating import Estimates
from carma.daemon.executor import Executor, FindFrameworks
from carma.daemon.probes.command_check import check_runnable
from carma.daemon.runtime import SteadyClock
from carma.daemon.shell import Shell
from carma.daemon.writer import Follow, Writer
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore


def make_shell(store: SqliteStore | MemoryStore, state: State, sequence: int = 0) -> Shell:
    return Shell(
        state=state,
        sequence=sequence,
        store=store,
        clock=SteadyClock(),
        loaded=LoadedSettings(cast(Any, None), {}),
        paths=cast(Any, None),
    )


def make_estimates(shell: Shell, estimators: Sequence[Estimator] = ()) -> Estimates:
    return Estimates(estimators, shell.state.rules.memory, lambda: tuple(shell.state.gpus.values()))


async def check_in_process(spec: TaskSpec, _owner: Owner) -> None:
    """Checks with the rights of this process; the daemon uses a process of the owner."""
    check_runnable(spec)


def make_executor(
    shell: Shell,
    launcher: Launcher,
    estimators: Sequence[Estimator] = (),
    find_frameworks: FindFrameworks | None = None,
) -> Executor:
    return Executor(shell, launcher, make_estimates(shell, estimators), find_frameworks)


@contextlib.asynccontextmanager
async def writing(shell: Shell, follow: Follow = lambda _commands, _event: None) -> AsyncIterator[Writer]:
    """The shell with its writer; closed at the end as the daemon does it."""
    writer = Writer(shell, follow)
    running = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await writer.close()


def add_use(state: State, rows: Iterable[GpuUsage]) -> None:
    """Adds use of GPUs as if samples had shown it."""
    for row in rows:
        sums = state.usage.setdefault((row.hour, row.gpu), Hour())
        for name in Hour.__slots__:
            setattr(sums, name, getattr(sums, name) + getattr(row, name))
