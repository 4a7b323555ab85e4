"""The program of a probe: a process that reads files named by one user, with the credentials of that user.

Protocol: JSON lines over the socket that is its standard input and output. The first line says whose files it reads;
each later line is a request and gets one line as its answer. The probe ends when the socket is closed. It never
writes, opens only regular files, and imports nothing after it has taken the identity of the user.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
from typing import assert_never

import msgspec

from carma.core.model.values import Frameworks, Owner, Record, TaskSpec
from carma.daemon.probes.command_check import check_runnable
from carma.errors import NotRunnable
from carma.launch.frameworks import find

# A probe that hangs ends itself after this time, if the file system allows it. This matters only when the daemon was
# killed: a living daemon kills the probe earlier. Longer than every limit in probes.py.
SELF_DESTRUCT_S = 60


class Start(Record, frozen=True, tag="start"):
    """The first line. Without an owner the probe keeps the credentials of the daemon."""

    owner: Owner | None


class CheckRunnable(Record, frozen=True, tag="runnable"):
    """Answered with Passed or CommandRefused."""

    spec: TaskSpec


class FindFrameworks(Record, frozen=True, tag="frameworks"):
    """Answered with FrameworksFound."""

    spec: TaskSpec


class Passed(Record, frozen=True, tag="passed"):
    pass


class CommandRefused(Record, frozen=True, tag="refusal"):
    """The message and the hint of NotRunnable."""

    message: str
    hint: str


class FrameworksFound(Record, frozen=True, tag="found"):
    frameworks: Frameworks


class ProbeProblem(Record, frozen=True, tag="problem"):
    """The request could not be answered."""

    reason: str


Request = CheckRunnable | FindFrameworks
Answer = Passed | CommandRefused | FrameworksFound | ProbeProblem
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = socket.socket(fileno=0)
    problem: ProbeProblem | None = None
    with connection.makefile("rwb") as lines:
        start = msgspec.json.decode(lines.readline(), type=Start)
        try:
            take_identity(start.owner)
        except OSError as error:
            problem = ProbeProblem(f"the credentials of the user cannot be taken: {error.strerror}")
        for line in lines:
            signal.alarm(SELF_DESTRUCT_S)
            lines.write(msgspec.json.encode(problem or answer(_REQUESTS.decode(line))) + b"\n")
            lines.flush()
            signal.alarm(0)


def take_identity(owner: Owner | None) -> None:
    """Real, effective and saved ids: FUSE serves a process only if all three are those of the user who mounted. The
    groups are looked up here, so that a slow directory service holds up only the probe of this user."""
    if owner is None:
        return
    try:
        name = pwd.getpwuid(owner.uid).pw_name
    except KeyError:  # an account that only the kernel knows, as in containers
        name = owner.name
    os.initgroups(name, owner.gid)
    os.setresgid(owner.gid, owner.gid, owner.gid)
    os.setresuid(owner.uid, owner.uid, owner.uid)


def answer(request: Request) -> Answer:
    try:
        match request:
            case CheckRunnable(spec=spec):
                check_runnable(spec)
                return Passed()
            case FindFrameworks(spec=spec):
                return FrameworksFound(find(spec.command, spec.environment, spec.directory))
            case _:
                assert_never(request)
    except NotRunnable as error:
        return CommandRefused(str(error), error.hint)
    except Exception as error:  # for example a path with a null byte
        return ProbeProblem(f"{type(error).__name__}: {error}")
