"""What each attempt runs under, and whether that still stands. On record beside its order, so a new daemon knows it.

An MPS server that goes takes its clients' work with it: their calls fail, or never return. An attempt counts as its
client when one of its processes has a GPU's device file open at the moment when the server is missed; one that has not
come so far will be given a new server by the control daemon. When that is gone too, nobody gives it one: it would run
without MPS, without its limit and without an error, so it is in trouble before it has come. Only the clients of a
server that outlives its control daemon are not: they speak to the server alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import msgspec

from carma.core.model.values import AttemptKey, Confinement
from carma.core.ports import Arranged, Confiner, LaunchOrder
from carma.launch import attempt_records as records
from carma.launch.attempt_files import AttemptFiles, Held, Started
from carma.launch.mps import MpsServers
from carma.launch.process_tree import Trees

DEVICE_FILES = "/dev/nvidia"  # what their paths begin with
SERVER_GONE = "the MPS server that it ran under has ended"
CONTROL_GONE = "the MPS control daemon that it was to run under has ended"


class Holding:
    def __init__(
        self,
        files: AttemptFiles,
        confiner: Confiner,
        servers: MpsServers | None,
        trees: Trees,
        device_files: str,
    ) -> None:
        self._files = files
        self._confiner = confiner
        self._servers = servers
        self._trees = trees
        self._device_files = device_files
        self._held: dict[AttemptKey, Held | None] = {}  # of attempts that are launched or run
        self._judged: dict[AttemptKey, int] = {}  # so many losses of its server were looked at
        self._troubles: dict[AttemptKey, str] = {}
        self._clients: set[AttemptKey] = set()  # of servers that outlived their control daemon

    def arrange(self, order: LaunchOrder) -> Arranged:
        """Decide and write down. Raises what `Confiner.arrange` raises."""
        arranged = self._confiner.arrange(order)
        held = Held(arranged.confinement, arranged.mps_server)
        records.write(self._files.path(order.key, records.HELD), msgspec.to_builtins(held), durable=False)
        self._held[order.key] = held
        return arranged

    def look(self) -> None:
        if self._servers is not None:
            self._servers.look()

    def confinement(self, key: AttemptKey) -> Confinement | None:
        held = self._of(key)
        return held.confinement if held is not None else None

    def under_mps(self, key: AttemptKey) -> bool:
        held = self._of(key)
        return held is not None and held.server is not None

    def trouble(self, key: AttemptKey, started: Started) -> str | None:
        """Of one that runs."""
        held = self._of(key)
        if held is None or held.server is None or self._servers is None:
            return None
        if key not in self._judged:
            self._recall(key)
        losses = self._servers.losses(held.server)
        new = losses[self._judged[key] :]
        self._judged[key] = len(losses)
        if any(one.noticed_at >= started.started_at for one in new) and self._uses_gpu(key, started):
            self._note(key, SERVER_GONE)
        if key not in self._troubles and key not in self._clients and self._servers.leads_nowhere(held.server):
            if self._servers.serves(held.server) and self._uses_gpu(key, started):
                self._clients.add(key)
            else:
                self._note(key, CONTROL_GONE)
        return self._troubles.get(key)

    def _note(self, key: AttemptKey, reason: str) -> None:
        self._troubles[key] = reason
        with contextlib.suppress(OSError):  # on a full disk the next daemon may not know
            records.write(self._files.path(key, records.TROUBLE), {"reason": reason}, durable=False)

    def _recall(self, key: AttemptKey) -> None:
        """An earlier daemon may have missed its server and died before it told anybody."""
        self._judged[key] = 0
        before = self._files.trouble(key)
        if before is not None:
            self._troubles[key] = before.reason

    def _uses_gpu(self, key: AttemptKey, started: Started) -> bool:
        return any(has_open(pid, self._device_files) for pid in self._trees.members({key: started}))

    def server_lost(self, key: AttemptKey, started_at: float, ended_at: float) -> bool:
        """Whether its server went while it ran."""
        held = self._of(key)
        if held is None or held.server is None or self._servers is None:
            return False
        return self._files.trouble(key) is not None or self._servers.lost_between(held.server, started_at, ended_at)

    def _of(self, key: AttemptKey) -> Held | None:
        if key not in self._held:
            self._held[key] = self._files.held(key)
        return self._held[key]

    def forget(self, key: AttemptKey) -> None:
        """It needs nothing any more."""
        self._held.pop(key, None)
        self._judged.pop(key, None)
        self._troubles.pop(key, None)
        self._clients.discard(key)

    # The servers.

    def attempts(self) -> set[AttemptKey]:
        """Those that are launched or run."""
        return set(self._held)

    def needed(self) -> set[str]:
        return {held.server for held in self._held.values() if held is not None and held.server is not None}

    def pids(self) -> frozenset[int]:
        return self._servers.pids() if self._servers is not None else frozenset()

    def tend(self) -> None:
        if self._servers is not None:
            self._servers.tend(self.needed())

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close(self.needed())


def has_open(pid: int, beginning: str) -> bool:
    """Whether it has such a file open; so it is taken to be where that cannot be told."""
    try:
        return any(one.startswith(beginning) for one in open_files(pid))
    except FileNotFoundError:  # it ended
        return False
    except OSError:
        return True


def open_files(pid: int) -> Iterable[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
