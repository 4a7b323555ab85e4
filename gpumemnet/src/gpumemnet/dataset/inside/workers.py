"""The processes that measure: each a fork with a context and an allocator of its own, and a line to talk over.

A process says `ready` when its context stands, and waits for `go`. It trains, answers with its row, and holds its
memory until `end`. For activity it says `prepared` instead of the row; at `rest` it gives back what it needs for a
moment only, says `resting`, and waits for `turn`. Having said something it stands still: its parent can weigh it.
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
import measure  # type: ignore[import-not-found]
from parent import end_with  # type: ignore[import-not-found]

POLL_S = 0.01
WEIGH_S = 0.2
LIMITED = ("starting", "running", "settling", "turning")  # in the others it waits for us


class Child:
    """One that measures, as its parent sees it.

    `state`: starting, waiting, running, over; for activity prepared, settling, resting and turning before it is over.
    """

    def __init__(self, pid: int, line: socket.socket, config: dict[str, Any], need_mib: float, alone: bool) -> None:
        self.pid, self.line, self.config, self.need_mib, self.alone = pid, line, config, need_mib, alone
        self.state = "starting"
        self.since_s = self.began_s = time.monotonic()
        self.ready_s = 0.0
        self.unread = b""
        self.row: dict[str, Any] | None = None
        self.is_taken = self.is_deaf = self.is_dismissed = False
        self.is_weighed = True  # there is nothing yet
        self.context: int | None = None
        self.footprint: int | None = None  # when it had trained
        self.weight: int | None = None  # when it last stood still
        self.lane = "light"
        self.held_mib = 0.0
        self.passed = 0
        self.ended_because = ""

    def enter(self, state: str) -> None:
        self.state, self.since_s = state, time.monotonic()

    def tell(self, word: str) -> None:
        try:
            self.line.sendall(word.encode() + b"\n")
        except OSError:
            return  # it is gone, which is seen elsewhere

    def dismiss(self) -> None:
        """Its memory is not needed any more."""
        if not self.is_dismissed:
            self.is_dismissed = True
            self.tell("end")

    def hear(self) -> None:
        """Takes what it said, as far as it is there."""
        try:
            while part := self.line.recv(1 << 16, socket.MSG_DONTWAIT):
                self.unread += part
            self.is_deaf = True
        except BlockingIOError:
            pass  # nothing more for now
        except OSError:
            self.is_deaf = True
        *lines, self.unread = self.unread.split(b"\n")
        for said in map(json.loads, lines):
            self._take(said)

    def _take(self, said: dict[str, Any]) -> None:
        self.is_weighed = False
        match said["said"]:
            case "ready":
                self.ready_s = time.monotonic() - self.began_s
                self.enter("waiting")
            case "row":
                self.row = said["row"]
                self.row["took_s"] = round(time.monotonic() - self.began_s, 2)
                self.row["ready_s"] = round(self.ready_s, 2)
                self.enter("over")
            case state:
                self.enter(state)

    def weigh(self, weight: int | None) -> None:
        """What it holds as it stands still: its context, or what a run takes once it has trained."""
        self.is_weighed, self.weight = True, weight
        if self.state == "waiting":
            self.context = weight
        if self.state in ("prepared", "over") and self.footprint is None:
            self.footprint = weight
        if self.row is not None:
            self.row = {"footprint": self.footprint, "context": self.context} | self.row


class Crew:
    """The children alive, and what all of them need. `take` gets each child once, with its row."""

    def __init__(self, work: dict[str, Any], numbers: Any, take: Callable[[Child, dict[str, Any]], None]) -> None:
        self.work, self.numbers, self.take = work, numbers, take
        self.footprints = measure.Footprints(work.get("uuid"))
        self.weigh_s = WEIGH_S if work.get("uuid") else 0.0
        self.children: list[Child] = []

    def start(self, config: dict[str, Any], need_mib: float, alone: bool) -> Child:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                for child in self.children:
                    child.line.close()
                settle(parent)
                live(theirs, config, self.work, self.numbers)
            finally:
                os._exit(0)  # never back into the parent's loop, and no time for tearing CUDA down
        theirs.close()
        self.children.append(Child(pid, ours, config, need_mib, alone))
        return self.children[-1]

    def among(self, *states: str) -> list[Child]:
        return [child for child in self.children if child.state in states]

    def weighed(self, state: str) -> list[Child]:
        return [child for child in self.among(state) if child.is_weighed]

    def look(self) -> None:
        """Waits a moment for news, takes it, ends who is over the time, and buries who is gone."""
        lines = {child.line: child for child in self.children if not child.is_deaf}
        for line in select.select(list(lines), [], [], POLL_S)[0]:
            lines[line].hear()
        self._weigh()
        for child in list(self.children):
            self._bury_if_gone(child)
            self._take_once(child)
            over_time = time.monotonic() - child.since_s > self.work["config_limit_s"]
            if over_time and child.state in LIMITED:
                child.ended_because = f"it took more than {self.work['config_limit_s']:g} s ({child.state})"
                os.kill(child.pid, signal.SIGKILL)

    def end(self, children: Iterable[Child]) -> None:
        """Without a row, where they have none yet: they count as not begun."""
        ended = list(children)
        for child in ended:
            os.kill(child.pid, signal.SIGKILL)
        for child in ended:
            os.waitpid(child.pid, 0)
            child.line.close()
            self.children.remove(child)

    def _weigh(self) -> None:
        """All who stand still since the last time, with one reading: NVML makes those wait who start.

        It is due when one has its row, since its memory is wanted, or has waited a while for it; at once where nobody
        starts.
        """
        new = [child for child in self.children if not child.is_weighed]
        now_s = time.monotonic()
        is_calm = not self.among("starting")
        if any(is_calm or child.row is not None or now_s - child.since_s > self.weigh_s for child in new):
            held = self.footprints.read()
            for child in new:
                child.weigh(held.get(child.pid))

    def _bury_if_gone(self, child: Child) -> None:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            return
        child.hear()
        child.line.close()
        self.children.remove(child)
        if child.row is not None and not child.is_weighed:
            child.weigh(None)
        if child.row is None:
            took_s = round(time.monotonic() - child.began_s, 2)
            error = child.ended_because or ended_by(status)
            again = not child.ended_because  # one that was slow would be so again
            child.row = {"oom": False, "error": error, "again": again, "took_s": took_s}
            child.enter("over")

    def _take_once(self, child: Child) -> None:
        if child.row is not None and not child.is_taken:
            child.is_taken = True
            self.take(child, child.row)


def ended_by(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the process ended with status {os.WEXITSTATUS(status)} and no row"


def settle(parent: int) -> None:
    """A child's place in the world: it ends with its parent, however that ends, and prints nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent, signal.SIGKILL)
    measure.hush()


def live(line: socket.socket, config: dict[str, Any], work: dict[str, Any], numbers: Any) -> None:
    """A child's whole life."""
    heard = line.makefile("r")

    def say(said: str, row: dict[str, Any] | None = None) -> None:
        line.sendall(json.dumps({"said": said, "row": row}).encode() + b"\n")

    measurement = measure.Measurement(config, work["device"], work["steps"], numbers)
    row = measurement.start()
    if row is None:
        say("ready")
        if heard.readline() != "go\n":
            return
        row = measurement.train()
    if work["activity"]:
        row = activity.no_activity() | row
        if not (row["error"] or row["oom"] or row["again"]):
            say("prepared")
            heard.readline()
            row |= watch(measurement, work["window_s"], say, heard)
    say("row", row)
    heard.readline()
    measurement.release()


def watch(measurement: Any, window_s: float, say: Callable[[str], None], heard: Any) -> dict[str, Any]:
    """Stands still while others are prepared and watched, until it is its turn."""
    try:
        probe = activity.Probe(measurement.device)  # now: NVML takes a while to open
        measurement.rest()
        say("resting")
        heard.readline()
        return dict(activity.watch(measurement, probe, window_s))
    except Exception as error:
        return dict(measure.failure(error))
