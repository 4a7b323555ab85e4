"""All errors that users see: one tree. Each has a stable code, an exit code, an HTTP status and a next step.

The docstring of a class is its explanation on the reference page. A class inherits the exit code and the status that it
does not name.
"""

from __future__ import annotations

from typing import ClassVar


class CarmaError(Exception):
    """An unexpected error; the daemon's log has the details."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init_subclass__(cls, *, code: str = "", exit_code: int = 0, http_status: int = 0) -> None:
        cls.code = code or cls.code
        cls.exit_code = exit_code or cls.exit_code
        cls.http_status = http_status or cls.http_status

    def __init__(self, message: str, hint: str = "") -> None:
        """`message` says what was tried and why it failed; `hint` says what to do."""
        super().__init__(message)
        self.hint = hint


class Usage(CarmaError, code="usage", exit_code=2, http_status=400):
    """The request cannot be understood: a flag, a file or a value is wrong."""


class BadSettings(Usage, code="bad_settings"):
    """The settings file, an environment variable or a flag holds a value that cannot be used."""


class BadTaskFile(Usage, code="bad_task_file"):
    """A task file, a .rad file or a script with #CARMA lines cannot be read."""


class BadTrace(Usage, code="bad_trace"):
    """A trace file cannot be read: a column is missing, or a value is not what its column holds."""


class TooLarge(Usage, code="too_large", http_status=413):
    """The request is larger than the daemon accepts."""


class Refused(CarmaError, code="refused", http_status=409):
    """The request is valid but cannot be granted in the current state."""


class NeverFitsError(Refused, code="never_fits"):
    """The task is too large for every GPU of this server."""


class QuotaReached(Refused, code="quota"):
    """The request exceeds a quota of the user."""


class NotRunnable(Refused, code="not_runnable"):
    """The command or its working directory does not exist, or the submitter may not use it."""


class WrongState(Refused, code="wrong_state"):
    """The state of the task does not allow the action."""


class NoCapacity(CarmaError, code="no_capacity", exit_code=75, http_status=409):
    """The task cannot start now and was not queued (--nonblock)."""


class NotFound(CarmaError, code="not_found", exit_code=4, http_status=404):
    """The task, GPU, user or route does not exist."""


class NotAllowed(CarmaError, code="not_allowed", exit_code=4, http_status=403):
    """The task belongs to another user, or the verb is for administrators."""


class Unreachable(CarmaError, code="unreachable", exit_code=3, http_status=503):
    """The daemon does not answer on its socket."""


class AlreadyRunning(CarmaError, code="already_running"):
    """Another daemon serves this directory."""


class StoreError(CarmaError, code="store", http_status=507):
    """The database cannot be read or written: the disk is full, or the file is damaged or of a newer version."""


class Busy(CarmaError, code="busy", http_status=503):
    """The daemon has too many open requests; try again later."""


class NoGpus(CarmaError, code="no_gpus", http_status=503):
    """There is no NVIDIA GPU, or its driver does not answer."""


class PluginError(CarmaError, code="plugin"):
    """A policy or an estimator from another package cannot be loaded or raised an exception."""


class NotInstalled(Usage, code="not_installed"):
    """The verb or the option belongs to a distribution of CARMA that is not installed."""


def every() -> tuple[type[CarmaError], ...]:
    """All error classes, for the reference page and for `from_code`."""
    found: list[type[CarmaError]] = [CarmaError]
    for kind in found:  # grows meanwhile
        found.extend(kind.__subclasses__())
    return tuple(found)


def from_code(code: str, message: str, hint: str = "") -> CarmaError:
    """The error of a daemon's answer."""
    for kind in every():
        if kind.code == code:
            return kind(message, hint)
    return CarmaError(message, hint)
