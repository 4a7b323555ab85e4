"""Control groups below the one of this process: to limit a group of processes, to list them and to end them.

1. `find` says where this process may create cgroups. Version 2: below a cgroup that systemd has delegated to it, or,
   where systemd does not run, below its own. Version 1: below its own in the hierarchies `pids` and `memory`.
2. `Cgroups.create` makes one and sets its limits.
3. `Cgroup` lists its processes, kills them and counts what the limits refused.

Cgroups of other programs are never changed. Standard library only: programs started with `python -I -S` import this.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT, OWN, SYSTEMD = "/sys/fs/cgroup", "/proc/self/cgroup", "/run/systemd/system"
DELEGATION_HINT = "In a systemd unit, Delegate=yes and DelegateSubgroup=daemon (systemd 254 or newer) delegate it."
_AS_ROOT = "Start the daemon as root, outside of a container or in one that may write there."
KILL_LIMIT_S = 5.0
REMOVE_LIMIT_S = 0.5  # for processes that have just ended
_PREFIX = "carma."  # of every cgroup that is created here
_FROZEN = "paused"  # below the cgroup of an attempt, because its runner must not stand still
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_ROUND_S = 0.005  # between two rounds of SIGKILL


class Cgroup:
    """One cgroup, which has one directory in each hierarchy that is used."""

    def __init__(self, directories: Sequence[str]) -> None:
        self.directories = tuple(directories)

    @property
    def procs_files(self) -> list[str]:
        """A process joins by writing 0 into each of them; another process joins by its pid."""
        return [os.path.join(directory, "cgroup.procs") for directory in self.directories]

    def members(self) -> list[int]:
        """The processes in it and in cgroups below it."""
        found = set[int]()
        for directory in self.directories:
            for inner in _with_children(directory):
                found.update(self._pids(inner))
        return sorted(found)

    def kill(self, limit_s: float = KILL_LIMIT_S) -> bool:
        """SIGKILL to all members. False if some still exist after `limit_s`: a process inside a file system that does
        not answer cannot end."""
        for directory in self.directories:
            with suppress(OSError):
                _write(os.path.join(directory, "cgroup.kill"), "1")  # version 2, Linux 5.14
        with _no_new_processes(self.directories):
            deadline = time.monotonic() + limit_s
            while members := self.members():
                for pid in members:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_ROUND_S)
        return True

    def freeze(self, pids: Sequence[int]) -> bool:
        """Version 2: keep these members from running, in a frozen cgroup below this one. Returns whether they stand
        still. Raises OSError. Frozen processes can be killed; in version 1 they cannot."""
        frozen = os.path.join(self.directories[0], _FROZEN)
        os.makedirs(frozen, exist_ok=True)
        _write(os.path.join(frozen, "cgroup.freeze"), "1")
        for pid in set(pids).difference(self._pids(frozen)):
            with suppress(ProcessLookupError):
                _write(os.path.join(frozen, "cgroup.procs"), str(pid))
        return "frozen 1" in _text(os.path.join(frozen, "cgroup.events"))

    def thaw(self) -> None:
        """End `freeze`: the processes continue, as members of this cgroup again. Raises OSError."""
        frozen = os.path.join(self.directories[0], _FROZEN) if self.directories else ""
        if not os.path.isdir(frozen):
            return
        _write(os.path.join(frozen, "cgroup.freeze"), "0")
        for pid in self._pids(frozen):
            with suppress(ProcessLookupError):
                _write(self.procs_files[0], str(pid))
        with suppress(OSError):  # a process that has just ended keeps it busy; it is removed with the cgroup
            os.rmdir(frozen)

    def _pids(self, directory: str) -> list[int]:
        return [int(word) for word in _words(os.path.join(directory, "cgroup.procs"))]

    def oom_kills(self) -> int | None:
        """Processes that the kernel killed at the memory limit; None if it does not count them."""
        return self._count("oom_kill", "memory.events", "memory.oom_control")

    def pids_refused(self) -> int | None:
        """Forks that failed at the limit of processes; None if the kernel does not count them."""
        return self._count("max", "pids.events")

    def remove(self) -> None:
        """Removes the cgroup and those below it. One that still has processes stays."""
        deadline = time.monotonic() + REMOVE_LIMIT_S
        while not self._removed() and not self.members() and time.monotonic() < deadline:
            time.sleep(_ROUND_S)

    def _removed(self) -> bool:
        """A process that has just ended is no member any more, but keeps the directory busy for some milliseconds."""
        for directory in self.directories:
            for inner in reversed(list(_with_children(directory))):
                with suppress(OSError):
                    os.rmdir(inner)
        return not any(os.path.exists(directory) for directory in self.directories)

    def _count(self, key: str, *names: str) -> int | None:
        for directory in self.directories:
            for name in names:
                words = _words(os.path.join(directory, name))
                if key in words:
                    return int(words[words.index(key) + 1])
        return None


@contextmanager
def _no_new_processes(directories: Sequence[str]) -> Iterator[None]:
    """Sets the limit of processes to 0 for a while, so that nothing forks faster than it is killed."""
    files = (os.path.join(directory, "pids.max") for directory in directories)
    before = {file: words[0] for file in files if (words := _words(file))}
    try:
        _write_if_possible(dict.fromkeys(before, "0"))
        yield
    finally:
        _write_if_possible(before)


def _write_if_possible(values: dict[str, str]) -> None:
    for file, value in values.items():
        with suppress(OSError):
            _write(file, value)


class Cgroups:
    """Where this process may create cgroups, and which limits the kernel enforces in them."""

    def __init__(self, version: int, bases: dict[str, str], controllers: frozenset[str], problem: str = "") -> None:
        """`bases`: the directory for each hierarchy. `problem`: why a limit is not enforced."""
        self.version = version
        self.limits_pids = "pids" in controllers
        self.limits_memory = "memory" in controllers
        self.problem = problem
        self.bases = bases

    def create(self, name: str, *, pids: int | None = None, memory_bytes: int | None = None) -> Cgroup:
        """The cgroup of that name, made if it does not exist. Limits that are not enforced here are left out. Raises
        OSError."""
        group = Cgroup(self._directories(name))
        for directory in group.directories:
            os.makedirs(directory, exist_ok=True)
        try:
            if pids is not None and self.limits_pids:
                _write(os.path.join(self._directory("pids", name), "pids.max"), str(pids))
            if memory_bytes is not None and self.limits_memory:
                self._limit_memory(self._directory("memory", name), memory_bytes)
        except OSError:
            group.remove()
            raise
        return group

    def open(self, name: str) -> Cgroup | None:
        """The cgroup of that name; None if it does not exist."""
        existing = [directory for directory in self._directories(name) if os.path.isdir(directory)]
        return Cgroup(existing) if existing else None

    def names(self) -> list[str]:
        """Names of all cgroups that `create` made here, in this process or another."""
        found = set[str]()
        for base in self.bases.values():
            with suppress(OSError):
                found.update(entry.name for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False))
        return sorted(name.removeprefix(_PREFIX) for name in found if name.startswith(_PREFIX))

    def _directories(self, name: str) -> list[str]:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a name of a cgroup: {name!r}")
        return [os.path.join(base, _PREFIX + name) for base in self.bases.values()]

    def _directory(self, controller: str, name: str) -> str:
        base = self.bases[controller if self.version == 1 else ""]
        return os.path.join(base, _PREFIX + name)

    def _limit_memory(self, directory: str, memory_bytes: int) -> None:
        if self.version == 2:
            _write(os.path.join(directory, "memory.max"), str(memory_bytes))
            with suppress(OSError):  # a kernel without swap has no such file
                _write(os.path.join(directory, "memory.swap.max"), "0")
            return
        memory, both = (os.path.join(directory, f"memory.{kind}limit_in_bytes") for kind in ("", "memsw."))
        with suppress(OSError):  # memory and swap together may never be less than memory: raise it first
            _write(both, str(memory_bytes))
        _write(memory, str(memory_bytes))
        with suppress(OSError):  # a kernel without swap accounting has no such file
            _write(both, str(memory_bytes))


def find(*, root: str = ROOT, own: str = OWN, systemd: str = SYSTEMD, enable: bool = True) -> Cgroups | str:
    """Where cgroups can be created, or a sentence that says why they cannot. With `enable` False nothing is changed:
    the answer is what enabling the controllers would give."""
    paths = _own_paths(own)
    if os.path.exists(os.path.join(root, "cgroup.controllers")):
        return _find_version_2(root, paths.get("", "/"), os.path.isdir(systemd), enable)
    bases = {name: base for name in ("pids", "memory") if (base := _version_1_base(root, name, paths)) is not None}
    if not bases:
        return f"This process may not create cgroups below {root}. {_AS_ROOT}"
    missing = [name for name in ("pids", "memory") if name not in bases]
    problem = f"the cgroup of this process in the hierarchy {missing[0]} is not writable" if missing else ""
    return Cgroups(1, bases, frozenset(bases), problem)


def current(*, root: str = ROOT, own: str = OWN) -> Cgroup:
    """The cgroup of this process, to read its counters."""
    paths = _own_paths(own)
    if os.path.exists(os.path.join(root, "cgroup.controllers")):
        return Cgroup([_joined(root, paths.get("", "/"))])
    return Cgroup([_joined(os.path.join(root, name), paths[name]) for name in ("pids", "memory") if name in paths])


def oom_kills() -> int | None:
    """Processes that the kernel killed for lack of memory: in the cgroup of this process or, if it has no counter, on
    the machine. None if the kernel does not count them."""
    count = current().oom_kills()
    if count is None:
        words = _words("/proc/vmstat")
        count = int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else None
    return count


def _find_version_2(root: str, own: str, systemd: bool, enable: bool) -> Cgroups | str:
    place = _joined(root, own)
    candidates = (os.path.dirname(place), place) if systemd else (place,)
    for base in candidates:
        if len(base) < len(root.rstrip("/")) or (systemd and not _delegated(base)):
            continue
        if _writable(base):
            return _version_2(base, enable)
    if systemd:
        return f"The cgroup of this process was not delegated to it. {DELEGATION_HINT}"
    return f"This process may not create cgroups below its own, {place}. {_AS_ROOT}"


def _version_2(base: str, enable: bool) -> Cgroups:
    control = os.path.join(base, "cgroup.subtree_control")
    available = set(_words(os.path.join(base, "cgroup.controllers")))
    enabled, problem = set(_words(control)), ""
    for name in ("pids", "memory"):
        if name in enabled:
            continue
        if name not in available:
            problem = f"the controller {name} is not available in {base}"
        elif not enable and _words(os.path.join(base, "cgroup.procs")) and not _is_root_cgroup(base):
            problem = _busy(base)
        elif not enable:
            enabled.add(name)
        else:
            try:
                _write(control, f"+{name}")
                enabled.add(name)
            except OSError as error:
                problem = _busy(base) if _words(os.path.join(base, "cgroup.procs")) else f"{control}: {error.strerror}"
    return Cgroups(2, {"": base}, frozenset(enabled), problem)


def _busy(base: str) -> str:
    # Linux, Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint".
    return f"{base} contains processes, so that it cannot enable controllers for cgroups below it. {DELEGATION_HINT}"


def _is_root_cgroup(base: str) -> bool:
    """Only the root of the machine has no `cgroup.type`. It may have processes and enabled controllers."""
    return not os.path.exists(os.path.join(base, "cgroup.type"))


def _version_1_base(root: str, controller: str, paths: dict[str, str]) -> str | None:
    """A container sees its own cgroup as the root of the mount, while the kernel may tell the path on the host."""
    if controller not in paths:
        return None
    place = _joined(os.path.join(root, controller), paths[controller])
    base = place if os.path.isdir(place) else os.path.join(root, controller)
    return base if os.path.exists(os.path.join(base, "cgroup.procs")) and _writable(base) else None


def _own_paths(own: str) -> dict[str, str]:
    """Path by controller; the path of version 2 has the name ""."""
    found: dict[str, str] = {}
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _delegated(path: str) -> bool:
    """systemd marks a cgroup that it delegates (systemd.resource-control(5), Delegate=)."""
    for name in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(path, name) == b"1":
                return True
    return False


def _joined(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/")).rstrip("/")


def _writable(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK) and os.access(os.path.join(path, "cgroup.procs"), os.W_OK)


def _with_children(directory: str) -> Iterator[str]:
    """The cgroup and those below it, parents first."""
    for inner, _, _ in os.walk(directory):
        yield inner


def _words(path: str) -> list[str]:
    return _text(path).split()


def _text(path: str) -> str:
    """Empty if it cannot be read: cgroups disappear at any time."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    """Writes without O_CREAT: in a cgroup directory that would be refused, elsewhere it would hide a mistake."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)
