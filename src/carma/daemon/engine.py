"""What the HTTP side needs of the shell, so that either can be tested without the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from carma.config import Origin, Settings
from carma.core.model.events import Durable
from carma.core.model.task import Task
from carma.core.model.values import Estimate, Owner, TaskId, TaskSpec
from carma.core.ports import Archive
from carma.core.state import State
from carma.daemon.auth import Identity, require_owner
from carma.errors import NotFound

T = TypeVar("T")


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

    async def read(self, function: Callable[[], T], *, slow: bool = False) -> T: ...

    def shared(self, spec: TaskSpec) -> TaskSpec: ...

    def new_task_ids(self, count: int) -> TaskId: ...

    def subscribe(self) -> Subscription: ...

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool: ...

    async def estimate(self, owner: Owner, spec: TaskSpec) -> Estimate | None: ...

    def stage(self, task: TaskId) -> str: ...

    def request_stop(self, cancel_running: bool = False) -> None: ...


def find(engine: Engine, task: TaskId) -> Task | None:
    """In memory, or in the archive, which is read on the event loop: for single tasks where nothing can be awaited."""
    return engine.state.tasks.get(task) or engine.archive.task(task)


async def look_up(engine: Engine, task: TaskId) -> Task:
    """In memory, or in the archive. Raises NotFound."""
    found = engine.state.tasks.get(task) or await engine.read(lambda: engine.archive.task(task))
    if found is None:
        raise no_such(task)
    return found


async def look_up_own(engine: Engine, task: TaskId, who: Identity, verb: str) -> Task:
    found = await look_up(engine, task)
    require_owner(who, found, verb)
    return found


def no_such(task: TaskId) -> NotFound:
    return NotFound(f"there is no task {task}", "`carma queue` and `carma history` list tasks")
