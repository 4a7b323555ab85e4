"""How the kernel limits the processes and the memory of a trial run on this machine.

1. Where systemd runs: a transient scope (`systemd-run --scope`), which is a cgroup that systemd creates. Not a cgroup
   below the unit's own: with controllers enabled there, systemd could not start the daemon again while tasks run in
   cgroups below it (EBUSY, systemd pull request 41304).
2. Otherwise a cgroup of its own, where this process may create cgroups with limits (`carma.cgroups`).
3. Otherwise only RLIMIT_NPROC in the sandbox's user namespace, and the supervisor, which counts by polling.
   RLIMIT_NPROC does not apply to root (setrlimit(2)), so that for root only the supervisor counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from carma import cgroups
from carma.cgroups import Cgroup, Cgroups

_PROBE_LIMIT_S = 10.0
# From systemd 253 on, a scope is stopped when the kernel kills one of its processes for memory (DefaultOOMPolicy= in
# systemd-system.conf(5)). The supervisor is in the scope, and would be ended before it can report the reason.
_KEEP_AFTER_OOM = ("-p", "OOMPolicy=continue")
_NAME = "box"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class KernelLimits:
    """The means of this machine. If both are None, only RLIMIT_NPROC limits. `problem`: why a means is missing."""

    groups: Cgroups | None = None
    scope: tuple[str, ...] | None = None  # the start of a command line, without limits
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Whether the kernel limits both processes and memory."""
        if self.groups is not None:
            return self.groups.limits_pids and self.groups.limits_memory
        return self.scope is not None

    @contextlib.contextmanager
    def cgroup(self, processes: int, memory_bytes: int) -> Iterator[Cgroup | None]:
        """A cgroup for one run; None without cgroups. Its processes are killed at the end."""
        group = None if self.groups is None else self._create(self.groups, processes, memory_bytes)
        try:
            yield group
        finally:
            if group is not None:
                group.kill(limit_s=1.0)
                group.remove()

    def _create(self, groups: Cgroups, processes: int, memory_bytes: int) -> Cgroup | None:
        _remove_old(groups)
        try:
            name = f"{_NAME}-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"  # a pid may be used again
            return groups.create(name, pids=processes, memory_bytes=memory_bytes)
        except OSError:
            return None

    def prefix(self, processes: int, memory_bytes: int) -> tuple[str, ...]:
        """The start of the sandbox's command line. The two processes of the sandbox itself count too."""
        if self.scope is None:
            return ()
        limits = (f"TasksMax={processes + 2}", f"MemoryMax={memory_bytes}", "MemorySwapMax=0")
        return (*self.scope, *(word for limit in limits for word in ("-p", limit)), "--")


def _remove_old(groups: Cgroups) -> None:
    """Cgroups of daemons that were killed, or whose processes were inside a file system that hung."""
    for name in groups.names():
        kind, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if kind == _NAME and pid.isdigit() and int(pid) != os.getpid() and not os.path.exists(f"/proc/{pid}"):
            group = groups.open(name)
            if group is not None:
                group.remove()  # one that is in use stays


@cache
def kernel_limits() -> KernelLimits:
    """The means of this process; found once."""
    return find(cgroups.find, systemd_scope(os.environ), _scope_works)


def survey(environ: Mapping[str, str], pid: int | None = None) -> KernelLimits:
    """What `kernel_limits` would find, in this process or another. Starts and changes nothing."""
    own = cgroups.OWN if pid is None else f"/proc/{pid}/cgroup"
    return find(lambda: cgroups.find(own=own, enable=False), systemd_scope(environ), lambda _scope: True)


def find(
    find_groups: Callable[[], Cgroups | str], scope: tuple[str, ...] | str, works: Callable[[tuple[str, ...]], bool]
) -> KernelLimits:
    """The first of the three that limits both processes and memory, otherwise what there is. Older versions of systemd
    refuse the property of `_KEEP_AFTER_OOM` for scopes, and do not need it."""
    if isinstance(scope, tuple):
        for words in ((*scope, *_KEEP_AFTER_OOM), scope):
            if works(words):
                return KernelLimits(scope=words)
    groups = find_groups()
    if isinstance(groups, str):
        return KernelLimits(problem=groups)
    complete = groups.limits_pids and groups.limits_memory
    return KernelLimits(groups=groups, problem="" if complete else groups.problem)


def systemd_scope(environ: Mapping[str, str], systemd: str = cgroups.SYSTEMD) -> tuple[str, ...] | str:
    """The start of a command line, or a sentence that says why systemd cannot be used. Starts nothing."""
    program = shutil.which("systemd-run", path=environ.get("PATH", os.defpath))
    if program is None or not os.path.isdir(systemd):
        return "systemd does not run here."
    scope = (program, "--scope", "--quiet", "--collect")
    if os.geteuid() == 0:
        return scope
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.exists(os.path.join(runtime, "systemd", "private")) or not runtime:
        return "This user has no service manager (loginctl enable-linger starts one)."
    return (program, "--user", *scope[1:])


def _scope_works(scope: tuple[str, ...]) -> bool:
    try:
        done = subprocess.run(
            [*scope, "-p", "TasksMax=64", "-p", "MemoryMax=256M", "--", "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
