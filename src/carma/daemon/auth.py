"""Who sends a request, as the kernel says (SO_PEERCRED), and what that user may do.

Nothing that a client writes is used as its identity. A daemon that is not root serves only its own user and root: it
could not run tasks under another account.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from asyncio.trsock import TransportSocket
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from carma.core.model.task import Task
from carma.core.model.values import Owner, Record
from carma.errors import NotAllowed

ROOT_UID = 0
_PEERCRED = struct.Struct("3i")
_MOST_NAMES = 1024


class Peer(NamedTuple):
    """The process at the other end of a connection, at the time it connected."""

    pid: int
    uid: int
    gid: int


def read_peer(connection: socket.socket | TransportSocket) -> Peer:
    """Ask the kernel. Raises OSError if the connection is gone."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return Peer(*_PEERCRED.unpack(raw))


PeerReader = Callable[[socket.socket | TransportSocket], Peer]


class Identity(Record, frozen=True, kw_only=True):
    uid: int
    gid: int
    name: str
    admin: bool = False

    @property
    def owner(self) -> Owner:
        return Owner(self.uid, self.gid, self.name)

    def may_see(self, task: Task) -> bool:
        """Whether this user may read what the task runs, and where."""
        return self.admin or task.owner.uid == self.uid


class UserNames:
    """User names by uid, cached: a directory service may be slow, and names hardly change."""

    def __init__(self, look_up: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name) -> None:
        self._look_up = lru_cache(_MOST_NAMES)(look_up)

    def of(self, uid: int) -> str:
        try:
            return self._look_up(uid)
        except KeyError:  # not cached: the account may be created later
            return f"uid {uid}"


def uid_of(name: str) -> int | None:
    """The uid of a user name, of "uid 1234" or of "1234"; None if there is no such user."""
    digits = name.removeprefix("uid ").strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 10:
        return int(digits)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def unknown_users(names: Sequence[str]) -> list[str]:
    """Names and uids that are no user of this machine; they may be created later."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    uid = uid_of(name)
    try:
        return uid is not None and bool(pwd.getpwuid(uid))
    except (KeyError, OverflowError):
        return False


class Authenticator:
    """Turns a peer into an identity, or refuses it."""

    def __init__(
        self, admins: Sequence[str] = (), *, own_uid: int | None = None, names: UserNames | None = None
    ) -> None:
        self.own_uid = os.geteuid() if own_uid is None else own_uid
        self.names = names or UserNames()
        self._admins = frozenset(admins)

    def identify(self, peer: Peer) -> Identity:
        """Raises NotAllowed."""
        if self.own_uid != ROOT_UID and peer.uid not in (self.own_uid, ROOT_UID):
            own = self.names.of(self.own_uid)
            raise NotAllowed(
                f"this daemon serves {own} only; you are {self.names.of(peer.uid)}",
                "start your own with `carma up`, or ask an administrator for a daemon that runs as root",
            )
        name = self.names.of(peer.uid)
        admin = peer.uid in (ROOT_UID, self.own_uid) or name in self._admins or str(peer.uid) in self._admins
        return Identity(uid=peer.uid, gid=peer.gid, name=name, admin=admin)


def require_admin(who: Identity, verb: str) -> None:
    if not who.admin:
        raise NotAllowed(
            f"`carma {'down' if verb == 'shutdown' else verb}` is for administrators; you are {who.name}",
            "administrators are root, the daemon's own user and the users in the setting daemon.admins",
        )


def require_owner(who: Identity, task: Task, verb: str) -> None:
    if not who.may_see(task):
        raise NotAllowed(
            f"{verb}: task {task.id} belongs to {task.owner.name}; you are {who.name}",
            "ask its owner or an administrator",
        )
