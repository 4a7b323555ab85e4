"""What the HTTP side needs of the shell, so that either can be tested without the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from carma.config import Origin, Settings
from carma.core.events import Durable
from carma.core.model import AttemptKey, Estimate, Owner, TaskId, TaskSpec
from carma.core.ports import Archive
from carma.core.state import State
from carma.core.task import Task
from carma.daemon.auth import Identity, require_owner
from carma.errors import NotFound


class Subscription(Protocol):
    """(sequence, event); ends when the subscriber falls too far behind, or when the daemon stops."""

    def __aiter__(self) -> AsyncIterator[tuple[int, Durable]]: ...

    def close(self) -> None: ...


class Clock(Protocol):
    @property
    def speed(self) -> float: ...

    def now(self) -> float: ...


class Paths(Protocol):
    @property
    def state_dir(self) -> Path: ...

    @property
    def log_dir(self) -> Path: ...


class Engine(Protocol):
    """The shell, as far as it is used here."""

    @property
    def state(self) -> State: ...

    @property
    def archive(self) -> Archive: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def origins(self) -> Mapping[str, Origin]: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def paths(self) -> Paths: ...

    @property
    def started_at(self) -> float: ...

    async def change(self, make: Callable[[State], Sequence[Durable]]) -> int: ...

    def new_task_ids(self, count: int) -> TaskId: ...

    def subscribe(self) -> Subscription: ...

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool: ...

    async def estimate(self, owner: Owner, spec: TaskSpec) -> Estimate | None: ...

    def stage(self, task: TaskId) -> str: ...

    def log_paths(self, key: AttemptKey) -> tuple[Path, Path]: ...

    def request_stop(self, cancel_running: bool = False) -> None: ...


def find(engine: Engine, task: TaskId) -> Task | None:
    """In memory, or among those that have left it."""
    return engine.state.tasks.get(task) or engine.archive.task(task)


def require(engine: Engine, task: TaskId) -> Task:
    found = find(engine, task)
    if found is None:
        raise NotFound(f"there is no task {task}", "`carma queue` and `carma history` list tasks")
    return found


def require_own(engine: Engine, task: TaskId, who: Identity, verb: str) -> Task:
    found = require(engine, task)
    require_owner(who, found, verb)
    return found
