"""The MPS servers of this CARMA: one control daemon for each user, because a server serves one user at a time.

A control daemon is started at the first launch that needs it, found again after a restart (it outlives the CARMA
daemon, as tasks do), and stopped when no attempt has needed it for a while. It is watched by pid: a check costs two
reads in /proc for each user.

    <directory>/<uid>.<n>/       pipes and logs, mode 0700, owned by the user
    <directory>/<uid>.<n>.json   its processes; owned by the daemon, so that the user cannot name others

A control daemon that dies takes its server with it (measured). A client that then looks for MPS in its directory finds
none and runs without MPS and without its limit. The next launch gets a new one in a directory of its own (n + 1).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection

import msgspec

from carma import procfs
from carma.core.model.values import Owner
from carma.launch import attempt_records as records
from carma.launch.mps_control import CONTROL, Control, MpsFailed, ProcessIdentity, find_program

IDLE_S = 60.0  # without an attempt that needs it
RETRY_S = 60.0  # before a user's MPS that could not be started is tried again
QUIT_S, TERM_S = 10.0, 5.0  # from `quit` to SIGTERM; from SIGTERM to SIGKILL
SEARCH_S = 1.0  # interval of searching the servers of a control daemon that has none
NEVER = float("-inf")


class ServerLoss(msgspec.Struct, frozen=True):
    """A server that ended: when it was last seen alive, and when its end was noticed (seconds since the epoch)."""

    alive_at: float
    noticed_at: float


class MpsRecord(msgspec.Struct, frozen=True):
    """The file. Unknown fields are ignored: another version of CARMA may have written it."""

    boot_id: str
    uid: int
    gid: int
    name: str
    control: ProcessIdentity
    servers: tuple[ProcessIdentity, ...]


class UserMps:
    """The control daemon of one user, its servers, and the servers that it lost."""

    def __init__(
        self, name: str, control: Control, daemon: ProcessIdentity, servers: Collection[ProcessIdentity]
    ) -> None:
        self.name = name
        self.control = control
        self.daemon = daemon
        self.servers: dict[ProcessIdentity, float] = dict.fromkeys(servers, NEVER)  # when last seen alive
        self.losses: list[ServerLoss] = []
        self.needed_s = time.monotonic()
        self.searched_s = NEVER
        self.stopping: MpsStop | None = None

    @property
    def processes(self) -> list[ProcessIdentity]:
        return [one for one in (self.daemon, *self.servers) if one.alive]

    @property
    def server_alive(self) -> bool:
        return any(server.alive for server in self.servers)

    def refresh(self) -> bool:
        """Whether the servers have changed."""
        before, now = set(self.servers), time.time()
        for server, alive_at in list(self.servers.items()):
            if server.alive:
                self.servers[server] = now
            else:
                del self.servers[server]
                self.losses.append(ServerLoss(alive_at, now))
        if not self.servers and time.monotonic() - self.searched_s >= SEARCH_S and self.daemon.alive:
            self.searched_s = time.monotonic()
            self.servers = dict.fromkeys(self.control.children(self.daemon), now)
        return set(self.servers) != before

    def lost_between(self, started_at: float, ended_at: float) -> bool:
        """Whether a server may have ended while that attempt ran: its end was noticed after the start of the attempt,
        and it was last seen alive before the end of the attempt."""
        return any(one.noticed_at >= started_at and one.alive_at <= ended_at for one in self.losses)


class MpsStop:
    """A stop in progress: `quit`, then SIGTERM, then SIGKILL. Nothing waits for it."""

    def __init__(self, mps: UserMps) -> None:
        self.since_s = time.monotonic()
        self.quit: subprocess.Popen[bytes] | None = mps.control.begin_quit() if mps.daemon.alive else None
        self.left = mps.processes

    def go_on(self) -> bool:
        """True when all processes have ended."""
        waited_s = time.monotonic() - self.since_s
        answered = self.quit is None or self.quit.poll() is not None
        if self.quit is not None and not answered and waited_s > QUIT_S:
            self.quit.kill()
        self.left = [one for one in self.left if one.alive]
        if self.quit is None or waited_s > QUIT_S:
            number = signal.SIGKILL if waited_s > QUIT_S + TERM_S else signal.SIGTERM
            for one in self.left:
                procfs.send(one.pid, one.start_ticks, number)
        return answered and not self.left


class MpsServers:
    """`directory` is made at the first start; `open_to_users` if the servers run as other users than the daemon."""

    def __init__(
        self, directory: str | os.PathLike[str], *, open_to_users: bool = False, idle_s: float = IDLE_S
    ) -> None:
        self.directory = os.path.abspath(directory)
        self._mode = 0o711 if open_to_users else 0o700
        self._idle_s = idle_s
        self._boot_id = procfs.boot_id()
        self._failed: dict[int, tuple[float, str]] = {}  # uid -> no further try before, reason
        self._by_name: dict[str, UserMps] = {}
        self._adopt()

    def get(self, name: str) -> UserMps | None:
        return self._by_name.get(name)

    # Starting.

    def serve(self, owner: Owner) -> UserMps:
        """The user's MPS, with a working server; started if necessary. Raises MpsFailed."""
        until_s, why = self._failed.get(owner.uid, (NEVER, ""))
        if time.monotonic() < until_s:
            raise MpsFailed(why)
        try:
            mps = self._running(owner.uid) or self._start(owner)
            if not mps.servers:
                self._add_server(mps)
        except MpsFailed as error:
            self._failed[owner.uid] = time.monotonic() + RETRY_S, str(error)
            raise
        mps.needed_s = time.monotonic()
        return mps

    def _running(self, uid: int) -> UserMps | None:
        for mps in self._by_name.values():
            if mps.control.owner.uid == uid and mps.stopping is None and mps.daemon.alive:
                self._refresh(mps)
                return mps
        return None

    def _start(self, owner: Owner) -> UserMps:
        program = find_program(os.environ)
        if program is None:
            raise MpsFailed(f"{CONTROL} is not installed")
        try:
            os.makedirs(self.directory, mode=self._mode, exist_ok=True)
            os.chmod(self.directory, self._mode)  # whatever the umask
        except OSError as error:
            raise MpsFailed(f"cannot make {self.directory}: {error.strerror}") from error
        name = self._new_name(owner.uid)
        control = Control(os.path.join(self.directory, name), owner, program)
        try:
            mps = UserMps(name, control, control.start(), ())
        except MpsFailed:
            shutil.rmtree(control.directory, ignore_errors=True)
            raise
        self._by_name[name] = mps
        self._write(mps)
        return mps

    def _add_server(self, mps: UserMps) -> None:
        try:
            mps.servers[mps.control.start_server()] = time.time()
        except MpsFailed:
            mps.stopping = MpsStop(mps)
            raise
        self._write(mps)

    def _new_name(self, uid: int) -> str:
        """A number above all existing ones: an attempt under an old one must not be counted to the new one."""
        existing = [name.split(".") for name in os.listdir(self.directory)]
        used = [int(parts[1]) for parts in existing if parts[0] == str(uid) and len(parts) > 1 and parts[1].isdigit()]
        return f"{uid}.{max(used, default=0) + 1}"

    # Records.

    def _write(self, mps: UserMps) -> None:
        owner = mps.control.owner
        record = MpsRecord(self._boot_id, owner.uid, owner.gid, owner.name, mps.daemon, tuple(mps.servers))
        with contextlib.suppress(OSError):  # a full disk: the next daemon takes it for idle, or lost
            records.write(self._record(mps.name), msgspec.to_builtins(record), durable=False)

    def _record(self, name: str) -> str:
        return os.path.join(self.directory, f"{name}.json")

    def _adopt(self) -> None:
        """Control daemons that an earlier CARMA daemon started. Servers that ended meanwhile are losses."""
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        for name in (name.removesuffix(".json") for name in sorted(names) if name.endswith(".json")):
            try:
                record = msgspec.json.decode(procfs.read_bytes(self._record(name)), type=MpsRecord)
            except msgspec.DecodeError:
                continue
            if record.boot_id != self._boot_id:
                self._remove(name)
                continue
            owner = Owner(record.uid, record.gid, record.name)
            control = Control(os.path.join(self.directory, name), owner, find_program(os.environ) or CONTROL)
            self._by_name[name] = UserMps(name, control, record.control, record.servers)
        self.refresh()

    def _remove(self, name: str) -> None:
        self._by_name.pop(name, None)
        shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(self._record(name))

    # Watching.

    def refresh(self) -> None:
        """Check which processes are alive; cheap enough for several times a second."""
        for mps in self._by_name.values():
            if mps.stopping is None:
                self._refresh(mps)

    def _refresh(self, mps: UserMps) -> None:
        if mps.refresh():
            self._write(mps)

    def pids(self) -> frozenset[int]:
        """All MPS processes of this CARMA, control daemons included."""
        return frozenset(one.pid for mps in self._by_name.values() for one in mps.processes)

    # Stopping.

    def stop_idle(self, needed: Collection[str]) -> None:
        """Stop those that no attempt has needed for a while, and continue stops in progress. Does not wait."""
        for name, mps in list(self._by_name.items()):
            if name in needed:
                mps.needed_s = time.monotonic()
            elif mps.stopping is None and time.monotonic() - mps.needed_s >= self._idle_s:
                mps.stopping = MpsStop(mps)
            if mps.stopping is not None and name not in needed and mps.stopping.go_on():
                self._remove(name)

    def close(self, needed: Collection[str], limit_s: float = QUIT_S + TERM_S + 5.0) -> None:
        """Stop those that no attempt needs now; the others outlive this daemon, as the tasks do."""
        self._idle_s = 0.0
        deadline_s = time.monotonic() + limit_s
        self.stop_idle(needed)
        while any(one.stopping is not None for one in self._by_name.values()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
            self.stop_idle(needed)
