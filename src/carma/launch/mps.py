"""The MPS servers of this CARMA: one control daemon for each user, because a server serves one user at a time.

Started at the first launch that needs it, found again after a restart (it outlives the CARMA daemon, as tasks do),
stopped when no attempt has needed it for a while. Watched by pid: a look costs two reads in /proc for each user.

    <directory>/<uid>.<n>/       pipes and logs, mode 0700, the user's
    <directory>/<uid>.<n>.json   which processes they are; ours, so that the user cannot name others

A control daemon that dies takes its server with it (so measured), and who then looks for MPS in its directory finds
none and runs without, and without its limit. The next launch gets a new one in a directory of its own (n + 1).
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

from carma.core.model.values import Owner
from carma.launch import attempt_records as records
from carma.launch import procfs
from carma.launch.mps_control import CONTROL, Control, Identity, MpsFailed, find_program

IDLE_S = 60.0  # without an attempt that needs it
RETRY_S = 60.0  # before a user's MPS that could not be started is tried again
QUIT_S, TERM_S = 10.0, 5.0  # after the word to quit until SIGTERM; from there until SIGKILL
LOOK_S = 1.0  # between looks for the server of a control daemon that has none
NEVER = float("-inf")


class Loss(msgspec.Struct, frozen=True):
    """A server that is gone: when it was last seen, and when it was missed (seconds since the epoch)."""

    seen_at: float
    noticed_at: float


class Kept(msgspec.Struct, frozen=True):
    """The record. Unknown fields are ignored: another version of CARMA may have written it."""

    boot_id: str
    uid: int
    gid: int
    name: str
    control: Identity
    servers: tuple[Identity, ...]


class Serving:
    """One control daemon, its servers, and what became of them."""

    def __init__(self, name: str, control: Control, daemon: Identity, servers: Collection[Identity]) -> None:
        self.name = name
        self.control = control
        self.daemon = daemon
        self.servers: dict[Identity, float] = dict.fromkeys(servers, NEVER)  # when last seen alive
        self.losses: list[Loss] = []
        self.needed_s = time.monotonic()
        self.looked_s = NEVER
        self.stopping: Stopping | None = None

    @property
    def processes(self) -> list[Identity]:
        return [one for one in (self.daemon, *self.servers) if one.alive]

    def look(self) -> bool:
        """Whether the servers are others than before."""
        before = set(self.servers)
        now = time.time()
        for server, seen_at in list(self.servers.items()):
            if server.alive:
                self.servers[server] = now
            else:
                del self.servers[server]
                self.losses.append(Loss(seen_at, now))
        if not self.servers and time.monotonic() - self.looked_s >= LOOK_S and self.daemon.alive:
            self.looked_s = time.monotonic()
            self.servers = dict.fromkeys(self.control.children(self.daemon), now)
        return set(self.servers) != before


class Stopping:
    """On its way out: the word to quit, then SIGTERM, then SIGKILL; nobody waits for it."""

    def __init__(self, serving: Serving) -> None:
        self.since_s = time.monotonic()
        self.word: subprocess.Popen[bytes] | None = serving.control.begin_quit() if serving.daemon.alive else None
        self.left = serving.processes

    def go_on(self) -> bool:
        """True when it is over."""
        if self.word is not None and self.word.poll() is None and time.monotonic() - self.since_s > QUIT_S:
            self.word.kill()
        self.left = [one for one in self.left if one.alive]
        waited_s = time.monotonic() - self.since_s
        for one in self.left if self.word is None or waited_s > QUIT_S else ():
            procfs.send(one.pid, one.start_ticks, signal.SIGKILL if waited_s > QUIT_S + TERM_S else signal.SIGTERM)
        return not self.left and (self.word is None or self.word.poll() is not None)


class MpsServers:
    """`directory` is made when it is needed; `open_to_users` when the servers are to run as others than ourselves."""

    def __init__(
        self, directory: str | os.PathLike[str], *, open_to_users: bool = False, idle_s: float = IDLE_S
    ) -> None:
        self.directory = os.path.abspath(directory)
        self._mode = 0o711 if open_to_users else 0o700
        self._idle_s = idle_s
        self._boot_id = procfs.boot_id()
        self._failed: dict[int, tuple[float, str]] = {}  # uid: until when, why
        self._serving: dict[str, Serving] = {}
        self._adopt()

    # Starting.

    def serve(self, owner: Owner) -> Serving:
        """This user's, which works; started if need be. Raises MpsFailed."""
        until_s, why = self._failed.get(owner.uid, (NEVER, ""))
        if time.monotonic() < until_s:
            raise MpsFailed(why)
        try:
            serving = self._running(owner.uid) or self._start(owner)
        except MpsFailed as error:
            self._failed[owner.uid] = time.monotonic() + RETRY_S, str(error)
            raise
        serving.needed_s = time.monotonic()
        return serving

    def _running(self, uid: int) -> Serving | None:
        for serving in self._serving.values():
            if serving.control.owner.uid == uid and serving.stopping is None and serving.daemon.alive:
                self._look(serving)
                if not serving.servers:
                    self._add_server(serving)
                return serving
        return None

    def _start(self, owner: Owner) -> Serving:
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
            serving = Serving(name, control, control.start(), ())
        except MpsFailed:
            shutil.rmtree(control.directory, ignore_errors=True)
            raise
        self._serving[name] = serving
        self._write(serving)
        self._add_server(serving)
        return serving

    def _add_server(self, serving: Serving) -> None:
        try:
            serving.servers[serving.control.start_server()] = time.time()
        except MpsFailed:
            serving.stopping = Stopping(serving)
            raise
        self._write(serving)

    def _new_name(self, uid: int) -> str:
        """A number above all that are there: what runs under an old one must not be taken for the new one's."""
        there = [name.split(".") for name in os.listdir(self.directory)]
        used = [int(parts[1]) for parts in there if parts[0] == str(uid) and len(parts) > 1 and parts[1].isdigit()]
        return f"{uid}.{max(used, default=0) + 1}"

    # Records.

    def _write(self, serving: Serving) -> None:
        owner = serving.control.owner
        kept = Kept(self._boot_id, owner.uid, owner.gid, owner.name, serving.daemon, tuple(serving.servers))
        with contextlib.suppress(OSError):  # a full disk: it is found to be idle, or lost, after a restart
            records.write(self._record(serving.name), msgspec.to_builtins(kept), durable=False)

    def _record(self, name: str) -> str:
        return os.path.join(self.directory, f"{name}.json")

    def _adopt(self) -> None:
        """What an earlier daemon started. Servers that died meanwhile are losses, last seen nobody knows when."""
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        for name in (name.removesuffix(".json") for name in sorted(names) if name.endswith(".json")):
            try:
                kept = msgspec.json.decode(procfs.read_bytes(self._record(name)), type=Kept)
            except msgspec.DecodeError:
                continue
            if kept.boot_id != self._boot_id:
                self._remove(name)
                continue
            owner = Owner(kept.uid, kept.gid, kept.name)
            control = Control(os.path.join(self.directory, name), owner, find_program(os.environ) or CONTROL)
            self._serving[name] = Serving(name, control, kept.control, kept.servers)
        self.look()

    def _remove(self, name: str) -> None:
        self._serving.pop(name, None)
        shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(self._record(name))

    # Watching.

    def look(self) -> None:
        """See who lives; cheap enough for several times a second."""
        for serving in self._serving.values():
            if serving.stopping is None:
                self._look(serving)

    def _look(self, serving: Serving) -> None:
        if serving.look():
            self._write(serving)

    def losses(self, name: str) -> tuple[Loss, ...]:
        """Of the servers under that name; what is not known has lost none."""
        serving = self._serving.get(name)
        return tuple(serving.losses) if serving is not None else ()

    def leads_nowhere(self, name: str) -> bool:
        """Whether its control daemon is gone: clients that come now get no server."""
        serving = self._serving.get(name)
        return serving is not None and not serving.daemon.alive

    def serves(self, name: str) -> bool:
        """Whether one of its servers lives."""
        serving = self._serving.get(name)
        return serving is not None and any(server.alive for server in serving.servers)

    def lost_between(self, name: str, started_at: float, ended_at: float) -> bool:
        """Whether a server went while that attempt ran: missed after its start, not seen any more after its end."""
        return any(one.noticed_at >= started_at and one.seen_at <= ended_at for one in self.losses(name))

    def pids(self) -> frozenset[int]:
        """All our MPS processes, control daemons included."""
        return frozenset(one.pid for serving in self._serving.values() for one in serving.processes)

    # Stopping.

    def tend(self, needed: Collection[str]) -> None:
        """Stop what no attempt has needed for a while, and go on with what is being stopped. Does not wait."""
        for name, serving in list(self._serving.items()):
            if name in needed:
                serving.needed_s = time.monotonic()
            elif serving.stopping is None and time.monotonic() - serving.needed_s >= self._idle_s:
                serving.stopping = Stopping(serving)
            if serving.stopping is not None and name not in needed and serving.stopping.go_on():
                self._remove(name)

    def close(self, needed: Collection[str], limit_s: float = QUIT_S + TERM_S + 5.0) -> None:
        """Stop those under which nothing runs; the others go on without us, as the tasks do."""
        self._idle_s = 0.0
        deadline_s = time.monotonic() + limit_s
        self.tend(needed)
        while any(one.stopping is not None for one in self._serving.values()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
            self.tend(needed)
