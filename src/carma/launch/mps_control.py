"""Talking to `nvidia-cuda-mps-control`: start a control daemon, make it start its server, ask it, tell it to quit.

Nothing here waits for the program without a limit, and nothing believes what lies in the directory without asking the
kernel: the directory is the user's, the daemon may be root. No card's compute mode is touched: MPS works in the default
one. CUDA_VISIBLE_DEVICES is kept from the server, so that it has every GPU and clients name theirs by UUID.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping

import msgspec

from carma.core.model.values import Owner
from carma.launch import procfs
from carma.launch.child import leave_keyring

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PIPE_VARIABLE, LOG_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
LOG_DIRECTORY = "log"
# Everything else that the launcher is asked waits meanwhile, stops too. Measured: `-d` returns at once, and a server is
# there within a second; it takes longer where there are many cards.
START_LIMIT_S = 10.0  # for the control daemon, all in all
SERVER_LIMIT_S = 10.0  # for its server
ASK_LIMIT_S = 5.0
LEAST_S = 0.2  # for a last question when the time is nearly over
PAUSE_S = 0.05
SOCKET_PATH_BYTES = 107  # of the kernel
_LONGEST_SOCKET = "control_privileged"
# Debian has the server in /usr/sbin and keeps that from users' PATH; the control daemon then starts servers in vain.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MpsFailed(Exception):
    """MPS cannot be had; the text is a phrase for people."""


class Identity(msgspec.Struct, frozen=True):
    """A process: a pid alone comes back for another one."""

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

    def start(self) -> Identity:
        """The new control daemon, which answers; raises MpsFailed."""
        self._make_directory()
        deadline_s = time.monotonic() + START_LIMIT_S
        code, said = self._run(["-d"], "", START_LIMIT_S)
        if code is None:
            raise MpsFailed(f"{CONTROL} -d did not return within {START_LIMIT_S:g} s")
        if code != 0:
            raise MpsFailed(f"{CONTROL} -d ended with exit code {code}{_quoted(said)}")
        while (found := self.find()) is None:
            if time.monotonic() > deadline_s:
                raise MpsFailed(f"{CONTROL} -d returned, but no control daemon runs{_quoted(said or self._last_log())}")
            time.sleep(PAUSE_S)
        return found

    def _make_directory(self) -> None:
        if len(os.fsencode(os.path.join(self.directory, _LONGEST_SOCKET))) > SOCKET_PATH_BYTES:
            raise MpsFailed(f"the path of its directory is too long for a Unix socket: {self.directory}")
        try:
            os.mkdir(self.directory, 0o700)
            os.mkdir(os.path.join(self.directory, LOG_DIRECTORY), 0o700)
            if self.owner.uid != os.geteuid():
                os.chown(os.path.join(self.directory, LOG_DIRECTORY), self.owner.uid, self.owner.gid)
                os.chown(self.directory, self.owner.uid, self.owner.gid)
        except OSError as error:
            raise MpsFailed(f"cannot make {self.directory}: {error.strerror}") from error

    def start_server(self) -> Identity:
        """A server before the first client wants one: a control daemon whose servers cannot start looks well, and every
        client of it fails."""
        deadline_s = time.monotonic() + SERVER_LIMIT_S
        code, said = self._run([], f"start_server -uid {self.owner.uid}\n", SERVER_LIMIT_S)
        if code is None:
            raise MpsFailed(f"the control daemon did not answer within {SERVER_LIMIT_S:g} s")
        while True:
            for server in self.listed_servers(deadline_s):
                if self._ready(server, deadline_s):
                    return server
            if time.monotonic() > deadline_s:
                raise MpsFailed(f"no MPS server could be started{_quoted(said or self._last_log())}")
            time.sleep(PAUSE_S)

    def listed_servers(self, deadline_s: float) -> tuple[Identity, ...]:
        """Those that the control daemon names and that really run."""
        said = self._ask("get_server_list\n", deadline_s)
        found = (self._identify(int(word), SERVER) for word in said.split() if word.isascii() and word.isdigit())
        return tuple(one for one in found if one is not None)

    def _ask(self, words: str, deadline_s: float) -> str:
        left_s = max(LEAST_S, deadline_s - time.monotonic())
        return self._run([], words, min(ASK_LIMIT_S, left_s))[1]

    def _ready(self, server: Identity, deadline_s: float) -> bool:
        """Older control daemons do not know the question; then a server that runs is good enough."""
        said = self._ask(f"get_server_status {server.pid}\n", deadline_s)
        return server.alive and not {"INITIALIZING", "FAULT"} & set(said.upper().split())

    def find(self) -> Identity | None:
        """The living control daemon that the pid file names, if it is one and this user's."""
        text = read_foreign(self.directory, f"{CONTROL}.pid", self.owner.uid).strip()
        return self._identify(int(text), CONTROL) if text.isascii() and text.isdigit() else None

    def children(self, control: Identity) -> tuple[Identity, ...]:
        """Its servers, by a look at all processes."""
        of_it = (one.pid for one in procfs.processes().values() if one.parent == control.pid and not one.ended)
        found = (self._identify(pid, SERVER) for pid in of_it)
        return tuple(one for one in found if one is not None)

    def _identify(self, pid: int, name: str) -> Identity | None:
        one = procfs.process(pid)
        if one is None or one.ended or real_uid(pid) != self.owner.uid or not runs(pid, name):
            return None
        return Identity(pid, one.start_ticks)

    def begin_quit(self) -> subprocess.Popen[bytes] | None:
        """Give the word and do not wait; None when not even the program can be started."""
        try:
            with tempfile.TemporaryFile() as words:
                words.write(b"quit\n")
                words.seek(0)
                return self._popen([], words.fileno(), subprocess.DEVNULL)
        except OSError:
            return None

    def _run(self, arguments: Iterable[str], words: str, limit_s: float) -> tuple[int | None, str]:
        """Exit code (None: it did not end in time, or could not start) and what it said.

        Through files, not pipes: what it leaves in the background may hold them open for ever.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(words.encode())
            given.seek(0)
            try:
                process = self._popen(arguments, given.fileno(), said.fileno())
            except OSError as error:
                raise MpsFailed(f"cannot start {self.program}: {error.strerror}") from error
            code = wait(process, limit_s)
            said.seek(0)
            return code, said.read(4096).decode("utf-8", "replace").strip()

    def _popen(self, arguments: Iterable[str], stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        other = self.owner.uid != os.geteuid()
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
            extra_groups=groups_of(self.owner) if other else None,
            preexec_fn=leave_keyring if other else None,
        )

    def _last_log(self) -> str:
        text = read_foreign(os.path.join(self.directory, LOG_DIRECTORY), "control.log", self.owner.uid)
        return text.strip().rpartition("\n")[2]


def server_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What MPS needs and no more: the user can read its environment, and ours may be root's."""
    kept = {name: ours[name] for name in ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ") if name in ours}
    return {**kept, "PATH": f"{ours['PATH']}:{_SYSTEM_PATH}" if ours.get("PATH") else _SYSTEM_PATH}


def find_program(ours: Mapping[str, str]) -> str | None:
    return shutil.which(CONTROL, path=server_environment(ours)["PATH"])


def groups_of(owner: Owner) -> list[int]:
    """Device files may be open to a group only."""
    try:
        return os.getgrouplist(owner.name, owner.gid)
    except (OSError, KeyError):
        return [owner.gid]


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is left behind
            process.wait(1.0)
        return None


def read_foreign(folder: str, name: str, uid: int) -> str:
    """The end of a file that a user wrote into a directory of the user's: no links (not in the place of the directory
    either), no pipes, no file of another user, not all of it."""
    try:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except OSError:
        return ""
    finally:
        os.close(place)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            return ""
        return os.pread(fd, 4096, max(0, status.st_size - 4096)).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def real_uid(pid: int) -> int | None:
    for line in procfs.read_bytes(f"/proc/{pid}/status", 4096).splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def runs(pid: int, name: str) -> bool:
    """By its command line, since the kernel's own name for it is cut at 15 letters, where the two are the same. A
    script's name stands second."""
    words = procfs.read_bytes(f"/proc/{pid}/cmdline", 4096).split(b"\0")[:2]
    return any(os.path.basename(word) == name.encode() for word in words)


def _quoted(said: str) -> str:
    line = said.strip().rpartition("\n")[2]
    return f': "{line[:200]}"' if line else ""
