"""The process that becomes the command: cgroup, user namespace, limits, identity, outputs, then exec.

Runs between fork and exec. No shell takes part: arguments arrive as they were given.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from carma.trial.box import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CANNOT_START = 126
NICENESS = 10
# RLIMIT_NPROC is above the limit: the kernel does not report that it refused a fork, so the supervisor or the cgroup
# must observe that the limit is exceeded.
_RLIMIT_FACTOR, _RLIMIT_EXTRA = 1.25, 16
_PER_NAMESPACE = (5, 14)  # from this kernel on RLIMIT_NPROC counts the processes of a user in one user namespace


class Channels:
    """Descriptors between the process of the command and the supervisor."""

    def __init__(self, sysctl: int) -> None:
        """`sysctl`: /proc/sys as it is before it becomes read-only."""
        self.output, self.error, self.problem = os.pipe(), os.pipe(), os.pipe()
        self.namespace, self.mapped = os.pipe(), os.pipe()
        self.sysctl = sysctl


def become(order: dict[str, Any], channels: Channels) -> NoReturn:
    """Never returns. `channels.problem` closes at exec; if the command cannot start, the reason is written there."""
    try:
        os.setsid()
        restore_signals()
        nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((nothing, 0), (channels.output[1], 1), (channels.error[1], 2)):
            os.dup2(source, target, inheritable=True)
        lower_priority(order)
        own_namespace = order["own_users"] or make_user_namespace(channels)
        limit(order, own_namespace, channels.sysctl)
        take_identity(order)
        os.umask(order["umask"])
        sentence = enter(order["directory"]) or execute(order["command"], order["environment"])
    except BaseException as error:
        sentence = f"cannot start the command: {why(error)}"
    os.write(channels.problem[1], sentence.encode("utf-8", "replace"))
    os._exit(CANNOT_START)


def lower_priority(order: dict[str, Any]) -> None:
    """Joins the cgroup. Gets the lowest CPU priority, and is the first to be killed when memory runs out."""
    for fd in order["join"]:
        os.write(fd, b"0")
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # some containers forbid it
        file.write("1000")


def make_user_namespace(channels: Channels) -> bool:
    """Makes, in a sandbox that root makes, a user namespace with the same ids, which the supervisor writes. False where
    the kernel allows none; the command cannot make one either then."""
    try:
        kernel.unshare(kernel.NEWUSER)
    except OSError:
        os.write(channels.namespace[1], b"n")
        return False
    os.write(channels.namespace[1], b"y")
    if os.read(channels.mapped[0], 1) != b"y":
        raise OSError("no ids in the user namespace")
    return True


def limit(order: dict[str, Any], own_namespace: bool, sysctl: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not own_namespace:
        return
    fd = os.open("user/max_user_namespaces", os.O_WRONLY | os.O_CLOEXEC, dir_fd=sysctl)
    os.write(fd, b"0")  # of this user namespace: none below it
    os.close(fd)
    if kernel_version() >= _PER_NAMESPACE:
        count = int(order["limits"]["processes"] * _RLIMIT_FACTOR) + _RLIMIT_EXTRA
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        count = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (count, count))


def kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)


def enter(directory: str) -> str:
    try:
        os.chdir(directory)
    except (OSError, ValueError) as error:
        return f"cannot enter the working directory {directory}: {why(error)}"
    return ""


def restore_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):  # Python changes these
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def take_identity(order: dict[str, Any]) -> None:
    if order["identity"] is not None:
        os.setgroups(order["identity"]["groups"])
        os.setgid(order["gid"])
        os.setuid(order["uid"])
        kernel.leave_keyring()
    kernel.give_up_privileges(root=order["uid"] == 0)


def execute(words: list[str], environment: dict[str, str]) -> str:
    """Returns only if nothing can be executed. Not os.execvpe, which would import a module here."""
    program = words[0]
    sentence = f"{program} was not found" + ("" if "/" in program else " in PATH")
    folders = [""] if "/" in program else environment.get("PATH", os.defpath).split(":")
    for candidate in (os.path.join(folder, program) for folder in folders):
        try:
            os.execve(candidate, words, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            sentence = f"cannot start {candidate}: {why(error)}"
    return sentence


def why(error: BaseException) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
