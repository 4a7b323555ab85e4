"""Who is asking, as the kernel says (SO_PEERCRED), and what that person may do.

Nothing that a client writes is taken as its name. A daemon that is not root serves its own user and root only: it
could not run anybody else's task under their account.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from carma.core.model.task import Task
from carma.core.model.values import Owner, Record
from carma.errors import NotAllowed

ROOT_UID = 0
_PEERCRED = struct.Struct("3i")
_NAMES_KEPT = 1024


class Peer(NamedTuple):
    """The process at the other end of a connection, at the time it connected."""

    pid: int
    uid: int
    gid: int


class PeerSocket(Protocol):
    """A socket, or the view of one that asyncio hands out."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def read_peer(connection: PeerSocket) -> Peer:
    """Ask the kernel. Raises OSError when the connection is gone."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return Peer(*_PEERCRED.unpack(raw))


PeerReader = Callable[[PeerSocket], Peer]


class Identity(Record, frozen=True, kw_only=True):
    uid: int
    gid: int
    name: str
    admin: bool = False

    @property
    def owner(self) -> Owner:
        return Owner(self.uid, self.gid, self.name)

    def may_see(self, task: Task) -> bool:
        """Whether this person may read what the task runs, and where."""
        return self.admin or task.owner.uid == self.uid


class Names:
    """User names by uid. Looked up once: a directory service may be slow, and names hardly change."""

    def __init__(self, look_up: Callable[[int], str] | None = None) -> None:
        self._look_up = look_up or _name_of
        self._known: dict[int, str] = {}

    def of(self, uid: int) -> str:
        name = self._known.get(uid)
        if name is not None:
            return name
        try:
            name = self._look_up(uid)
        except KeyError:
            return f"uid {uid}"  # not kept: the account may be made later
        if len(self._known) >= _NAMES_KEPT:
            self._known.clear()
        self._known[uid] = name
        return name


def _name_of(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def uid_of(name: str) -> int | None:
    """The uid of a user name, of "uid 1234" or of "1234"; None when there is no such user."""
    digits = name.removeprefix("uid ").strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 10:
        return int(digits)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def unknown_users(names: Sequence[str]) -> list[str]:
    """Those that are no user of this machine, by name or by uid; they may be made later."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    uid = uid_of(name)
    try:
        return uid is not None and bool(pwd.getpwuid(uid))
    except (KeyError, OverflowError):
        return False


class Door:
    """Turns a peer into an identity, or turns it away."""

    def __init__(self, admins: Sequence[str] = (), *, own_uid: int | None = None, names: Names | None = None) -> None:
        self.own_uid = os.geteuid() if own_uid is None else own_uid
        self.names = names or Names()
        self._admins = frozenset(admins)

    def identify(self, peer: Peer) -> Identity:
        if self.own_uid != ROOT_UID and peer.uid not in (self.own_uid, ROOT_UID):
            own = self.names.of(self.own_uid)
            raise NotAllowed(
                f"this daemon serves {own} only; you are {self.names.of(peer.uid)}",
                "start your own with `carma up`, or ask an administrator for a daemon that runs as root",
            )
        name = self.names.of(peer.uid)
        return Identity(uid=peer.uid, gid=peer.gid, name=name, admin=self._is_admin(peer.uid, name))

    def _is_admin(self, uid: int, name: str) -> bool:
        return uid in (ROOT_UID, self.own_uid) or name in self._admins or str(uid) in self._admins


def require_admin(who: Identity, verb: str) -> None:
    if not who.admin:
        raise NotAllowed(
            f"{verb} is for administrators; you are {who.name}",
            "administrators are root, the daemon's own user and those in the setting daemon.admins",
        )


def require_owner(who: Identity, task: Task, verb: str) -> None:
    if not who.may_see(task):
        raise NotAllowed(
            f"{verb}: task {task.id} belongs to {task.owner.name}; you are {who.name}",
            "ask its owner or an administrator",
        )
