"""The confinement of each attempt, on record beside its order, and whether its MPS server still exists.

An MPS server that ends takes its clients' work with it: their calls fail, or never return. An attempt counts as a
client if one of its processes has a GPU's device file open when the end of the server is noticed. An attempt that has
not connected yet gets a new server from the control daemon. If the control daemon has ended too, the attempt would run
without MPS, without its limit and without an error, so it is in trouble before it connects. The exception are clients
of a server that outlives its control daemon: they communicate with the server alone.
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
from carma.launch.mps import MpsServers, UserMps
from carma.launch.process_tree import ProcessTrees

DEVICE_FILES = "/dev/nvidia"  # prefix of their paths
SERVER_GONE = "its MPS server has ended"
CONTROL_GONE = "the MPS control daemon that it needs has ended"


class ConfinementRecords:
    def __init__(
        self,
        files: AttemptFiles,
        confiner: Confiner,
        servers: MpsServers | None,
        trees: ProcessTrees,
        device_files: str,
    ) -> None:
        self._files = files
        self._confiner = confiner
        self._servers = servers
        self._trees = trees
        self._device_files = device_files
        self._held: dict[AttemptKey, Held | None] = {}  # of attempts that are launched or run
        self._judged: dict[AttemptKey, int] = {}  # number of losses of its MPS that were considered
        self._troubles: dict[AttemptKey, str] = {}
        self._clients: set[AttemptKey] = set()  # of servers that outlived their control daemon

    def arrange(self, order: LaunchOrder) -> Arranged:
        """Decide and record. Raises Refused as `Confiner.arrange` does."""
        arranged = self._confiner.arrange(order)
        held = Held(arranged.confinement, arranged.mps_server)
        records.write(self._files.path(order.key, records.HELD), msgspec.to_builtins(held), durable=False)
        self._held[order.key] = held
        return arranged

    def confinement(self, key: AttemptKey) -> Confinement | None:
        held = self._of(key)
        return held.confinement if held is not None else None

    def under_mps(self, key: AttemptKey) -> bool:
        held = self._of(key)
        return held is not None and held.server is not None

    def trouble(self, key: AttemptKey, started: Started) -> str | None:
        """Why a running attempt has lost its MPS; None if it has not."""
        if not self.under_mps(key):
            return None
        if key not in self._judged:  # an earlier daemon may have noticed it and ended before it reported it
            self._judged[key] = 0
            before = self._files.trouble(key)
            if before is not None:
                self._troubles[key] = before.reason
        mps = self._mps(key)
        if mps is not None:
            self._check(key, started, mps)
        return self._troubles.get(key)

    def _check(self, key: AttemptKey, started: Started, mps: UserMps) -> None:
        new = mps.losses[self._judged[key] :]
        self._judged[key] = len(mps.losses)
        if any(one.noticed_at >= started.started_at for one in new) and self._uses_gpu(key, started):
            self._record_trouble(key, SERVER_GONE)
        if key not in self._troubles and key not in self._clients and not mps.daemon.alive:
            if mps.server_alive and self._uses_gpu(key, started):
                self._clients.add(key)
            else:
                self._record_trouble(key, CONTROL_GONE)

    def _record_trouble(self, key: AttemptKey, reason: str) -> None:
        self._troubles[key] = reason
        with contextlib.suppress(OSError):  # on a full disk the next daemon may not know
            records.write(self._files.path(key, records.TROUBLE), {"reason": reason}, durable=False)

    def _uses_gpu(self, key: AttemptKey, started: Started) -> bool:
        return any(has_open(pid, self._device_files) for pid in self._trees.members({key: started}))

    def server_lost(self, key: AttemptKey, started_at: float, ended_at: float) -> bool:
        """Whether its server ended while the attempt ran."""
        if not self.under_mps(key):
            return False
        mps = self._mps(key)
        return (mps is not None and mps.lost_between(started_at, ended_at)) or self._files.trouble(key) is not None

    def _of(self, key: AttemptKey) -> Held | None:
        if key not in self._held:
            self._held[key] = self._files.held(key)
        return self._held[key]

    def _mps(self, key: AttemptKey) -> UserMps | None:
        held = self._of(key)
        return None if held is None or held.server is None or self._servers is None else self._servers.get(held.server)

    def forget(self, key: AttemptKey) -> None:
        """The attempt has ended."""
        self._held.pop(key, None)
        self._judged.pop(key, None)
        self._troubles.pop(key, None)
        self._clients.discard(key)

    def attempts(self) -> set[AttemptKey]:
        """Attempts that are launched or run."""
        return set(self._held)

    def needed_servers(self) -> set[str]:
        return {held.server for held in self._held.values() if held is not None and held.server is not None}


def has_open(pid: int, prefix: str) -> bool:
    """Whether the process has a file with that prefix open; True if that cannot be found out."""
    try:
        return any(path.startswith(prefix) for path in open_files(pid))
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
