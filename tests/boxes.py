"""Boxes for tests, made in each way that there is: by root for itself and for another user, and by an ordinary user."""

from __future__ import annotations

import functools
import os
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
from carma.trial.confinement import Confinement
from carma.trial.sandbox import Boxed, Ended, Limits, Sandbox

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
WAYS = ("self", "root-for-another", "ordinary")


class Way:
    """One way to make a box; `owner` is the user that the command runs as."""

    def __init__(self, name: str, confinement: Confinement | None = None, procs_files: Sequence[str] = ()) -> None:
        """`confinement`: None for what the machine has. `procs_files`: of the cgroup that the sandbox joins first."""
        self.name = name
        self.sandbox = Sandbox(confinement=confinement)
        self._procs_files = list(procs_files)
        if name == "ordinary" or procs_files:
            self.change("")
        self.owner = NOBODY if name != "self" else Owner(os.geteuid(), os.getegid(), "me")

    def change(self, statements: str) -> None:
        """Lets the sandbox's own program execute these statements first; it has imported `namespaces`."""
        source = str(Path(carma.__file__).parents[1])
        ordinary = self.name == "ordinary"
        program = _LAUNCHER.format(source=source, procs_files=self._procs_files, change=statements, ordinary=ordinary)
        self.sandbox.launcher = (sys.executable, "-I", "-S", "-X", "utf8", "-c", program)

    def run(
        self,
        script: str,
        folder: Path,
        *,
        limits: Limits = Limits(seconds=PATIENCE_S),
        environment: Mapping[str, str] | None = None,
        keep: Path | None = None,
        command: tuple[str, ...] | None = None,
    ) -> Ended:
        inside = folder / "inside"
        inside.mkdir(exist_ok=True)
        return self.sandbox.run(
            Boxed(
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
    """Why there are no such boxes here; None when there are."""
    if name != "self" and os.geteuid() != 0:
        return "needs root"
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        open_to_all(folder)
        ended = Way(name).run("true", folder)
        return ended.status.why if ended.status.ended == "refused" else None
    finally:
        shutil.rmtree(folder)


def way_or_skip(name: str, confinement: Confinement | None = None, procs_files: Sequence[str] = ()) -> Way:
    if (why := refusal(name)) is not None:
        pytest.skip(f"no box of this kind: {why}")
    return Way(name, confinement, procs_files)


class OpenedCgroups(Confinement):
    """The sandbox of the ordinary user joins a cgroup that root created: as if root had delegated it."""

    def _create(self, groups: Cgroups, processes: int, memory_bytes: int) -> Cgroup | None:
        group = super()._create(groups, processes, memory_bytes)
        for file in () if group is None else group.procs_files:
            os.chown(file, NOBODY.uid, NOBODY.gid)
        return group


def open_to_all(folder: Path) -> None:
    """A working directory that is the other user's, below one that everybody may pass: pytest's own is closed."""
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
