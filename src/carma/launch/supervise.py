"""The runner: one per attempt, in its own session, outliving the daemon.

It claims the attempt, starts the command, waits for it, ends what is left of its tree, and writes down how it ended. It
stays the daemon's user (root on a shared server): only the command changes identity, so no user can kill the runner or
write another outcome. Standard library only. It must never lose an exit record to a signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

from carma.launch import child, procfs, records
from carma.launch.cgroup import oom_kills

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

START_LIMIT_S = 10.0  # for writing down that it started, on a full disk
EXIT_LIMIT_S = 1800.0  # for writing down how it ended
KILL_LIMIT_S = 60.0  # for processes that do not even take SIGKILL (stuck in the driver)
PAUSE_S = 0.02
NO_SPACE = 75  # exit status: nothing was done, the order may be given again
MESSAGE_LIMIT = 400  # characters; keeps the exit record within the reserved space
_PR_SET_CHILD_SUBREAPER = 36


def main(directory: str) -> int:
    settle()
    path = os.path.join(directory, "")
    try:
        order = records.read(path + records.ORDER)
        if order is None or not records.create_once(path + records.CLAIM, own_identity()):
            return 0
        records.reserve(path + records.EXIT)
    except OSError as error:
        print(f"cannot claim {directory}: {error}", file=sys.stderr)
        return NO_SPACE
    outcome = Attempt(path, order).run()
    return 0 if records.write_patiently(path + records.EXIT, outcome, EXIT_LIMIT_S) else 1


def settle() -> None:
    """Independent of whoever started us: no shared files, no signals, orphans of the tree come to us."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:  # the listing's own
                continue
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir("/")
    os.umask(0o077)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": procfs.boot_id()}


def start_ticks(pid: int) -> int:
    found = procfs.process(pid)
    return found.start_ticks if found is not None else 0


class Attempt:
    def __init__(self, path: str, order: dict[str, Any]) -> None:
        self.path = path
        self.order = order
        self.oom_kills_before = oom_kills()
        self.started_s = time.monotonic()
        self.pid = 0

    def run(self) -> dict[str, Any]:
        """The exit record."""
        try:
            problem = self.start()
        except OSError as error:
            problem = {"code": child.CANNOT_START, "message": f"cannot start the command: {child.why(error)}"}
        status = self.wait() if self.pid else 0
        told = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGTERM, signal.SIGINT)
        self.end_leftovers(told)
        return self.exit_record(problem, status)

    def start(self) -> dict[str, Any] | None:
        """Fork, prepare, write down, exec. Returns the parts of the exit record that say why it did not start."""
        status_in, status_out = os.pipe()
        go_in, go_out = os.pipe()
        logs = self.own_logs()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(go_out)  # the runner must be its only holder: its death is the end of the file
            child.become(self.order, logs, status_out, go_in)
        os.close(status_out)
        os.close(go_in)
        try:
            report = first_line(status_in)
            if "logs" not in report:
                return failure(report)
            refusal = self.record_start(report["logs"])
            if refusal is not None:
                return refusal
            os.write(go_out, b"g")
            os.close(go_out)
            go_out = -1
            return failure(first_line(status_in))
        except BrokenPipeError:  # killed while it waited; `wait` tells by what
            return None
        finally:
            os.close(status_in)
            if go_out >= 0:
                os.close(go_out)

    def own_logs(self) -> tuple[int | None, int | None]:
        """Files in the attempt's directory, which only we may write to; others are opened by the submitter."""
        fds: list[int | None] = []
        identity = self.order.get("identity")
        for name, own in (("stdout", records.STDOUT), ("stderr", records.STDERR)):
            if self.order[name] != self.path + own:
                fds.append(None)
                continue
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.path + own, flags, 0o600)
            if identity is not None:
                os.fchown(fd, identity["uid"], identity["gid"])
            fds.append(fd)
        return fds[0], fds[1]

    def record_start(self, logs: list[list[int]]) -> dict[str, Any] | None:
        """Before the word to go, so that whatever runs is on record. The stop is looked for after that: see
        ProcessLauncher.signal, which leaves it before it looks for this record. One of the two sees the other."""
        record = {
            "pid": self.pid,
            "start_ticks": start_ticks(self.pid),
            "runner": own_identity(),
            "started_at": time.time(),
            "token": self.order["token"],
            "logs": logs,
        }
        if not records.write_patiently(self.path + records.STARTED, record, START_LIMIT_S):
            return {"code": child.CANNOT_START, "message": "cannot write down that the task starts: is the disk full?"}
        stop = records.read(self.path + records.STOP)
        if stop is not None:
            return {"signal": stop["signal"], "message": "stopped before it started"}
        return None

    def wait(self) -> int:
        """Wait status of the command; orphans of its tree that end meanwhile are reaped too."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self.pid:
                return status

    def end_leftovers(self, told: bool) -> None:
        """A tree that outlives its command holds GPU memory that nobody books. It gets its grace, then SIGKILL.

        `told`: the command died of a SIGTERM, which went to the whole tree; a second one could break the clean-up
        that the others are in the middle of.
        """
        grace_end_s = time.monotonic() + self.order["grace_s"]
        give_up_s = grace_end_s + KILL_LIMIT_S
        signalled: set[int] = set()
        while (left := leftovers()) and time.monotonic() < give_up_s:
            overdue = time.monotonic() >= grace_end_s
            for one in left:
                if overdue:
                    procfs.send(one.pid, one.start_ticks, signal.SIGKILL)
                elif not told and one.pid not in signalled:
                    signalled.add(one.pid)
                    procfs.send(one.pid, one.start_ticks, signal.SIGTERM)
            time.sleep(PAUSE_S)

    def exit_record(self, problem: dict[str, Any] | None, status: int) -> dict[str, Any]:
        before, after = self.oom_kills_before, oom_kills()
        record: dict[str, Any] = {
            "ended_at": time.time(),
            "duration_s": time.monotonic() - self.started_s,
            "oom_kills": after - before if after is not None and before is not None else None,
        }
        if problem is not None:
            return {**record, **problem, "message": problem["message"][:MESSAGE_LIMIT]}
        if os.WIFSIGNALED(status):
            return {**record, "signal": os.WTERMSIG(status)}
        return {**record, "code": os.WEXITSTATUS(status)}


def leftovers() -> list[procfs.Process]:
    """What lives of the tree. Orphans come to us (subreaper), so no child at all means nothing is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    table = procfs.processes()
    found = procfs.rooted(table, [os.getpid()])
    return [table[pid] for pid in found if pid != os.getpid() and not table[pid].ended]


def first_line(fd: int) -> dict[str, Any]:
    """The next report of the child; empty when it closed the pipe (it became the command, or it died)."""
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(fd, 4096)
        if not more:
            return {}
        data += more
    report = json.loads(data)
    return report if isinstance(report, dict) else {}


def failure(report: dict[str, Any]) -> dict[str, Any] | None:
    return {"code": report["code"], "message": report["error"]} if "error" in report else None
