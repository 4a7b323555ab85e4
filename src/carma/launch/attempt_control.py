"""What the launcher does to the processes of a running attempt, and its records of that.

1. The record of the signals that stop it.
2. Requests to save a checkpoint.
3. Pauses. Each is recorded before its effect, so that a daemon that was killed in between can end it.

A pause freezes processes in a cgroup of version 2, and otherwise stops each with SIGSTOP (process_tree.py). Another
mechanism, one that frees the GPU memory too, belongs into `pause` and `unpause`.
"""

from __future__ import annotations

import contextlib
import os
import time
from signal import SIGKILL

from carma import procfs
from carma.core.model.values import AttemptKey
from carma.launch import attempt_records as records
from carma.launch.attempt_files import AttemptFiles, Started
from carma.launch.exit_outcome import StopRecord
from carma.launch.process_tree import ProcessTrees


class AttemptControl:
    def __init__(self, files: AttemptFiles, trees: ProcessTrees) -> None:
        self._files = files
        self._trees = trees

    def record_stop(self, key: AttemptKey, before: StopRecord | None, signal: int) -> None:
        """The outcome names the first signal, and whether SIGKILL had to follow it."""
        if before is None:
            record: dict[str, object] = {"signal": int(signal), "at": time.time()}
        elif signal == SIGKILL and not before.killed:
            record = {"signal": before.signal, "at": before.at, "killed_at": time.time()}
        else:
            return
        records.write(self._files.path(key, records.STOP_SIGNALS), record, durable=False)

    def request_checkpoint(self, key: AttemptKey, started: Started, signal: int, asked_at: float) -> bool:
        """Recorded before the signal: a task that ends by it is known to have been asked, also if the daemon is killed
        right after it. If the daemon is killed between the two, the task goes on, which does no harm."""
        if self.asked_at(key) == asked_at:
            return True
        listeners = self._trees.listeners(key, started, signal)
        if not listeners:
            return False
        try:
            asked = {"asked_at": asked_at, "signal": int(signal)}
            records.write(self._files.path(key, records.ASKED), asked, durable=False)
        except OSError:
            return False  # a full disk: retried by the caller
        reached = [procfs.send(pid, start_ticks, signal) for pid, start_ticks in listeners]
        return any(reached)

    def asked_at(self, key: AttemptKey) -> float | None:
        return (records.read(self._files.path(key, records.ASKED)) or {}).get("asked_at")

    def pause(self, key: AttemptKey, started: Started) -> bool:
        try:
            if not self._files.exists(key, records.PAUSED):
                records.write(self._files.path(key, records.PAUSED), {}, durable=False)
        except OSError:
            return False  # a full disk: retried by the caller
        return self._trees.stop(key, started)

    def unpause(self, key: AttemptKey, started: Started) -> bool:
        if self._files.exists(key, records.PAUSED):
            self._trees.resume(key, started)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._files.path(key, records.PAUSED))
        return True
