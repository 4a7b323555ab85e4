"""Whether a command could be started by its submitter: the directory is there, the program is there, and its output has
somewhere to go.

A daemon that is root looks with `stat` alone and judges by mode bits and groups; it opens nothing on a user's behalf,
and looks nowhere that the user could not: its answers would tell what there is. Where that cannot tell (an access
list, a network directory that refuses root) it lets the task through: the launch, as the user, has the last word.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache

from carma.core.model import Owner, TaskSpec
from carma.errors import NotRunnable
from carma.launch.naming import PLACES, before_places, unknown_place

_ACL = "system.posix_acl_access"


class CannotTell(Exception):
    """Root is refused, or an access list decides."""


def check_runnable(spec: TaskSpec, owner: Owner, own_uid: int, *, as_submitter: bool = True) -> None:
    """Blocking: a network directory may take its time. Raises NotRunnable.

    Not `as_submitter`: tasks run under the daemon's own account, which is then the one that must be able to.
    """
    may = _by_mode_bits(owner) if as_submitter and own_uid == 0 and owner.uid != 0 else _by_asking
    _check_directory(spec.directory, may)
    _check_program(spec, may)
    for flag, template in (("output", spec.output), ("error", spec.error)):
        if template:
            _check_output(flag, template, spec.directory, may)


May = Callable[[str, int], bool]  # (path, os.R_OK | os.X_OK ...) -> whether; OSError when it is not there


def _by_asking(path: str, want: int) -> bool:
    os.stat(path)
    return os.access(path, want)


def _by_mode_bits(owner: Owner) -> May:
    groups = groups_of(owner.uid, owner.gid)

    def may(path: str, want: int) -> bool:
        try:
            return all(_allowed(parent, owner.uid, groups, os.X_OK) for parent in _parents(path)) and _allowed(
                path, owner.uid, groups, want
            )
        except PermissionError as error:
            raise CannotTell from error

    return may


def _parents(path: str) -> Iterator[str]:
    parts = os.path.realpath(path).split("/")
    for count in range(1, len(parts)):
        yield "/".join(parts[:count]) or "/"


def _allowed(path: str, uid: int, groups: frozenset[int], want: int) -> bool:
    found = os.stat(path)
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
    if (found.st_mode >> shift) & want == want:
        return True
    if _has_acl(path):
        raise CannotTell
    return False


def _has_acl(path: str) -> bool:
    try:
        return _ACL in os.listxattr(path)
    except OSError:
        return False


@lru_cache(maxsize=256)
def groups_of(uid: int, gid: int) -> frozenset[int]:
    try:
        return frozenset(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return frozenset((gid,))


def _check_directory(directory: str, may: May) -> None:
    try:
        if not _reachable(directory, may):
            raise NotRunnable(f"you may not enter the working directory {directory}", "submit from another, or --chdir")
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotRunnable(f"the working directory {directory} is not a directory")
        if not may(directory, os.X_OK):
            raise NotRunnable(f"you may not enter the working directory {directory}", "submit from another, or --chdir")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotRunnable(
            f"the working directory {directory} does not exist", "submit from another, or --chdir"
        ) from error
    except (CannotTell, PermissionError):
        return
    except OSError as error:
        raise NotRunnable(f"the working directory {directory} cannot be used: {error.strerror}") from error


def _reachable(path: str, may: May) -> bool:
    """Whether they may pass through the directory that it is in, and all above."""
    return may(os.path.dirname(path.rstrip("/")) or "/", os.X_OK)


def _check_program(spec: TaskSpec, may: May) -> None:
    program = spec.command[0]
    refused = ""
    for path in candidates(spec):
        try:
            if not _reachable(path, may):
                refused = refused or (path if "/" in program else "")
                continue
            if stat.S_ISDIR(os.stat(path).st_mode):
                continue
            if may(path, os.X_OK):
                return
            refused = refused or path
        except (CannotTell, PermissionError):
            return
        except OSError:
            continue
    if refused:
        raise NotRunnable(f"{refused} is not executable for you", f"chmod +x {refused}, or name its interpreter first")
    if "/" in program:
        raise NotRunnable(
            f"the program {program} does not exist in {spec.directory}"
            if program[0] != "/"
            else f"the program {program} does not exist"
        )
    raise NotRunnable(
        f"the program {program!r} is not in any directory of PATH",
        "give its full path, or activate the environment that has it before you submit",
    )


def candidates(spec: TaskSpec) -> Iterator[str]:
    """Where the program may be, in the order in which the launch looks."""
    program = spec.command[0]
    if "/" in program:
        yield os.path.join(spec.directory, program)
        return
    for entry in spec.environment.get("PATH", os.defpath).split(":"):
        yield os.path.join(spec.directory, entry, program)


def _check_output(flag: str, template: str, directory: str, may: May) -> None:
    """As far as its path is the same for every task and attempt. Whether they may write there shows at the start."""
    if (place := unknown_place(template)) is not None:
        known = ", ".join(f"%{letter} {meaning}" for letter, meaning in PLACES.items())
        raise NotRunnable(f"{place!r} in --{flag} {template} stands for nothing", f"known are {known}")
    fixed = before_places(template)
    path = os.path.join(directory, fixed)
    folder = os.path.dirname(path) or "/"
    try:
        if not _reachable(folder, may):
            return
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotRunnable(f"--{flag} {template}: {folder} is not a directory")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotRunnable(f"--{flag} {template}: there is no directory {folder}", f"mkdir -p {folder}") from error
    except (CannotTell, PermissionError):
        return
    except OSError as error:
        raise NotRunnable(f"--{flag} {template} cannot be used: {error.strerror}") from error
    if fixed == template.replace("%%", "%") and _is_directory(path, folder, may):
        raise NotRunnable(f"--{flag}: {path} is a directory", f"name a file, for example {path.rstrip('/')}/%j.out")


def _is_directory(path: str, folder: str, may: May) -> bool:
    try:
        return may(folder, os.X_OK) and stat.S_ISDIR(os.stat(path).st_mode)
    except (CannotTell, OSError):
        return False
