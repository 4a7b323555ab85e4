"""The process that becomes the program: identity, directory, outputs, then exec. Between fork and exec.

Nothing goes through a shell: arguments arrive as they were given.
"""

from __future__ import annotations

import os
import resource
import signal

from carma.estimate.box import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CANNOT_START = 126


def become(order: dict[str, Any], output: int, error: int, problem: int) -> NoReturn:
    """Never returns. `problem` closes at exec; a sentence is written there when there is no program to start."""
    try:
        os.setsid()
        restore_signals()
        nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((nothing, 0), (output, 1), (error, 2)):
            os.dup2(source, target, inheritable=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        take_identity(order)
        os.umask(order["umask"])
        sentence = enter(order["directory"]) or execute(order["command"], order["environment"])
    except BaseException as error_met:
        sentence = f"cannot start the command: {why(error_met)}"
    os.write(problem, sentence.encode("utf-8", "replace"))
    os._exit(CANNOT_START)


def enter(directory: str) -> str:
    try:
        os.chdir(directory)
    except (OSError, ValueError) as error:
        return f"cannot enter the working directory {directory}: {why(error)}"
    return ""


def restore_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):  # those that Python changes
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def take_identity(order: dict[str, Any]) -> None:
    if order["identity"] is not None:
        os.setgroups(order["identity"]["groups"])
        os.setgid(order["gid"])
        os.setuid(order["uid"])
    kernel.give_up_privileges(root=order["uid"] == 0)


def execute(words: list[str], environment: dict[str, str]) -> str:
    """Returns only when there is nothing to execute. Not os.execvpe: that imports a module at this point."""
    program = words[0]
    sentence = f"{program} was not found" + ("" if "/" in program else " in PATH")
    for candidate in candidates(program, environment):
        try:
            os.execve(candidate, words, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            sentence = f"cannot start {candidate}: {why(error)}"
    return sentence


def candidates(program: str, environment: dict[str, str]) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(folder, program) for folder in environment.get("PATH", os.defpath).split(":")]


def why(error: BaseException) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
