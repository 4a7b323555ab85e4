"""The process that becomes the user's command: identity, directory, output files, then exec.

It runs between fork and exec. It reports each step that may take long, so that the runner can name the step at which a
start hangs. Then it reports that it is ready, waits for the runner's permission, and executes the command. If the
runner dies before it gives the permission, this process ends: a command that is not on record never ran.
Arguments are passed as they were given, never through a shell. Standard library only.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import json
import os
import pwd
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

CANNOT_START, NOT_FOUND = 126, 127  # as in shells
PERMISSION = b"g"  # from the runner: execute the command
STREAMS = ("stdout", "stderr")
_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}  # number of the system call
_JOIN_SESSION_KEYRING, _LINK, _USER_KEYRING, _SESSION_KEYRING = 1, 8, -4, -3
_OUTPUT_FLAGS = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
)  # O_NONBLOCK: a named pipe without a reader must be an error, not a wait


class CannotStart(Exception):
    """The message for the user, and the exit code."""

    def __init__(self, message: str, code: int = CANNOT_START) -> None:
        super().__init__(message)
        self.code = code


class Channel:
    """The child's end of the socket to the runner. One report is one message, with its descriptors."""

    def __init__(self, end: _socket.socket) -> None:
        self._end = end

    def report(self, report: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        packed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if packed else []
        try:
            self._end.sendmsg([json.dumps(report).encode("ascii")], rights)
        except OSError:
            os._exit(CANNOT_START)  # the runner has ended

    def wait_for_permission(self) -> None:
        if self._end.recv(1) != PERMISSION:
            os._exit(0)  # the runner has ended


def become(order: dict[str, Any], own_logs: dict[str, int], channel: Channel) -> NoReturn:
    """Never returns: afterwards the process is the command, or it has ended."""
    try:
        prepare(order, own_logs, channel)
        channel.wait_for_permission()
        execute(order)
    except CannotStart as problem:
        channel.report({"error": str(problem), "code": problem.code})
    except BaseException as problem:
        channel.report({"error": f"cannot start the command: {problem!r}", "code": CANNOT_START})
    os._exit(CANNOT_START)


def prepare(order: dict[str, Any], own_logs: dict[str, int], channel: Channel) -> None:
    """Everything before exec, as the submitter. The last report carries a descriptor to read each output file that the
    submitter named. It was opened with the submitter's rights: CARMA reads such a file through no other descriptor."""
    os.setsid()
    restore_signals()
    be_killable()
    channel.report({"step": "looking up the user's groups"})
    take_identity(order)
    os.umask(order["umask"])
    channel.report({"step": f"entering the working directory {order['directory']}"})
    try:
        os.chdir(order["directory"])
    except (OSError, ValueError) as error:
        raise CannotStart(f"cannot enter the working directory {order['directory']}: {why(error)}") from error
    stdout, stderr = open_outputs(order, own_logs, channel)
    named = [(name, fd) for name, fd in zip(STREAMS, (stdout, stderr), strict=True) if name not in own_logs]
    readers = {name: reader for name, fd in named if (reader := reader_of(fd)) is not None}
    sizes = {name: os.fstat(fd).st_size for name, fd in readers.items()}
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target, inheritable=True)
    channel.report({"step": "executing " + " ".join(order["command"][:1]), "readers": sizes}, list(readers.values()))


def open_outputs(order: dict[str, Any], own_logs: dict[str, int], channel: Channel) -> tuple[int, int]:
    stdout, stderr = map(own_logs.get, STREAMS)
    if stdout is None:
        channel.report({"step": f"opening {order['stdout']}"})
        stdout = open_log(order["stdout"], "output")
    if stderr is None and order["stderr"] == order["stdout"]:
        return stdout, stdout  # one open file description, so that the two streams do not overwrite each other
    if stderr is None:
        channel.report({"step": f"opening {order['stderr']}"})
        stderr = open_log(order["stderr"], "error output")
    return stdout, stderr


def restore_signals() -> None:
    """Signals that the runner ignores must not stay ignored in the command: dispositions survive exec."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):  # reserved by the C library
                continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def be_killable(path: str = "/proc/self/oom_score_adj") -> None:
    """Undo the daemon's protection from the kernel's OOM killer (OOMScoreAdjust in its unit): the task takes the
    memory, so the task is the one to kill."""
    try:
        with open(path) as file:
            protected = int(file.read()) < 0
        if protected:
            with open(path, "w") as file:
                file.write("0")
    except (OSError, ValueError):  # no such file, or a container that forbids it
        return


def take_identity(order: dict[str, Any]) -> None:
    """Become the submitter: groups, then group, then user. HOME and the names become those of that user."""
    identity = order.get("identity")
    if identity is None:
        return
    uid, gid, name = identity["uid"], identity["gid"], identity["name"]
    try:
        entry = pwd.getpwuid(uid)
        name, home, shell = entry.pw_name, entry.pw_dir, entry.pw_shell
    except KeyError:  # known to the kernel only, as in containers
        home, shell = "/", "/bin/sh"
    try:
        os.initgroups(name, gid)
        os.setgid(gid)
        os.setuid(uid)
        leave_keyring()
    except OSError as error:
        raise CannotStart(f"cannot run as user {name} (uid {uid}): {why(error)}") from error
    order["environment"].update(HOME=home, USER=name, LOGNAME=name, SHELL=shell)


def leave_keyring() -> None:
    """Join a new session keyring, linked to the user's own, as pam_keyinit(8) does at a login. Otherwise the tasks of
    all users would share the daemon's session keyring."""
    number = _KEYCTL.get(os.uname().machine)
    if number is not None:
        call = ctypes.CDLL(None).syscall
        call(number, _JOIN_SESSION_KEYRING, None)
        call(number, _LINK, _USER_KEYRING, _SESSION_KEYRING)


def open_log(path: str, what: str) -> int:
    """Open an output file with the submitter's rights. A user's symbolic links are followed; root's are not, because
    another user may have placed the link. No directory is created."""
    try:
        fd = os.open(path, _OUTPUT_FLAGS | (os.O_NOFOLLOW if os.geteuid() == 0 else 0), 0o666)
    except (OSError, ValueError) as error:
        reason = why(error)
        if os.geteuid() == 0 and isinstance(error, OSError) and error.errno == errno.ELOOP:
            reason = "it is a symbolic link, which is not followed for root"
        raise CannotStart(f"cannot open {path} for {what}: {reason}") from error
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise CannotStart(f"cannot open {path} for {what}: it is a pipe")
    os.set_blocking(fd, True)
    return fd


def reader_of(fd: int) -> int | None:
    """A descriptor that reads the file that `fd` writes; None if it is no regular file, or the submitter may not read
    it. It is opened through the descriptor, so it is the same file whatever the path leads to by now."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None


def execute(order: dict[str, Any]) -> NoReturn:
    """Replaces the process by the command. os.execvpe is not used: it imports a module at this point, which the
    submitter may not be allowed to read."""
    command, environment = order["command"], order["environment"]
    if not command or not command[0]:
        raise CannotStart("cannot start an empty command")
    program, denied = command[0], None
    folders = [""] if "/" in program else environment.get("PATH", os.defpath).split(":")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, program), command, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            denied = denied or error  # PATH may contain another, executable file of that name
        except (OSError, ValueError) as error:
            raise CannotStart(f"cannot start {program}: {why(error)}") from error
    if denied is not None:
        raise CannotStart(f"cannot start {program}: {why(denied)}") from denied
    raise CannotStart(missing(program, environment), NOT_FOUND)


def missing(program: str, environment: dict[str, str]) -> str:
    if "/" not in program:
        return f"cannot start {program}: not found in PATH ({environment.get('PATH', 'not set')})"
    if os.path.exists(program):
        return f"cannot start {program}: the interpreter in its first line does not exist"
    return f"cannot start {program}: there is no such file"


def why(error: BaseException) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
