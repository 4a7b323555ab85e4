"""Every error a user can meet: one tree, each with a stable code, an exit code, an HTTP status and a next step."""

from __future__ import annotations

from typing import ClassVar


class CarmaError(Exception):
    """`str(error)` says what was tried and why it failed; `hint` says what to do."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    about: ClassVar[str] = "Something that should not happen; the daemon's log has the details."

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Usage(CarmaError):
    code = "usage"
    exit_code = 2
    http_status = 400
    about = "The request cannot be understood: a flag, a file or a value is wrong."


class BadSettings(Usage):
    code = "bad_settings"
    about = "The settings file, an environment variable or a flag holds a value that cannot be used."


class BadTaskFile(Usage):
    code = "bad_task_file"
    about = "A task file, a .rad file or a script with #CARMA lines cannot be read."


class BadTrace(Usage):
    code = "bad_trace"
    about = "A trace file cannot be read: a column is missing, or a value is not what its column holds."


class TooLarge(Usage):
    code = "too_large"
    http_status = 413
    about = "The request is larger than the daemon accepts."


class Refused(CarmaError):
    code = "refused"
    exit_code = 1
    http_status = 409
    about = "The request is well formed but cannot be granted as things stand."


class NeverFitsError(Refused):
    code = "never_fits"
    about = "No GPU of this server could ever hold the task."


class QuotaReached(Refused):
    code = "quota"
    about = "The user has, or asks for, as much as the server's quotas allow."


class NotRunnable(Refused):
    code = "not_runnable"
    about = "The command or its working directory does not exist, or may not be used by the submitter."


class WrongState(Refused):
    code = "wrong_state"
    about = "The task is not in a state in which that can be done."


class NoCapacity(CarmaError):
    code = "no_capacity"
    exit_code = 75
    http_status = 409
    about = "With --nonblock: nothing is free for the task right now; it was not queued."


class NotFound(CarmaError):
    code = "not_found"
    exit_code = 4
    http_status = 404
    about = "There is no such task, GPU or setting."


class NotAllowed(CarmaError):
    code = "not_allowed"
    exit_code = 4
    http_status = 403
    about = "The task belongs to somebody else, or the verb is for administrators."


class Unreachable(CarmaError):
    code = "unreachable"
    exit_code = 3
    http_status = 503
    about = "The daemon does not answer on its socket."


class AlreadyRunning(CarmaError):
    code = "already_running"
    exit_code = 1
    about = "Another daemon already serves this directory."


class StoreError(CarmaError):
    code = "store"
    exit_code = 1
    http_status = 507
    about = "The database cannot be read or written: a full disk, a corrupt file, a newer version's file."


class Busy(CarmaError):
    code = "busy"
    exit_code = 1
    http_status = 503
    about = "The daemon has too many requests open; try again."


class NoGpus(CarmaError):
    code = "no_gpus"
    exit_code = 1
    http_status = 503
    about = "There is no NVIDIA GPU, or its driver does not answer."


class PluginError(CarmaError):
    code = "plugin"
    exit_code = 1
    about = "A policy or an estimator from another package cannot be loaded or raised an exception."


class NotInstalled(Usage):
    code = "not_installed"
    about = "The verb or the option belongs to a distribution of CARMA that is not installed."


def every() -> tuple[type[CarmaError], ...]:
    """All of them, for the reference page and for turning an answer back into an error."""
    found: list[type[CarmaError]] = []
    waiting: list[type[CarmaError]] = [CarmaError]
    while waiting:
        kind = waiting.pop(0)
        found.append(kind)
        waiting.extend(kind.__subclasses__())
    return tuple(found)


def from_code(code: str, message: str, hint: str = "") -> CarmaError:
    """The error that the daemon answered with."""
    for kind in every():
        if kind.code == code:
            return kind(message, hint)
    return CarmaError(message, hint)
