"""The confinement of each attempt, on record beside its order, and whether its MPS server still exists.

An MPS server that ends takes its clients' work with it: their calls fail, or never return. An attempt counts as a
client if one of its processes has a GPU's device file open when the end of the server is noticed. An attempt that has
not connected yet gets a new server from the control daemon. If the control daemon has ended too, the attempt would run
without MPS, without its limit and without an error, so it is in trouble before it connects. The exception are clients
of a server that outlives its control daemon: they communicate with the server alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from carma import procfs
from carma.core.model.values import AttemptKey, Confinement
from carma.core.ports import Arranged, Confiner, LaunchOrder
from carma.launch import attempt_records as records
from carma.launch.attempt_files import AttemptFiles, SharingRecord, Started
from carma.launch.exit_outcome import MpsState
from carma.launch.mps import MpsServers, UserMps
from carma.launch.mps_control import MpsFailed
from carma.launch.process_tree import ProcessTrees

DEVICE_FILES = "/dev/nvidia"  # prefix of their paths
TERMINATE_LIMIT_S = 1.0  # for the control daemon to end the work of the clients that are killed
SERVER_GONE = "its MPS server has ended"
CONTROL_GONE = "the MPS control daemon that it needs has ended"


@dataclass
class ConfinementRecords:
    files: AttemptFiles
    confiner: Confiner
    servers: MpsServers | None
    trees: ProcessTrees
    device_files: str
    _records: dict[AttemptKey, SharingRecord | None] = field(default_factory=dict)  # of attempts that are not over
    _judged: dict[AttemptKey, int] = field(default_factory=dict)  # number of losses of its MPS that were considered
    _clients: set[AttemptKey] = field(default_factory=set)  # of servers without a control daemon; checked once

    def arrange(self, order: LaunchOrder) -> Arranged:
        """Decide and record. Raises Refused as `Confiner.arrange` does, and OSError."""
        arranged = self.confiner.arrange(order)
        self._write(order.key, SharingRecord(arranged.confinement, arranged.mps_server))
        return arranged

    def confinement(self, key: AttemptKey) -> Confinement | None:
        record = self._of(key)
        return record.confinement if record is not None else None

    def trouble(self, key: AttemptKey, started: Started) -> str | None:
        """Why a running attempt has lost its MPS; None if it has not."""
        record, mps = self._of(key), self._mps(key)
        if record is None or record.trouble is not None or mps is None:
            return record.trouble if record is not None else None
        reason = self._loss(key, started, mps)
        if reason is not None:
            record = replace(record, trouble=reason)
            self._records[key] = record
            with contextlib.suppress(OSError):  # on a full disk the next daemon may not know
                self._write(key, record)
        return reason

    def _loss(self, key: AttemptKey, started: Started, mps: UserMps) -> str | None:
        new = mps.losses[self._judged.get(key, 0) :]
        self._judged[key] = len(mps.losses)
        if any(one.noticed_at >= started.started_at for one in new) and self._uses_gpu(key, started):
            return SERVER_GONE
        if key in self._clients or mps.daemon.alive:
            return None
        if mps.server_alive and self._uses_gpu(key, started):
            self._clients.add(key)
            return None
        return CONTROL_GONE

    def _uses_gpu(self, key: AttemptKey, started: Started) -> bool:
        return any(has_open(pid, self.device_files) for pid in self.trees.members({key: started}))

    def mps_state(self, key: AttemptKey, started: Started | None, ended_at: float) -> MpsState:
        """State of the MPS server of an attempt that has ended."""
        record, mps = self._of(key), self._mps(key)
        if record is None or started is None:
            return MpsState(used=record is not None and record.server is not None)
        lost = record.trouble is not None or (mps is not None and mps.lost_between(started.started_at, ended_at))
        return MpsState(used=record.server is not None, lost=lost)

    def terminate_clients(self, key: AttemptKey, started: Started) -> None:
        """Called before SIGKILL: it is unsafe for the neighbours of an MPS client with outstanding work (NVIDIA's MPS
        documentation, on client termination). A control daemon that does not answer delays the kill only a little."""
        mps = self._mps(key)
        if mps is None or not mps.daemon.alive:
            return
        pids = self.trees.members({key: started})
        for server in (one for one in mps.servers if one.alive):
            with contextlib.suppress(MpsFailed):
                mps.control.terminate_clients(server, pids, TERMINATE_LIMIT_S)

    def _write(self, key: AttemptKey, record: SharingRecord) -> None:
        records.write(self.files.path(key, records.SHARING), msgspec.to_builtins(record), durable=False)
        self._records[key] = record

    def _of(self, key: AttemptKey) -> SharingRecord | None:
        if key not in self._records:
            self._records[key] = self.files.sharing(key)
        return self._records[key]

    def _mps(self, key: AttemptKey) -> UserMps | None:
        record = self._of(key)
        name = record.server if record is not None else None
        return self.servers.get(name) if name is not None and self.servers is not None else None

    def forget(self, key: AttemptKey) -> None:
        """The attempt has ended."""
        self._records.pop(key, None)
        self._judged.pop(key, None)
        self._clients.discard(key)

    def attempts(self) -> set[AttemptKey]:
        """Attempts that are launched or run."""
        return set(self._records)

    def needed_servers(self) -> set[str]:
        return {one.server for one in self._records.values() if one is not None and one.server is not None}


def has_open(pid: int, prefix: str) -> bool:
    """Whether the process has a file with that prefix open; True if that cannot be found out."""
    try:
        return any(path.startswith(prefix) for path in procfs.open_files(pid))
    except FileNotFoundError:  # it ended
        return False
    except OSError:
        return True
