"""Reads files that users name, and sends their notices, in separate processes (program.py): a file system or a receiver
that hangs blocks no thread of the daemon.

1. Each probe serves one user, with the credentials of that user. A probe that is idle is kept for a while.
2. A probe that does not answer in time is killed and left behind. In uninterruptible sleep it ends only when its file
   system answers; it holds no descriptor of the daemon and is reaped later.
3. Each user has PROBES_PER_USER probes at most. A probe that was left behind counts until it has ended. So the
   hanging directory of one user leads to Busy for this user only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

import carma
from carma.core.model.values import NO_FRAMEWORKS, Frameworks, Owner, TaskSpec
from carma.core.ports import LaunchOrder
from carma.daemon.probes.command_check import needed_fields
from carma.daemon.probes.notification import Delivery, Message
from carma.daemon.probes.program import Answer, Request
from carma.errors import Busy, CarmaError, NotRunnable, from_code

SUBMIT_LIMIT_S = 20.0
LAUNCH_LIMIT_S = 5.0  # after it the launch goes on without the memory limit of the framework
NOTIFY_LIMIT_S = 40.0  # for all targets of a notice
PROBES_PER_USER = 4
WAITING_PER_USER = 60  # requests that wait for one of these probes
IDLE_PROBES = 16  # of all users together
AGE_LIMIT_S = 60.0  # a newer probe knows a change of the user's groups
TIDY_S = 0.2  # between checks whether idle probes are too old and killed probes have ended
CLOSE_LIMIT_S = 1.0
ANSWER_LIMIT_BYTES = 256 * 1024

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from carma.daemon.probes.program import main; main()"


class Probes:
    """Must be used in one event loop. Starts no process before the first request."""

    def __init__(self) -> None:
        self._users: dict[int, _User] = {}
        self._idle: list[_Probe] = []  # the one that became idle last is at the end
        self._killed: list[tuple[_Probe, _User | None]] = []  # not reaped yet; with the user whose place it holds
        self._tidying: asyncio.Task[None] | None = None

    async def check_runnable(self, spec: TaskSpec, owner: Owner) -> None:
        """Raises NotRunnable if the owner could not start the command, Busy if this cannot be checked now."""
        try:
            await self._ask(owner, Request(question="runnable", spec=needed_fields(spec)), SUBMIT_LIMIT_S)
        except TimeoutError as error:
            raise NotRunnable(
                f"the working directory {spec.directory} or a directory of PATH did not answer within "
                f"{SUBMIT_LIMIT_S:g} s",
                "check whether it is on a network file system that hangs",
            ) from error

    async def find_frameworks(self, order: LaunchOrder) -> Frameworks:
        """Never raises: `problem` of the result says why the frameworks are unknown."""
        try:
            request = Request(question="frameworks", spec=order.spec)
            return (await self._ask(order.owner, request, LAUNCH_LIMIT_S)).frameworks or NO_FRAMEWORKS
        except TimeoutError:
            return Frameworks(problem=f"the files of its interpreter did not answer within {LAUNCH_LIMIT_S:g} s")
        except CarmaError as error:
            return Frameworks(problem=str(error))

    async def notify(self, owner: Owner, spec: TaskSpec, message: Message) -> Delivery:
        """Never raises."""
        try:
            spec = replace(needed_fields(spec), environment=spec.environment)
            request = Request(question="notify", spec=spec, message=message)
            return (await self._ask(owner, request, NOTIFY_LIMIT_S)).delivery or Delivery()
        except TimeoutError:
            return Delivery(problems=(f"the targets did not answer within {NOTIFY_LIMIT_S:g} s",))
        except CarmaError as error:
            return Delivery(problems=(str(error),))

    async def _ask(self, owner: Owner, request: Request, limit_s: float) -> Answer:
        """Raises the problem that the probe found, TimeoutError or Busy."""
        self._reap()
        user = self._users.setdefault(owner.uid, _User())
        user.check_capacity()
        line = msgspec.json.encode(request) + b"\n"
        user.asking += 1
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._ask_in_place(user, owner if _switches(owner) else None, line)
        finally:
            user.asking -= 1
            self._forget_unused()
        if answer.problem is not None:
            raise from_code(answer.problem.code, answer.problem.message, answer.problem.hint)
        return answer

    async def close(self) -> None:
        """Kill all probes. Those that hang are left behind."""
        for probe in self._idle:
            self._kill(probe, None)
        self._idle.clear()
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        while self._reap() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        if self._tidying is not None:
            self._tidying.cancel()

    async def _ask_in_place(self, user: _User, identity: Owner | None, line: bytes) -> Answer:
        """Wait for one of the user's places, then for the answer. The place of a probe that is killed is given back
        when the probe has ended."""
        await user.places.acquire()
        asked: _Probe | None = None
        try:
            for is_last in (False, True):
                asked = self._take(identity, new=is_last)
                answer = await asked.ask(line)
                probe, asked = asked, None
                if answer is not None:
                    self._put_back(probe)
                    return answer
                self._kill(probe, None)
        finally:
            if asked is None:
                user.places.release()
            else:  # no answer, or the request was cancelled
                user.hanging += 1
                self._kill(asked, user)
        raise Busy("the process that checks the files of your command ended twice", "try again later")

    def _take(self, identity: Owner | None, *, new: bool) -> _Probe:
        """An idle probe of this identity, or a new one. Raises Busy."""
        for place in range(len(self._idle) - 1, -1, -1):
            if not new and self._idle[place].identity == identity and not self._idle[place].expired:
                return self._idle.pop(place)
        try:
            return _Probe(identity)
        except OSError as error:
            raise Busy(
                f"cannot start a process to check the files of your command: {error.strerror}",
                "the server is short of processes, memory or descriptors; try again later",
            ) from error

    def _put_back(self, probe: _Probe) -> None:
        self._idle.append(probe)
        if len(self._idle) > IDLE_PROBES:
            self._kill(self._idle.pop(0), None)
        self._keep_tidy()

    def _kill(self, probe: _Probe, user: _User | None) -> None:
        probe.kill()
        self._killed.append((probe, user))
        self._keep_tidy()

    def _keep_tidy(self) -> None:
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    async def _tidy(self) -> None:
        while self._idle or self._killed:
            await asyncio.sleep(TIDY_S)
            for probe in [probe for probe in self._idle if probe.expired]:
                self._idle.remove(probe)
                self._kill(probe, None)
            self._reap()

    def _reap(self) -> int:
        """The number of killed probes that have not ended."""
        ended = [(probe, user) for probe, user in self._killed if probe.has_ended]
        for probe, user in ended:
            self._killed.remove((probe, user))
            if user is not None:
                user.hanging -= 1
                user.places.release()
        self._forget_unused()
        return len(self._killed)

    def _forget_unused(self) -> None:
        self._users = {uid: user for uid, user in self._users.items() if user.asking or user.hanging}


class _User:
    """The places for the probes of one user."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(PROBES_PER_USER)
        self.asking = 0  # requests that wait for a place or for an answer
        self.hanging = 0  # places that are held by a killed probe

    def check_capacity(self) -> None:
        if self.hanging >= PROBES_PER_USER:
            raise Busy(
                f"{self.hanging} earlier checks of your files hang: a directory that they need does not answer",
                "is a network or FUSE file system of yours hanging? Unmount it or wait until it answers",
            )
        if self.asking >= PROBES_PER_USER + WAITING_PER_USER:
            raise Busy(f"{self.asking} of your requests already wait for a check of their files", "try again later")


class _Probe:
    """One process, with our end of its socket. Raises OSError if it cannot be started."""

    def __init__(self, identity: Owner | None) -> None:
        self.identity = identity
        self._expires_at_s = time.monotonic() + AGE_LIMIT_S
        self._unsent = msgspec.json.encode(identity) + b"\n"
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start(theirs)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._expires_at_s

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, line: bytes) -> Answer | None:
        """None if the probe ended without an answer, for example because it was killed."""
        loop = asyncio.get_running_loop()
        sent, self._unsent = self._unsent + line, b""
        received = b""
        try:
            await loop.sock_sendall(self._socket, sent)
            while not received.endswith(b"\n"):
                piece = await loop.sock_recv(self._socket, 65536)
                if not piece or len(received) > ANSWER_LIMIT_BYTES:
                    return None
                received += piece
            return msgspec.json.decode(received, type=Answer)
        except (ConnectionError, msgspec.DecodeError):
            return None

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()


def _start(connection: socket.socket) -> subprocess.Popen[bytes]:
    """The probe imports the same code as the daemon. It inherits no other descriptor and no environment."""
    package = str(Path(carma.__file__).parent.parent)
    path = [*(entry for entry in sys.path if os.path.isabs(entry)), package]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM, *path],
        stdin=connection.fileno(),
        stdout=connection.fileno(),
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )


def _switches(owner: Owner) -> bool:
    """Whether the probe takes the identity of the owner: only root can, and root itself needs none."""
    return os.geteuid() == 0 and owner.uid != 0
