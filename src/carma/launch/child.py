"""The side of the runner that becomes the user's command: identity, directory, logs, then exec.

Runs between fork and exec. It reports on a pipe that it is ready, waits for the word to go, and execs; a runner that
dies before giving the word takes the command with it, so that what was not recorded as started never ran. Nothing goes
through a shell: arguments arrive as they were given. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import signal
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CANNOT_START, NOT_FOUND = 126, 127  # as shells have it
_NO_WAIT = os.O_NONBLOCK  # a named pipe without a reader must be an error and not a wait


class CannotStart(Exception):
    """The sentence for the user, and the exit code."""

    def __init__(self, message: str, code: int = CANNOT_START) -> None:
        super().__init__(message)
        self.code = code


def become(order: dict[str, Any], own_logs: tuple[int | None, int | None], status_fd: int, go_fd: int) -> NoReturn:
    """Never returns: the process is the command afterwards, or gone."""
    try:
        files = prepare(order, own_logs)
        tell(status_fd, {"logs": files})
        if os.read(go_fd, 1) != b"g":
            os._exit(0)  # nobody stands over it: it must not start
        execute(order)
    except CannotStart as problem:
        tell(status_fd, {"error": str(problem), "code": problem.code})
    except BaseException as problem:
        tell(status_fd, {"error": f"cannot start the command: {problem!r}", "code": CANNOT_START})
    os._exit(CANNOT_START)


def tell(fd: int, report: dict[str, Any]) -> None:
    try:
        os.write(fd, json.dumps(report).encode("ascii") + b"\n")
    except OSError:
        os._exit(CANNOT_START)  # the runner is gone


def prepare(order: dict[str, Any], own_logs: tuple[int | None, int | None]) -> list[list[int]]:
    """Everything before exec, as the submitter. Returns device, inode and size of the two log files."""
    os.setsid()
    restore_signals()
    be_killable()
    take_identity(order)
    os.umask(order["umask"])
    try:
        os.chdir(order["directory"])
    except (OSError, ValueError) as error:
        raise CannotStart(f"cannot enter the working directory {order['directory']}: {why(error)}") from error
    stdout = own_logs[0] if own_logs[0] is not None else open_log(order["stdout"], "output")
    if own_logs[1] is not None:
        stderr = own_logs[1]
    elif order["stderr"] == order["stdout"]:
        stderr = stdout  # one description, so that the two do not overwrite each other
    else:
        stderr = open_log(order["stderr"], "error output")
    sizes = [identity_of(stdout), identity_of(stderr)]
    redirect(stdout, stderr)
    return sizes


def restore_signals() -> None:
    """What the runner ignores must not stay ignored in the command: dispositions survive exec."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):  # reserved by the C library
                continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def be_killable(path: str = "/proc/self/oom_score_adj") -> None:
    """A daemon that the kernel is to spare when memory runs out (OOMScoreAdjust in its unit) does not hand that down:
    it is the task that takes the memory."""
    try:
        with open(path) as file:
            spared = int(file.read()) < 0
        if spared:
            with open(path, "w") as file:
                file.write("0")
    except (OSError, ValueError):  # no such file, or a container that forbids it
        return


def take_identity(order: dict[str, Any]) -> None:
    """Become the submitter: groups, then group, then user. HOME and the names are that user's, not ours."""
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
    except OSError as error:
        raise CannotStart(f"cannot run as user {name} (uid {uid}): {why(error)}") from error
    order["environment"].update(HOME=home, USER=name, LOGNAME=name, SHELL=shell)


def open_log(path: str, what: str) -> int:
    """Opened as the submitter, so that nobody writes where they could not. Their links are followed, as anything that
    they start would; root's are not, which could lead it to write what somebody else chose. No directory is made."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | _NO_WAIT
    try:
        fd = os.open(path, flags | (os.O_NOFOLLOW if os.geteuid() == 0 else 0), 0o666)
    except (OSError, ValueError) as error:
        reason = why(error)
        if os.geteuid() == 0 and isinstance(error, OSError) and error.errno == errno.ELOOP:
            reason = "it is a symbolic link, which is not followed for root"
        raise CannotStart(f"cannot open {path} for {what}: {reason}") from error
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise CannotStart(f"cannot open {path} for {what}: it is a pipe")
    os.set_blocking(fd, True)
    return fd


def identity_of(fd: int) -> list[int]:
    """What the daemon may read back. Not a file that the submitter can write to and not read: root would read it out
    to them."""
    if not os.access(f"/proc/self/fd/{fd}", os.R_OK):
        return [0, 0, 0]
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino, status.st_size if stat.S_ISREG(status.st_mode) else 0]


def redirect(stdout: int, stderr: int) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target, inheritable=True)


def execute(order: dict[str, Any]) -> NoReturn:
    """Not os.execvpe: that one imports a module at this point, which the submitter may not be allowed to read."""
    command, environment = order["command"], order["environment"]
    if not command or not command[0]:
        raise CannotStart("cannot start an empty command")
    denied: OSError | None = None
    for candidate in candidates(command[0], environment):
        try:
            os.execve(candidate, command, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            denied = denied or error  # a file of that name further on in PATH may still do
        except (OSError, ValueError) as error:
            raise CannotStart(f"cannot start {command[0]}: {why(error)}") from error
    if denied is not None:
        raise CannotStart(f"cannot start {command[0]}: {why(denied)}") from denied
    raise CannotStart(missing(command[0], environment), NOT_FOUND)


def candidates(program: str, environment: dict[str, str]) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(folder, program) for folder in environment.get("PATH", os.defpath).split(":")]


def missing(program: str, environment: dict[str, str]) -> str:
    if "/" in program and os.path.exists(program):
        return f"cannot start {program}: the interpreter in its first line does not exist"
    if "/" in program:
        return f"cannot start {program}: there is no such file"
    return f"cannot start {program}: not found in PATH ({environment.get('PATH', 'not set')})"


def why(error: BaseException) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
