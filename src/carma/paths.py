"""The paths of CARMA's files. Three layouts: one directory (CARMA_HOME), a user's own (XDG), the system's (root).

The socket of a user's daemon is in the state directory, not in XDG_RUNTIME_DIR: that directory is emptied when the user
logs out, while the daemon keeps running; and cron or `ssh host carma queue` do not always have the variable.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from carma.errors import BadSettings

SOCKET_LIMIT_BYTES = 99  # the kernel allows 107; the daemon binds under a slightly longer name first
SYSTEM_SOCKET = Path("/run/carma/carma.sock")
_SYSTEM_CONFIG = Path("/etc/carma/config.toml")
_CHOOSE = "Choose another CARMA_HOME, or correct it with chown and chmod."
_LINKS_LIMIT = 40  # the kernel's


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """`config_file` takes precedence over `system_config_file`, if there is one."""

    layout: Literal["home", "user", "system"]
    config_file: Path
    system_config_file: Path | None
    state_dir: Path
    log_dir: Path  # one directory for each attempt
    socket: Path

    @property
    def database(self) -> Path:
        return self.state_dir / "carma.db"

    @property
    def pid_file(self) -> Path:
        return self.state_dir / "daemon.pid"

    @property
    def daemon_log(self) -> Path:
        return self.log_dir.parent / "daemon.log" if self.layout == "home" else self.log_dir / "daemon.log"

    @property
    def vgpu_dir(self) -> Path:
        """The virtual devices. Tasks of all users write there, so it contains nothing else."""
        return self.state_dir / "vgpu"


def find_paths(environ: Mapping[str, str], uid: int | None = None) -> Paths:
    """The paths of a daemon that this user would start. Looks up only the user's home directory."""
    uid = os.geteuid() if uid is None else uid
    if environ.get("CARMA_HOME"):
        home = _absolute(environ["CARMA_HOME"])
        return _with_short_socket("home", None, home, home, home)  # complete: no other file changes it
    if uid == 0:
        return Paths(
            layout="system",
            config_file=_SYSTEM_CONFIG,
            system_config_file=None,
            state_dir=Path("/var/lib/carma"),
            log_dir=Path("/var/log/carma"),
            socket=SYSTEM_SOCKET,
        )
    home = _home(environ, uid)
    config = _xdg(environ, "XDG_CONFIG_HOME", home / ".config")
    state = _xdg(environ, "XDG_STATE_HOME", home / ".local" / "state")
    data = _xdg(environ, "XDG_DATA_HOME", home / ".local" / "share")
    return _with_short_socket("user", _SYSTEM_CONFIG, config, state, data)


def find_socket(environ: Mapping[str, str], uid: int | None = None) -> Path:
    """The socket for a client: CARMA_HOME's, else the user's own if it exists, else the system's if it exists."""
    own = find_paths(environ, uid).socket
    if environ.get("CARMA_HOME") or own.exists() or not SYSTEM_SOCKET.exists():
        return own
    return SYSTEM_SOCKET


def make_directories(paths: Paths) -> None:
    """Create missing directories; refuse a directory that another user could change under a running daemon.

    Root's directories can be entered by all users, whose tasks run below them. Private files are protected by their own
    modes (the database 0600, an attempt's directory its owner's).
    """
    mode = 0o755 if os.geteuid() == 0 else 0o700
    for directory in _directories(paths):
        try:
            _check_components(directory)
            _make(directory, mode)
            _check_owner(directory)
        except OSError as error:
            raise BadSettings(
                f"the directory {directory} cannot be created: {error.strerror}",
                "Set CARMA_HOME to a directory of yours on a disk with free space.",
            ) from error


def check_directories(paths: Paths) -> None:
    """Raises what `make_directories` would raise for the directories that exist; creates nothing."""
    for directory in _directories(paths):
        _check_components(directory)
        if directory.is_dir():
            _check_owner(directory)


def _directories(paths: Paths) -> tuple[Path, ...]:
    return paths.state_dir, paths.log_dir, paths.socket.parent, paths.daemon_log.parent


def not_for_others(path: str) -> str:
    """The first directory or file on this path that other users cannot enter or execute; empty if there is none."""
    return next((place for place, found in _components(path) if not found.st_mode & stat.S_IXOTH), "")


def _make(directory: Path, mode: int) -> None:
    if not directory.is_dir():
        if not directory.parent.is_dir():
            _make(directory.parent, mode)
        directory.mkdir(exist_ok=True)
        directory.chmod(mode)  # whatever the umask


def _check_owner(directory: Path) -> None:
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise BadSettings(f"{directory} belongs to user {found.st_uid}, not to the daemon's ({os.geteuid()})", _CHOOSE)
    if found.st_mode & stat.S_IWOTH:
        raise BadSettings(f"{directory} can be written by all users, so its contents cannot be trusted", _CHOOSE)
    if os.geteuid() == 0 and found.st_mode & stat.S_IWGRP and found.st_gid != 0:
        raise BadSettings(f"{directory} can be written by group {found.st_gid}, so it cannot be trusted", _CHOOSE)


def _check_components(directory: Path) -> None:
    """Refuse a path that another user could redirect: by a link and, for root, by replacing a directory."""
    for place, found in _components(str(directory)):
        link = stat.S_ISLNK(found.st_mode)
        if not link and os.geteuid() != 0:
            continue  # a directory of a group may belong to another member
        if found.st_uid not in (0, os.geteuid()):
            kind = "link" if link else "directory"
            raise BadSettings(f"the {kind} {place} belongs to user {found.st_uid}, who could replace it", _CHOOSE)
        if not link and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise BadSettings(f"{place} can be written by all users, so its contents cannot be trusted", _CHOOSE)


def _components(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every existing directory and link that the kernel visits when it resolves an absolute path."""
    at, left, links = "/", path.split("/"), 0
    while left and links < _LINKS_LIMIT:
        name = left.pop(0)
        if name in ("", "."):
            continue
        place = os.path.dirname(at) if name == ".." else os.path.join(at, name)
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            return
        yield place, found
        if not stat.S_ISLNK(found.st_mode):
            at = place
            continue
        links += 1
        target = os.readlink(place)
        left = target.split("/") + left
        at = "/" if os.path.isabs(target) else at


def _with_short_socket(
    layout: Literal["home", "user"], system_config: Path | None, config: Path, state: Path, data: Path
) -> Paths:
    """The files in these directories. Raises BadSettings if the socket's path is too long."""
    socket = state / "carma.sock"
    length = len(os.fsencode(socket))
    if length > SOCKET_LIMIT_BYTES:
        raise BadSettings(
            f"the path of the socket is too long: {socket} has {length} bytes; the limit is {SOCKET_LIMIT_BYTES}",
            "Set CARMA_HOME to a directory with a shorter path.",
        )
    return Paths(
        layout=layout,
        config_file=config / "config.toml",
        system_config_file=system_config,
        state_dir=state,
        log_dir=data / "logs",
        socket=socket,
    )


def _xdg(environ: Mapping[str, str], name: str, default: Path) -> Path:
    """The specification says to ignore relative paths."""
    given = environ.get(name, "")
    return (Path(given) if os.path.isabs(given) else default) / "carma"


def _home(environ: Mapping[str, str], uid: int) -> Path:
    given = environ.get("HOME", "")
    if os.path.isabs(given):
        return Path(given)
    try:
        return Path(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        raise BadSettings(f"user {uid} has no home directory", "Set CARMA_HOME to a directory of yours.") from None


def _absolute(text: str) -> Path:
    if "\0" in text:
        raise BadSettings("CARMA_HOME contains a NUL character", "Set it to the path of a directory.")
    return Path(os.path.abspath(os.path.expanduser(text)))
