"""Sandboxes for tests in their three variants: by root for itself, by root for another user, by an ordinary user."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import carma
from carma.cgroups import Cgroup, Cgroups
from carma.core.model.values import Owner
from carma.trial.kernel_limits import KernelLimits
from carma.trial.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxRun

NOBODY = Owner(65534, 65534, "nobody")
PATIENCE_S = 180.0
# Not box/main.py, so that a test can change a module first. The ordinary user is taken on after everything is imported:
# the interpreter may be where only root can read.
_LAUNCHER = """
import ctypes, os, sys
sys.path.insert(0, {source!r})
from carma.trial.box import namespaces
for file in {procs_files}:
    with open(file, "w") as procs:
        procs.write("0")
{change}
if {ordinary}:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after an exec by that user
sys.exit(namespaces.main())
"""
VARIANTS = ("self", "root-for-another", "ordinary")


class SandboxVariant:
    """Who makes the sandbox. `owner` is the user that the command runs as."""

    def __init__(self, name: str, kernel_limits: KernelLimits | None = None, procs_files: Sequence[str] = ()) -> None:
        """`kernel_limits`: None for what the machine has. `procs_files`: of the cgroup that the sandbox joins first."""
        self.name = name
        self.sandbox = Sandbox(kernel_limits=kernel_limits)
        self._procs_files = list(procs_files)
        if name == "ordinary" or procs_files:
            self.change("")
        self.owner = NOBODY if name != "self" else Owner(os.geteuid(), os.getegid(), "me")

    def change(self, statements: str) -> None:
        """The program of the sandbox executes these statements first; it has imported `namespaces`."""
        source = str(Path(carma.__file__).parents[1])
        ordinary = self.name == "ordinary"
        program = _LAUNCHER.format(source=source, procs_files=self._procs_files, change=statements, ordinary=ordinary)
        self.sandbox.launcher = (sys.executable, "-I", "-S", "-X", "utf8", "-c", program)

    def run(
        self,
        script: str,
        folder: Path,
        *,
        limits: SandboxLimits = SandboxLimits(seconds=PATIENCE_S),
        environment: Mapping[str, str] | None = None,
        keep: Path | None = None,
        command: tuple[str, ...] | None = None,
    ) -> SandboxResult:
        inside = folder / "inside"
        inside.mkdir(exist_ok=True)
        return self.sandbox.run(
            SandboxRun(
                command=command or ("/bin/sh", "-c", script),
                directory=str(folder / "work"),
                environment=environment or {"PATH": os.defpath, "HOME": str(folder)},
                owner=self.owner if self.name == "root-for-another" else None,
                inside=str(inside),
                awaited=("report.json", '"stop": *"steps"'),
                files={"report.json": 1_000, "events.bin": 1_000},
                notes=("steps",),
                keep=None if keep is None else str(keep),
                limits=limits,
            )
        )


@functools.cache
def refusal(name: str) -> str | None:
    """Why this machine allows no such sandbox; None if it does."""
    if name != "self" and os.geteuid() != 0:
        return "needs root"
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        open_to_all(folder)
        ended = SandboxVariant(name).run("true", folder)
        return ended.status.why if ended.status.ended == "refused" else None
    finally:
        shutil.rmtree(folder)


def variant_or_skip(
    name: str, kernel_limits: KernelLimits | None = None, procs_files: Sequence[str] = ()
) -> SandboxVariant:
    if (why := refusal(name)) is not None:
        pytest.skip(f"no sandbox of this variant: {why}")
    return SandboxVariant(name, kernel_limits, procs_files)


class DelegatedCgroups(KernelLimits):
    """The sandbox of the ordinary user joins a cgroup that root created, as if root had delegated it."""

    def _create(self, groups: Cgroups, processes: int, memory_bytes: int) -> Cgroup | None:
        group = super()._create(groups, processes, memory_bytes)
        for file in () if group is None else group.procs_files:
            os.chown(file, NOBODY.uid, NOBODY.gid)
        return group


def open_to_all(folder: Path) -> None:
    """A working directory of the other user, below one that all users may enter: pytest's own is closed to them."""
    folder.chmod(0o755)
    (folder / "work").mkdir()
    if os.geteuid() == 0:
        os.chown(folder / "work", NOBODY.uid, NOBODY.gid)


def folder_for_all() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="carma-box-", dir="/tmp"))
    open_to_all(folder)
    yield folder
    shutil.rmtree(folder)


def own(path: Path, owner: Owner) -> Path:
    if os.geteuid() == 0:
        os.chown(path, owner.uid, owner.gid)
    return path


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Several test processes run side by side: those that use the same resource of the machine take turns."""
    with open(Path(tempfile.gettempdir(), f"carma-test-{what}-{os.geteuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def marker() -> str:
    """A word by which a process is found again; a number of seconds to sleep, too."""
    return f"{random.SystemRandom().randrange(10**8, 10**9)}"


def processes_with(word: str) -> list[int]:
    """The machine's processes that have this word in their command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(int(name))
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
