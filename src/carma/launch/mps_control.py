"""Runs `nvidia-cuda-mps-control`: starts a control daemon, makes it start its server, queries it, makes it quit.

Every wait for the program has a limit. A process that a file of the directory names is checked with the kernel: the
directory is the user's, and the CARMA daemon may be root. The compute mode of no card is changed: MPS works in the
default mode. The server does not get CUDA_VISIBLE_DEVICES, so it has every GPU, and clients name theirs by UUID.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from carma import procfs
from carma.core.model.values import Owner
from carma.launch.command_process import leave_keyring

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PIPE_VARIABLE, LOG_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
LOG_DIRECTORY = "log"
# All other calls of the launcher, stops included, wait meanwhile. Measured: `-d` returns at once, and a server runs
# within a second; it takes longer with many cards.
START_LIMIT_S = 10.0  # for the control daemon
SERVER_LIMIT_S = 10.0  # for its server
QUERY_LIMIT_S = 5.0
LAST_QUERY_S = 0.2  # for a last query when the limit is nearly reached
PAUSE_S = 0.05
SOCKET_PATH_BYTES = 107  # limit of the kernel
_LONGEST_SOCKET = "control_privileged"
# Debian installs the server in /usr/sbin, which is not in the PATH of users. The control daemon could not start it.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MpsFailed(Exception):
    """MPS cannot be used; the text is a phrase for users."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process by pid and start time: pids are reused."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return procfs.alive(self.pid, self.start_ticks)


class Control:
    """The control daemon of one user in one directory, which is also its pipe directory."""

    def __init__(self, directory: str, owner: Owner, program: str) -> None:
        self.directory = directory
        self.owner = owner
        self.program = program

    def client_variables(self) -> dict[str, str]:
        return {PIPE_VARIABLE: self.directory, LOG_VARIABLE: os.path.join(self.directory, LOG_DIRECTORY)}

    def start(self) -> ProcessIdentity:
        """A new control daemon. Raises MpsFailed."""
        self._make_directory()
        deadline_s = time.monotonic() + START_LIMIT_S
        code, output = self._run(["-d"], "", START_LIMIT_S)
        if code is None:
            raise MpsFailed(f"{CONTROL} -d did not return within {START_LIMIT_S:g} s")
        if code != 0:
            raise MpsFailed(f"{CONTROL} -d ended with exit code {code}{_quoted(output)}")
        found = _until(self.find, deadline_s)
        if found is None:
            raise MpsFailed(f"{CONTROL} -d returned, but no control daemon runs{_quoted(output or self._last_log())}")
        return found

    def _make_directory(self) -> None:
        if len(os.fsencode(os.path.join(self.directory, _LONGEST_SOCKET))) > SOCKET_PATH_BYTES:
            raise MpsFailed(f"the path of its directory is too long for a Unix socket: {self.directory}")
        logs = os.path.join(self.directory, LOG_DIRECTORY)
        try:
            os.mkdir(self.directory, 0o700)
            os.mkdir(logs, 0o700)
            if self.owner.uid != os.geteuid():
                os.chown(logs, self.owner.uid, self.owner.gid)
                os.chown(self.directory, self.owner.uid, self.owner.gid)
        except OSError as error:
            raise MpsFailed(f"cannot make {self.directory}: {error.strerror}") from error

    def start_server(self) -> ProcessIdentity:
        """Start a server before the first client needs it: a control daemon whose servers cannot start appears to work,
        and every client of it fails. Raises MpsFailed."""
        deadline_s = time.monotonic() + SERVER_LIMIT_S
        code, output = self._run([], f"start_server -uid {self.owner.uid}\n", SERVER_LIMIT_S)
        if code is None:
            raise MpsFailed(f"the control daemon did not answer within {SERVER_LIMIT_S:g} s")
        found = _until(lambda: self._ready_server(deadline_s), deadline_s)
        if found is None:
            raise MpsFailed(f"no MPS server could be started{_quoted(output or self._last_log())}")
        return found

    def _ready_server(self, deadline_s: float) -> ProcessIdentity | None:
        """One that the control daemon lists, that runs, and that is ready. Older control daemons do not know the query
        for its status; then a running server suffices."""
        for word in self._query("get_server_list\n", deadline_s).split():
            server = self._identify(word, SERVER)
            if server is not None:
                status = self._query(f"get_server_status {server.pid}\n", deadline_s).upper().split()
                if server.alive and not {"INITIALIZING", "FAULT"} & set(status):
                    return server
        return None

    def terminate_clients(self, server: ProcessIdentity, pids: Collection[int], limit_s: float) -> None:
        """End the outstanding work of those of the processes that are clients of the server. Raises MpsFailed."""
        deadline_s = time.monotonic() + limit_s
        clients = self._query(f"get_client_list {server.pid}\n", deadline_s).split()
        commands = "".join(f"terminate_client {server.pid} {pid}\n" for pid in sorted(pids) if str(pid) in clients)
        if commands and time.monotonic() < deadline_s:
            self._query(commands, deadline_s)

    def _query(self, command: str, deadline_s: float) -> str:
        left_s = max(LAST_QUERY_S, deadline_s - time.monotonic())
        return self._run([], command, min(QUERY_LIMIT_S, left_s))[1]

    def find(self) -> ProcessIdentity | None:
        """The process that the pid file names, if it is a living control daemon of this user."""
        return self._identify(read_foreign(self.directory, f"{CONTROL}.pid", self.owner.uid).strip(), CONTROL)

    def children(self, control: ProcessIdentity) -> tuple[ProcessIdentity, ...]:
        """Servers of the control daemon, found among all processes."""
        pids = (one.pid for one in procfs.processes().values() if one.parent == control.pid and not one.ended)
        found = (self._identify(str(pid), SERVER) for pid in pids)
        return tuple(one for one in found if one is not None)

    def _identify(self, pid: str, name: str) -> ProcessIdentity | None:
        """The living process of this user with that pid and that program's name."""
        one = procfs.process(int(pid)) if pid.isascii() and pid.isdigit() else None
        if one is None or one.ended or real_uid(one.pid) != self.owner.uid or not runs(one.pid, name):
            return None
        return ProcessIdentity(one.pid, one.start_ticks)

    def begin_quit(self) -> subprocess.Popen[bytes] | None:
        """Send `quit` and do not wait; None if the program cannot be started."""
        try:
            return self._popen([], "quit\n", subprocess.DEVNULL)
        except OSError:
            return None

    def _run(self, arguments: Iterable[str], commands: str, limit_s: float) -> tuple[int | None, str]:
        """The exit code (None: it did not end in time) and the output. Raises MpsFailed if it cannot start.

        Through files, not pipes: a process that it leaves in the background may hold pipes open for ever.
        """
        with tempfile.TemporaryFile() as output:
            try:
                process = self._popen(arguments, commands, output.fileno())
            except OSError as error:
                raise MpsFailed(f"cannot start {self.program}: {error.strerror}") from error
            code = _wait(process, limit_s)
            output.seek(0)
            return code, output.read(4096).decode("utf-8", "replace").strip()

    def _popen(self, arguments: Iterable[str], commands: str, stdout: int) -> subprocess.Popen[bytes]:
        other = self.owner.uid != os.geteuid()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(commands.encode())
            stdin.seek(0)
            return subprocess.Popen(
                [self.program, *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**server_environment(os.environ), **self.client_variables()},
                start_new_session=True,
                user=self.owner.uid if other else None,
                group=self.owner.gid if other else None,
                extra_groups=_groups_of(self.owner) if other else None,
                preexec_fn=leave_keyring if other else None,
            )

    def _last_log(self) -> str:
        return read_foreign(os.path.join(self.directory, LOG_DIRECTORY), "control.log", self.owner.uid)


def server_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The variables that MPS needs and no others: the user can read its environment, and the daemon's may be root's."""
    kept = {name: own[name] for name in ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ") if name in own}
    return {**kept, "PATH": f"{own['PATH']}:{_SYSTEM_PATH}" if own.get("PATH") else _SYSTEM_PATH}


def find_program(own: Mapping[str, str]) -> str | None:
    return shutil.which(CONTROL, path=server_environment(own)["PATH"])


def _groups_of(owner: Owner) -> list[int]:
    """All groups of the user: device files may be accessible to a group only."""
    try:
        return os.getgrouplist(owner.name, owner.gid)
    except (OSError, KeyError):
        return [owner.gid]


def _until(search: Callable[[], ProcessIdentity | None], deadline_s: float) -> ProcessIdentity | None:
    while (found := search()) is None and time.monotonic() <= deadline_s:
        time.sleep(PAUSE_S)
    return found


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel is left behind
            process.wait(1.0)
        return None


def read_foreign(folder: str, name: str, uid: int) -> str:
    """The end of a file that a user wrote into a directory of that user. Links (also in place of the directory), pipes
    and files of other users are not read."""
    try:
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
                return ""
            return os.pread(fd, 4096, max(0, status.st_size - 4096)).decode("utf-8", "replace")
        finally:
            os.close(fd)
    except OSError:
        return ""


def real_uid(pid: int) -> int | None:
    uids = procfs.status_field(pid, b"Uid")
    return int(uids[0]) if uids else None


def runs(pid: int, name: str) -> bool:
    """Whether the process runs a program of that name, by its command line: the kernel's own name is cut at 15 letters,
    where the two programs are equal. The name of a script is the second word."""
    words = procfs.read_bytes(f"/proc/{pid}/cmdline", 4096).split(b"\0")[:2]
    return any(os.path.basename(word) == name.encode() for word in words)


def _quoted(output: str) -> str:
    line = output.strip().rpartition("\n")[2]
    return f': "{line[:200]}"' if line else ""
