"""The second half of the sandbox: builds the file system, starts the command, checks limits, reports how it ended.

1. `be_first` is pid 1 of the sandbox. It only waits. When it is killed, the kernel kills all processes of the sandbox.
2. `Supervisor` is outside of the pid namespace: the command can neither see, signal nor trace it. It ends the run when
   the awaited file exists, when the command has ended, at a limit, and when the caller has gone.
3. `report` writes lines to the caller: what the sandbox waits for while it is built, the pid of pid 1, how it ended.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import signal
import time

from carma.cgroups import Cgroup
from carma.trial.box import command, kernel, results, usage
from carma.trial.box import special_directories as special
from carma.trial.box.filesystem import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PAUSE_S = 0.05  # between two checks of limits and results
READ_PAUSE_S = 0.002  # between two reads of the outputs, so that endless output does not use all CPU time
COUNT_SHARE = 0.1  # maximum share of the time for counting processes and memory
TAIL_BYTES = 16 * 1024  # of each of the two outputs
END_LIMIT_S = 2.0  # for the processes of the box to be gone after SIGKILL
_RUN_BYTES = 640 * 2**20  # more than the limits of all results together
_CHUNK = 1 << 16
_RESET_ON_FORK = 0x40000000  # sched_setscheduler(2): children get the usual priority
_NOT_ALLOWED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def report(fd: int, **message: Any) -> None:
    """One JSON object for each line.

    `at`: what the sandbox waits for from now on, a path or a phrase; empty: the command runs. `first`: pid 1 of the
    sandbox. `ended`: the last message.
    """
    data = json.dumps(message).encode("ascii") + b"\n"
    with contextlib.suppress(OSError):  # the caller has gone
        while data:
            data = data[os.write(fd, data) :]


def run(order: dict[str, Any]) -> None:
    try:
        ended = Supervisor(order).run()
    except OSError as error:
        how = "refused" if error.errno in _NOT_ALLOWED else "failed"
        ended = {"ended": how, "why": error.strerror or str(error)}
    except BaseException as error:
        ended = {"ended": "failed", "why": repr(error)}
    report(order["status_fd"], **ended)


class Supervisor:
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._status_fd: int = order["status_fd"]
        self._limits = order["limits"]
        self._memory_bytes = self._limits["memory_mib"] * kernel.MIB
        self._cgroup = Cgroup(order["cgroup"])
        self._tails: dict[int, bytearray] = {}
        self._exit: int | None = None  # status of waitpid
        self._next_count = 0.0

    def run(self) -> dict[str, Any]:
        tree = Tree(self._order, functools.partial(report, self._status_fd))
        self._build(tree)
        self._wake = wake_on_child()
        try:
            self._start()
            take_priority()
            ended = self._wait()
        finally:
            self._end()
        self._drain()
        self._keep_files(tree)
        output, error = (bytes(tail).decode("utf-8", "replace") for tail in self._tails.values())
        counts = ended["ended"] in ("awaited", "exit")  # otherwise no file is read
        files = self._order["files"].items() if counts else ()
        return {
            **ended,
            "stdout": output,
            "stderr": error,
            "notes": {name: results.read_note(self._out, name) for name in self._order["notes"]},
            "files": {name: results.copy_out(self._out, name, *entry) for name, entry in files},
            "read_only": tree.read_only,
            "unanswered": self._order["unanswered"],
        }

    def _build(self, tree: Tree) -> None:
        self._host_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        tree.build()
        special.empty_run(tree, _RUN_BYTES)
        self._host_keep = special.make_own(tree, self._order)
        special.make_devices(tree, self._memory_bytes)
        special.make_sys(tree)
        self._first = start_first(tree)
        report(self._status_fd, first=self._first)
        self._sysctl = special.protect_proc(tree)
        changes = tree.enter()
        kernel.die_with_parent(signal.SIGKILL)  # acting as another user on files had cleared it
        stores = [kernel.open_folder(path) for path in ("/dev/shm", "/run", special.KEEP)]
        self._keep = stores[-1]
        self._meter = usage.UsageMeter([changes, *stores])
        self._out = kernel.open_folder(special.OUT)

    def _start(self) -> None:
        channels = command.Channels(self._sysctl)
        self._child = os.fork()
        if self._child == 0:
            command.become(self._order, channels)
        os.close(channels.namespace[1])
        if os.read(channels.namespace[0], 1) == b"y":
            self._map_ids()
            os.write(channels.mapped[1], b"y")
        os.close(channels.problem[1])
        # Exec may have to read the program from a drive that hangs.
        report(self._status_fd, at=f"{self._order['directory']} or {self._order['command'][0]}")
        self._problem = os.read(channels.problem[0], _CHUNK).decode("utf-8", "replace")
        for reading, writing in (channels.output, channels.error):
            os.close(writing)
            os.set_blocking(reading, False)
            self._tails[reading] = bytearray()
        report(self._status_fd, at="")

    def _map_ids(self) -> None:
        """The same ids as outside of the command's user namespace."""
        for name in ("uid_map", "gid_map"):
            own = os.open(f"self/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._host_proc)
            with open(own, encoding="ascii") as file:
                lines = [f"{start} {start} {count}" for start, _, count in (line.split() for line in file)]
            fd = os.open(f"{self._child}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._host_proc)
            os.write(fd, "\n".join(lines).encode("ascii"))
            os.close(fd)

    def _wait(self) -> dict[str, Any]:
        poller = select.poll()
        for fd in (0, self._wake, *self._tails):
            poller.register(fd, select.POLLIN)
        next_check = 0.0
        while True:
            ready = [fd for fd, _ in poller.poll(PAUSE_S * 1000)]
            if 0 in ready:
                return {"ended": "abandoned"}
            for fd in ready:
                if not self._take(fd) and fd in self._tails:
                    poller.unregister(fd)  # closed by all processes that had it
            if ready:
                time.sleep(READ_PAUSE_S)
            self._reap()
            now = time.monotonic()
            if now < next_check and self._exit is None:
                continue
            ended = self._check(self._order["deadline"] - now)
            if ended is not None:
                return ended
            next_check = now + PAUSE_S

    def _check(self, left_s: float) -> dict[str, Any] | None:
        if results.starts_with(self._out, *self._order["awaited"]):
            return {"ended": "awaited"}
        if self._problem:
            return {"ended": "not_started", "why": self._problem}
        limit = self._limit_met()
        if limit:
            return {"ended": limit, "why": self._doubt() if limit == "memory" else ""}
        if self._exit is not None:
            return {"ended": "exit", "code": os.waitstatus_to_exitcode(self._exit)}
        return {"ended": "time"} if left_s <= 0 else None

    def _limit_met(self) -> str:
        """`memory`, `processes` or "". Also checked when the command has ended: the limit may be the reason."""
        if self._cgroup.oom_kills():
            return "memory"
        if self._cgroup.pids_refused():
            return "processes"
        return "" if self._order["limited_by_kernel"] else self._count()

    def _doubt(self) -> str:
        mib = self._meter.unattributed_bytes >> 20
        return f"{mib} MiB of it may be shared memory of other programs of the machine" if mib else ""

    def _count(self) -> str:
        began = time.monotonic()
        if began < self._next_count and self._exit is None:
            return ""
        limit = self._meter.exceeded(self._limits["processes"], self._memory_bytes)
        now = time.monotonic()
        self._next_count = now + (now - began) / COUNT_SHARE
        return limit

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid != 0:
                self._exit = status

    def _take(self, fd: int) -> bool:
        """Reads one piece, so that endless output does not delay the checks."""
        try:
            piece = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if fd in self._tails:
            tail = self._tails[fd]
            tail += piece
            del tail[:-TAIL_BYTES]
        return bool(piece)

    def _end(self) -> None:
        """Kills pid 1: from then on nothing in the sandbox can fork. Its end waits for all other processes."""
        os.kill(self._first, signal.SIGKILL)
        deadline = time.monotonic() + END_LIMIT_S
        while time.monotonic() < deadline:
            self._reap()
            if os.waitpid(self._first, os.WNOHANG)[0]:
                return
            time.sleep(0.001)

    def _drain(self) -> None:
        """Reads what is left in the pipes; no process writes any more."""
        for fd in self._tails:
            for _ in range(64):
                if not self._take(fd):
                    break

    def _keep_files(self, tree: Tree) -> None:
        if self._host_keep is not None:
            with contextlib.suppress(OSError), tree.as_owner():  # a full disk: it is compiled again next time
                results.copy_kept(self._keep, self._host_keep, self._limits["keep_mib"] * kernel.MIB)


def start_first(tree: Tree) -> int:
    """Forks pid 1 of the sandbox. It mounts /proc, which shows the pid namespace of the process that mounts it."""
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        be_first(tree, writing)
    os.close(writing)
    problem = os.read(reading, _CHUNK)
    os.close(reading)
    if problem:
        number, _, text = problem.decode("utf-8", "replace").partition(" ")
        raise OSError(int(number), text)
    return first


def be_first(tree: Tree, problem: int) -> NoReturn:
    """Never returns. Orphans become children of pid 1; because it ignores SIGCHLD, the kernel reaps them."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        kernel.hide_from_ptrace()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        special.mount_proc(tree)
        take_priority()  # so that it ends as soon as it is killed
        os.closerange(0, 1 << 16)
        while True:
            signal.pause()
    except BaseException as error:
        number = getattr(error, "errno", None) or 0
        os.write(problem, f"{number} {command.why(error)}".encode())
    finally:
        os._exit(1)


def take_priority() -> None:
    """Gets a priority above the processes of the command, which may be many and each in its own scheduling group
    (sched(7), autogroup). Needs root; another user's supervisor has the usual priority and the processes of the command
    a lower one."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | _RESET_ON_FORK, os.sched_param(1))


def wake_on_child() -> int:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading
