"""Every sandbox of this directory is inside a cgroup of its own: if a limit fails, the machine is not affected.

The test process is not in it, so that its own threads and memory are neither limited nor counted there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from carma import cgroups
from carma.cgroups import Cgroup, Cgroups
from carma.trial.kernel_limits import KernelLimits
from tests.boxes import NOBODY, VARIANTS, DelegatedCgroups, SandboxVariant, folder_for_all, variant_or_skip
from tests.sandbox.programs import Python

GUARD_PIDS, GUARD_BYTES = 2_000, 3 << 30

folder = pytest.fixture(folder_for_all)


@dataclass(frozen=True)
class Guard:
    """A cgroup with limits around one sandbox and around the cgroup that the sandbox makes for its command."""

    group: Cgroup
    below: Cgroups
    own: Cgroup  # below `group`: of the processes of the sandbox that are not in the cgroup of its command

    def members(self) -> list[int]:
        return self.group.members()

    def peak(self) -> int | None:
        """The most processes and threads that were in it at one time; None before Linux 6.6."""
        file = Path(self.group.directories[0], "pids.peak")
        return int(file.read_text()) if file.exists() else None


def guard_or_problem(own: Path) -> Guard | str:
    """`own`: a file to write, which says like /proc/self/cgroup where the cgroups below the guard are created."""
    found = cgroups.find()
    if isinstance(found, str):
        return found
    if not (found.limits_pids and found.limits_memory):
        return found.problem
    group = found.create(f"guard-{secrets.token_hex(8)}", pids=GUARD_PIDS, memory_bytes=GUARD_BYTES)
    root = Path(cgroups.ROOT)
    names = ["pids", "memory"] if found.version == 1 else [""]
    bases = [root / name for name in names]
    places = [Path(directory).relative_to(base) for directory, base in zip(group.directories, bases, strict=True)]
    own.write_text("".join(f"0:{name}:/{place}\n" for name, place in zip(names, places, strict=True)))
    if os.geteuid() == 0:  # version 2 lets a user move a process only between cgroups below one of theirs
        for file in group.procs_files:
            os.chown(file, NOBODY.uid, NOBODY.gid)
    below = cgroups.find(own=str(own), systemd="/nonexistent")
    assert isinstance(below, Cgroups), below
    return Guard(group, below, below.create("sandbox"))


@pytest.fixture
def guard_if_possible(tmp_path: Path) -> Iterator[Guard | str]:
    made = guard_or_problem(tmp_path / "cgroup")
    yield made
    if isinstance(made, Guard):
        made.group.kill()
        made.group.remove()
        assert not os.path.exists(made.group.directories[0]), "a process is still in the guard"


@pytest.fixture
def guard(guard_if_possible: Guard | str) -> Guard:
    if isinstance(guard_if_possible, str):
        pytest.skip(f"bombs need a cgroup around them: {guard_if_possible}")
    return guard_if_possible


@pytest.fixture(params=["cgroup", "no-cgroup"])
def kernel_limits(request: pytest.FixtureRequest, guard_if_possible: Guard | str) -> KernelLimits:
    """`any`, for tests that do not depend on limits: a cgroup if possible."""
    if request.param == "no-cgroup" or (request.param == "any" and isinstance(guard_if_possible, str)):
        return KernelLimits(problem="the test wants none")
    if isinstance(guard_if_possible, str):
        pytest.skip(f"no cgroup with limits can be created: {guard_if_possible}")
    return DelegatedCgroups(groups=guard_if_possible.below)


@pytest.fixture(params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, kernel_limits: KernelLimits, guard_if_possible: Guard | str
) -> Iterator[SandboxVariant]:
    procs_files = [] if isinstance(guard_if_possible, str) else guard_if_possible.own.procs_files
    made = variant_or_skip(request.param, kernel_limits, procs_files)
    yield made
    made.sandbox.close()


@pytest.fixture(scope="session")
def python() -> Python:
    """An interpreter that another user can execute: the one of the tests may be in a directory of root."""
    demote = {"user": NOBODY.uid, "group": NOBODY.gid, "extra_groups": []} if os.geteuid() == 0 else {}
    for path in ("/usr/bin/python3", "/usr/local/bin/python3", shutil.which("python3") or ""):
        if os.path.exists(path):
            done = subprocess.run([path, "-I", "-S", "-c", ""], cwd="/", stderr=subprocess.DEVNULL, **demote)  # type: ignore[call-overload]
            if done.returncode == 0:
                return Python(path)
    pytest.skip("there is no Python that an ordinary user can execute")
