"""The runner: one process for each attempt, in its own session, which outlives the daemon.

1. It claims the attempt and starts the command, within the start-up timeout.
2. It keeps CARMA's own log files below their size limit while the command runs.
3. It ends what is left of the command's process tree, and records how the command ended.

It keeps the daemon's user (root on a shared server). Only the command changes identity, so no user can kill the runner
or write another outcome. A signal must not make it lose the exit record. Standard library only.
"""

from __future__ import annotations

import _socket
import ctypes
import json
import os
import select
import signal
import sys
import time

from carma import procfs, step_file
from carma.cgroups import oom_kills
from carma.launch import attempt_records as records
from carma.launch import command_process as child
from carma.launch.output_files import OutputLimit, cut, read_tails

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

RECORD_START_LIMIT_S = 10.0  # for recording the start, on a full disk
EXIT_LIMIT_S = 1800.0  # for recording the end
KILL_LIMIT_S = 60.0  # for processes that not even SIGKILL ends (stuck in the driver)
REAP_S = 0.5  # for a command that was killed before it started; it may be stuck in a file system
SIZE_CHECK_S = 1.0  # interval at which the size of the logs is checked
FAST_SIZE_CHECK_S = 0.1  # the same while they grow fast
STOP_CHECK_S = 0.2  # interval at which a request to stop is looked for until the command has started
PAUSE_S = 0.02
NO_SPACE = 75  # exit status: nothing was done, the order may be given again
MESSAGE_LIMIT = 400  # characters; keeps the exit record within the reserved space
NO_WAIT = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a lease of the file's owner delays no open
_REPORT_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class NotStarted(Exception):
    """The command was not started. `fields`: the reason, as fields of the exit record."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields.get("message", ""))
        self.fields = fields


def main() -> int:
    """`python -I -S ... ATTEMPT_DIRECTORY` (launch/process.py): the exit status."""
    directory = sys.argv[-1]
    order = read_order()
    settle()
    path = os.path.join(directory, "")
    try:
        for procs in order["cgroup_procs"] if order is not None else ():
            join_cgroup(procs)
    except OSError as error:
        print(f"cannot join the cgroup of the attempt: {error}", file=sys.stderr)
        return 1
    try:
        if order is None or not records.create_once(path + records.CLAIM, own_identity()):
            return 0
        records.reserve(path + records.EXIT)
    except OSError as error:
        print(f"cannot claim {directory}: {error}", file=sys.stderr)
        return NO_SPACE
    return 0 if SupervisedAttempt(path, order).run() else 1


def read_order() -> dict[str, Any] | None:
    """Reads the order from standard input, a file in memory: it contains the submitter's environment and is never on a
    disk."""
    data = b""
    while piece := os.pread(0, 1 << 20, len(data)):
        data += piece
    return records.decode(data)


def settle() -> None:
    """Become independent of the starting process: no shared files, no signals; orphans of the process tree become
    children of this process. SIGCHLD stays pending until `wait` takes it."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.closerange(3, 1 + max(int(name) for name in os.listdir("/proc/self/fd")))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    os.chdir("/")
    os.umask(0o077)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def join_cgroup(procs: str) -> None:
    """Called before anything is started, so that every process of the attempt is in the cgroup."""
    fd = os.open(procs, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def own_identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": procfs.boot_id()}


def start_ticks(pid: int) -> int:
    found = procfs.process(pid)
    return found.start_ticks if found is not None else 0


class SupervisedAttempt:
    def __init__(self, path: str, order: dict[str, Any]) -> None:
        self.path = path
        self.order = order
        self.oom_kills_before = oom_kills()
        self.pid = 0
        self.limits: list[OutputLimit] = []
        self.readers: dict[str, tuple[int, int]] = {}  # stream -> descriptor, size at the start
        self.step_file: int | None = None

    def run(self) -> bool:
        """Returns whether the exit record was written."""
        problem: dict[str, Any] | None = None
        try:
            self.start()
        except NotStarted as error:
            problem = error.fields
        except OSError as error:
            problem = {"code": child.CANNOT_START, "message": f"cannot start the command: {child.why(error)}"}
            if error.errno in records.TRANSIENT:  # the machine's limits, not the command
                problem["start_timeout_s"] = 0.0
        if problem is not None:
            self.abandon()
            return self.record_exit({**problem, "message": problem["message"][:MESSAGE_LIMIT]}, {})
        status = self.wait()
        signalled = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGTERM, signal.SIGINT)
        self.end_leftovers(signalled)
        ending = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}
        try:
            tails = read_tails(self.readers) if status else {}
        except OSError:  # no process or descriptor is left: the exit record is more important than the tails
            tails = {}
        return self.record_exit(ending, tails)

    # Starting.

    def start(self) -> None:
        """Fork, prepare, record, exec. Raises NotStarted."""
        self.check_stop()
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        logs = self.own_logs()
        self.make_step_file()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()  # the runner must be its only holder: the child notices the runner's death by it
            child.become(self.order, logs, child.Channel(theirs))
        theirs.close()
        for fd in logs.values():
            os.close(fd)
        try:
            for report, fds in self.start_reports(ours):
                if "readers" in report:
                    readers = zip(report["readers"].items(), fds, strict=True)
                    self.readers = {name: (fd, size) for (name, size), fd in readers}
                    self.record_start()
                    ours.send(child.PERMISSION)
        except ConnectionError:  # the child was killed; `wait` returns the signal
            return
        finally:
            ours.close()

    def start_reports(self, end: _socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The reports of the child with their descriptors, until it has closed its end: it became the command, or it
        died. Raises NotStarted, also at the start-up deadline."""
        limit_s: float = self.order["start_timeout_s"]
        deadline_s, step = time.monotonic() + limit_s, "forking"
        poller = select.poll()
        poller.register(end.fileno(), select.POLLIN)
        while True:
            while not poller.poll(STOP_CHECK_S * 1000):
                self.check_stop()
                if time.monotonic() >= deadline_s:
                    message = f"it did not start within {limit_s:g} s: {step} did not finish"
                    raise NotStarted(code=child.CANNOT_START, start_timeout_s=limit_s, message=message)
            data, control, _, _ = end.recvmsg(_REPORT_BYTES, 64)
            if not data:
                return
            report: dict[str, Any] = json.loads(data)
            if "error" in report:
                raise NotStarted(code=report["code"], message=report["error"])
            step = report.get("step", step)
            packed = b"".join(part for level, _, part in control if level == _socket.SOL_SOCKET)
            yield report, [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]

    def check_stop(self) -> None:
        stop = records.read(self.path + records.STOP)
        if stop is not None:
            raise NotStarted(signal=stop["signal"], message="stopped before it started")

    def own_logs(self) -> dict[str, int]:
        """Log files by stream, in a directory that only the daemon's user can change. If the submitter named
        a file, the child opens it with the submitter's rights. The files belong to the submitter while the command
        runs, so that it can open /dev/stdout; the runner has them open until they are sealed, so that the submitter
        can take no lease on them, which would block the daemon."""
        logs: dict[str, int] = {}
        identity = self.order.get("identity")
        for stream in child.STREAMS:
            if self.order[stream] is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_WAIT
                path = self.path + records.LOGS[stream]
                logs[stream] = os.open(path, flags, 0o600)
                os.set_blocking(logs[stream], True)  # the command has it as its standard output
                self.limits.append(OutputLimit(path, self.order["max_output_bytes"]))
                if identity is not None:
                    os.fchown(logs[stream], identity["uid"], identity["gid"])
        return logs

    def make_step_file(self) -> None:
        """Make the file in which the task counts its steps. Only the task's user can open it, and only the daemon's
        user can replace it. If it cannot be made, the task runs without it."""
        if not self.order.get("count_steps"):
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | NO_WAIT  # it may exist from a runner that died
            fd = os.open(self.path + records.STEPS, flags, 0o600)
            identity = self.order.get("identity")
            if identity is not None:
                os.fchown(fd, identity["uid"], identity["gid"])
            self.step_file = fd
        except OSError:
            return

    def record_start(self) -> None:
        """Called before the permission to execute: every command that runs is on record. The request to stop is looked
        for after that; ProcessLauncher.signal writes it before it looks for this record. One of the two sees the
        other."""
        record = {
            "pid": self.pid,
            "start_ticks": start_ticks(self.pid),
            "runner": own_identity(),
            "started_at": time.time(),
            "token": self.order["token"],
        }
        if not records.write_patiently(self.path + records.STARTED, record, RECORD_START_LIMIT_S):
            message = "cannot record that the task starts: is the disk full?"
            raise NotStarted(code=child.CANNOT_START, message=message)
        self.check_stop()

    def abandon(self) -> None:
        """Kill the process of a command that was not started. A process that is stuck in a file system is left behind:
        it holds no GPU memory, and the signal ends it as soon as the file system answers."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # our own child, not reaped yet: no other process can have its pid
            self.wait(REAP_S)

    # Running.

    def wait(self, limit_s: float = float("inf")) -> int:
        """The wait status of the command; 0 after `limit_s`. Orphans of its tree that end meanwhile are reaped."""
        deadline_s = time.monotonic() + limit_s
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self.pid:
                return status
            if pid:
                continue
            if time.monotonic() >= deadline_s:
                return 0
            signal.sigtimedwait([signal.SIGCHLD], min(self.shorten_logs(), limit_s))

    def shorten_logs(self) -> float:
        """Also the step file. Returns the seconds until the next check of their size."""
        for limit in self.limits:
            try:
                limit.shorten()
            except OSError:  # a full disk: retried at the next check
                continue
        if self.step_file is not None:
            cut(self.step_file, step_file.LIMIT_BYTES)
        elif not any(limit.limit_bytes for limit in self.limits):
            return 3600.0
        return FAST_SIZE_CHECK_S if any(limit.grows_fast for limit in self.limits) else SIZE_CHECK_S

    # Ending.

    def seal_logs(self) -> None:
        """Before the end is on record: the daemon then opens no file of the submitter."""
        for limit in self.limits:
            try:
                limit.seal()
            except OSError:  # a full disk; the daemon repeats it
                continue

    def end_leftovers(self, signalled: bool) -> None:
        """End processes that outlive their command: they hold GPU memory that no booking covers. They get the grace
        period, then SIGKILL.

        `signalled`: the command was ended by a SIGTERM that went to the whole tree. A second SIGTERM could interrupt
        the clean-up of the others.
        """
        grace_end_s = time.monotonic() + self.order["grace_s"]
        give_up_s = grace_end_s + KILL_LIMIT_S
        done: set[int] = set()
        while time.monotonic() < give_up_s:
            try:
                left = leftovers()
            except OSError:  # too many open files on the machine: retried
                time.sleep(PAUSE_S)
                continue
            if not left:
                return
            overdue = time.monotonic() >= grace_end_s
            for one in left:
                if overdue:
                    procfs.send(one.pid, one.start_ticks, signal.SIGKILL)
                elif not signalled and one.pid not in done:
                    done.add(one.pid)
                    procfs.send(one.pid, one.start_ticks, signal.SIGTERM)
                    procfs.send(one.pid, one.start_ticks, signal.SIGCONT)  # it may be paused
            time.sleep(PAUSE_S)

    def record_exit(self, ending: dict[str, Any], tails: dict[str, str]) -> bool:
        self.seal_logs()
        before, after = self.oom_kills_before, oom_kills()
        record: dict[str, Any] = {
            "ended_at": time.time(),
            "oom_kills": after - before if after is not None and before is not None else None,
            **ending,
        }
        if tails and records.write_patiently(self.path + records.EXIT, {**record, **tails}, 0.0):
            return True
        return records.write_patiently(self.path + records.EXIT, record, EXIT_LIMIT_S)


def leftovers() -> list[procfs.Process]:
    """Living processes of the tree. Orphans become children of this process (subreaper): without a child none is
    left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    table = procfs.processes()
    found = procfs.rooted(table, [os.getpid()])
    return [table[pid] for pid in found if pid != os.getpid() and not table[pid].ended]
