"""The program of a probe: a process that reads files named by one user, or sends a notice, with the credentials of that
user.

Protocol: JSON lines over the socket that is its standard input and output. The first line says whose files it reads
(null: with the credentials of the daemon). Each later line is a request and gets one line as its answer. The probe ends
when the socket is closed. It never writes and opens only regular files. It imports nothing after it has taken the
identity of the user, except to send a notice.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
from typing import Literal

import msgspec

from carma.core.model.values import Frameworks, Owner, Record, TaskSpec
from carma.daemon.probes.command_check import check_runnable
from carma.daemon.probes.notification import Delivery, Message, deliver
from carma.errors import CarmaError, NotRunnable
from carma.launch.frameworks import find
from carma.wire.api_types import Problem

# A probe that hangs ends itself after this time, if the file system allows it. This matters only when the daemon was
# killed: a living daemon kills the probe earlier. Longer than every limit in pool.py.
SELF_DESTRUCT_S = 60


class Request(Record, frozen=True, kw_only=True):
    """`runnable`: whether the owner can start the command. `frameworks`: which frameworks it could import. `notify`:
    send the message, with the environment and in the directory of the spec."""

    question: Literal["runnable", "frameworks", "notify"]
    spec: TaskSpec
    message: Message | None = None


class Answer(Record, frozen=True, kw_only=True):
    """`problem`: the command cannot be started, or the request could not be answered."""

    frameworks: Frameworks | None = None
    delivery: Delivery | None = None
    problem: Problem | None = None


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = socket.socket(fileno=0)
    refusal: Answer | None = None
    decode = msgspec.json.Decoder(Request).decode
    with connection.makefile("rwb") as lines:
        owner = msgspec.json.decode(lines.readline(), type=Owner | None)
        try:
            take_identity(owner)
        except OSError as error:
            refusal = _unanswered(f"the credentials of the user cannot be taken: {error.strerror}")
        for line in lines:
            signal.alarm(SELF_DESTRUCT_S)
            lines.write(msgspec.json.encode(refusal or answer(decode(line))) + b"\n")
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
    spec = request.spec
    try:
        if request.question == "frameworks":
            return Answer(frameworks=find(spec.command, spec.environment, spec.directory))
        if request.message is not None:
            return Answer(delivery=deliver(request.message, spec.environment, spec.directory))
        check_runnable(spec)
        return Answer()
    except NotRunnable as error:
        return Answer(problem=Problem(code=error.code, message=str(error), hint=error.hint))
    except Exception as error:  # for example a path with a null byte
        return _unanswered(f"{type(error).__name__}: {error}")


def _unanswered(reason: str) -> Answer:
    message = f"the files of the command could not be checked: {reason}"
    return Answer(problem=Problem(code=CarmaError.code, message=message))
