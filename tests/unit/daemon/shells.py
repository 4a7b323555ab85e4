"""A shell over a store, without the daemon around it."""

from __future__ import annotations

from typing import Any, cast

from carma.core.state import State
from carma.daemon.clock import SteadyClock
from carma.daemon.shell import Shell
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore


def make_shell(store: SqliteStore | MemoryStore, state: State, sequence: int = 0) -> Shell:
    return Shell(
        state=state,
        sequence=sequence,
        store=store,
        archive=store,
        clock=SteadyClock(),
        settings=cast(Any, None),
        origins={},
        paths=cast(Any, None),
    )
