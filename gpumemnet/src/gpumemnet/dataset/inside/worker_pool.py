"""The processes that measure: each is a fork with its own CUDA context and allocator, and a socket to its parent.

A worker says `ready` when its context exists, and waits for `go`. It trains, answers with its row, and keeps its memory
until `end`. If activity is measured, it says `prepared` instead of the row; at `rest` it releases what it needs only
during a step, says `resting`, and waits for `turn`. After each message it stands still, so that its parent can read its
footprint.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import activity  # type: ignore[import-not-found]
import training_run  # type: ignore[import-not-found]
from carma_measure.gpu_counters import GpuCounters  # type: ignore[import-not-found]
from forks import discard_output, end_with, ended_by, failure  # type: ignore[import-not-found]

POLL_S = 0.01
FOOTPRINT_DELAY_S = 0.2
LIMITED = ("starting", "running", "settling", "turning")  # in all other states the worker waits for its parent


class Worker:
    """One measuring process, as its parent sees it.

    `state`: starting, waiting, running, over; with activity prepared, settling, resting and turning before it is over.
    """

    def __init__(self, pid: int, line: socket.socket, config: dict[str, Any], need_mib: float, alone: bool) -> None:
        self.pid, self.line, self.config, self.need_mib, self.alone = pid, line, config, need_mib, alone
        self.state = "starting"
        self.since_s = self.began_s = time.monotonic()
        self.ready_s = 0.0
        self.unread = b""
        self.row: dict[str, Any] | None = None
        self.is_taken = self.is_disconnected = self.is_released = False
        self.is_read = True  # its footprint has been read since its last message; it holds nothing yet
        self.context: int | None = None
        self.footprint: int | None = None  # after training
        self.last_footprint: int | None = None  # when it last stood still
        self.queue = "light"
        self.held_mib = 0.0
        self.times_passed = 0
        self.ended_because = ""

    def enter(self, state: str) -> None:
        self.state, self.since_s = state, time.monotonic()

    def send(self, word: str) -> None:
        try:
            self.line.sendall(word.encode() + b"\n")
        except OSError:
            return  # the process has ended; `WorkerPool.poll` notices

    def release(self) -> None:
        """Releases the worker's memory."""
        if not self.is_released:
            self.is_released = True
            self.send("end")

    def receive(self) -> None:
        """Reads the messages that have arrived."""
        try:
            while part := self.line.recv(1 << 16, socket.MSG_DONTWAIT):
                self.unread += part
            self.is_disconnected = True
        except BlockingIOError:
            pass  # nothing more for now
        except OSError:
            self.is_disconnected = True
        *lines, self.unread = self.unread.split(b"\n")
        for message in map(json.loads, lines):
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        self.is_read = False
        match message["said"]:
            case "ready":
                self.ready_s = time.monotonic() - self.began_s
                self.enter("waiting")
            case "row":
                self.row = message["row"]
                self.row["took_s"] = round(time.monotonic() - self.began_s, 2)
                self.row["ready_s"] = round(self.ready_s, 2)
                self.enter("over")
            case state:
                self.enter(state)

    def record(self, footprint: int | None) -> None:
        """The footprint of the process while it stands still: its context, or all of the run after training."""
        self.is_read, self.last_footprint = True, footprint
        if self.state == "waiting":
            self.context = footprint
        if self.state in ("prepared", "over") and self.footprint is None:
            self.footprint = footprint
        if self.row is not None:
            self.row = {"footprint": self.footprint, "context": self.context} | self.row


Live = Callable[[socket.socket, dict[str, Any]], None]


class WorkerPool:
    """The living workers. `live` is what a worker does; `take` gets each worker once, with its row.

    Footprints are read if `uuid` names the GPU. A worker is killed after `limit_s` in a state of LIMITED.
    """

    def __init__(
        self, live: Live, take: Callable[[Worker, dict[str, Any]], None], limit_s: float, uuid: str | None = None
    ) -> None:
        self.live, self.take, self.limit_s = live, take, limit_s
        self.gpu = GpuCounters(uuid) if uuid else None
        self.footprint_delay_s = FOOTPRINT_DELAY_S if uuid else 0.0
        self.workers: list[Worker] = []

    def start(self, config: dict[str, Any], need_mib: float, alone: bool) -> Worker:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                for worker in self.workers:
                    worker.line.close()
                become_worker(parent)
                self.live(theirs, config)
            finally:
                os._exit(0)  # never back into the parent's loop, and no time for CUDA's destructors
        theirs.close()
        self.workers.append(Worker(pid, ours, config, need_mib, alone))
        return self.workers[-1]

    def among(self, *states: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.state in states]

    def read_among(self, state: str) -> list[Worker]:
        """Workers of this state whose footprint is known."""
        return [worker for worker in self.among(state) if worker.is_read]

    def poll(self) -> None:
        """Waits a moment for messages, and takes them; kills workers over the limit; removes those that ended."""
        lines = {worker.line: worker for worker in self.workers if not worker.is_disconnected}
        for line in select.select(list(lines), [], [], POLL_S)[0]:
            lines[line].receive()
        self._read_footprints()
        for worker in list(self.workers):
            self._remove_if_ended(worker)
            if worker.row is not None and not worker.is_taken:
                worker.is_taken = True
                self.take(worker, worker.row)
            if time.monotonic() - worker.since_s > self.limit_s and worker.state in LIMITED:
                worker.ended_because = f"it took more than {self.limit_s:g} s ({worker.state})"
                os.kill(worker.pid, signal.SIGKILL)

    def end(self, workers: Iterable[Worker]) -> None:
        """Kills them. Those that have no row yet count as not begun."""
        ended = list(workers)
        for worker in ended:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in ended:
            os.waitpid(worker.pid, 0)
            worker.line.close()
            self.workers.remove(worker)

    def _read_footprints(self) -> None:
        """One reading for all workers that stand still, because NVML delays processes that are starting.

        It is due when a worker has its row, or has waited for FOOTPRINT_DELAY_S; at once if no worker is starting.
        """
        new = [worker for worker in self.workers if not worker.is_read]
        now_s = time.monotonic()
        none_starts = not self.among("starting")
        if any(none_starts or each.row is not None or now_s - each.since_s > self.footprint_delay_s for each in new):
            held = {} if self.gpu is None else self.gpu.process_bytes()
            for worker in new:
                worker.record(held.get(worker.pid))

    def _remove_if_ended(self, worker: Worker) -> None:
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if not pid:
            return
        worker.receive()
        worker.line.close()
        self.workers.remove(worker)
        if worker.row is not None and not worker.is_read:
            worker.record(None)
        if worker.row is None:
            took_s = round(time.monotonic() - worker.began_s, 2)
            error = worker.ended_because or ended_by(status)
            again = not worker.ended_because  # a slow run would be slow again
            worker.row = {"oom": False, "error": error, "again": again, "took_s": took_s}
            worker.enter("over")


def become_worker(parent: int) -> None:
    """This process ends with its parent, ignores Ctrl-C and prints nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent, signal.SIGKILL)
    discard_output()


def train_and_answer(line: socket.socket, config: dict[str, Any], args: Any, numbers: Any) -> None:
    """All that a worker of the data set does."""
    messages = line.makefile("r")

    def say(said: str, row: dict[str, Any] | None = None) -> None:
        line.sendall(json.dumps({"said": said, "row": row}).encode() + b"\n")

    run = training_run.TrainingRun(config, args.device, args.steps, numbers)
    row = run.start()
    if row is None:
        say("ready")
        if messages.readline() != "go\n":
            return
        row = run.train()
    if args.activity:
        row = activity.no_activity() | row
        if not (row["error"] or row["oom"] or row["again"]):
            say("prepared")
            messages.readline()
            row |= measure_activity(run, args.window_s, say, messages)
    say("row", row)
    messages.readline()
    run.release()


def measure_activity(run: Any, window_s: float, say: Callable[[str], None], messages: Any) -> dict[str, Any]:
    """Stands still while others are prepared and measured, until it is its turn."""
    try:
        probe = activity.Probe(run.device)  # before its turn, because opening NVML takes time
        run.rest()
        say("resting")
        messages.readline()
        return dict(activity.measure(run, probe, window_s))
    except Exception as error:
        return dict(failure(error))
