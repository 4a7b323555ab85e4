"""Every test of this directory runs inside a cgroup of its own: if a limit fails, the machine is not affected."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from carma import cgroups
from carma.cgroups import Cgroup, Cgroups
from carma.trial.confinement import Confinement
from tests.boxes import NOBODY, WAYS, OpenedCgroups, Way, folder_for_all, way_or_skip
from tests.sandbox.programs import Python

GUARD_PIDS, GUARD_BYTES = 2_000, 3 << 30

folder = pytest.fixture(folder_for_all)


@pytest.fixture
def guard() -> Iterator[Cgroup]:
    """A cgroup with limits that this process is in during the test."""
    found = cgroups.find()
    if isinstance(found, str) or not (found.limits_pids and found.limits_memory):
        pytest.skip(f"bombs need a cgroup around them: {found if isinstance(found, str) else found.problem}")
    name = f"guard-{secrets.token_hex(8)}"
    group = found.create(name, pids=GUARD_PIDS, memory_bytes=GUARD_BYTES)
    before = cgroups.current()
    move(group)
    yield group
    move(before)
    group.kill()
    group.remove()
    assert found.open(name) is None, "a process is still there, or its cgroup cannot be removed"


def move(group: Cgroup) -> None:
    for file in group.procs_files:
        with open(file, "w") as procs:
            procs.write(str(os.getpid()))


@pytest.fixture(params=["cgroup", "no-cgroup"])
def confinement(request: pytest.FixtureRequest) -> Confinement:
    request.getfixturevalue("guard")
    if request.param == "no-cgroup":
        return Confinement(problem="the test wants none")
    groups = cgroups.find()  # below the guard
    if not isinstance(groups, Cgroups) or not (groups.limits_pids and groups.limits_memory):
        pytest.skip("this process cannot create cgroups with limits below one that it is in")
    return OpenedCgroups(groups=groups)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, confinement: Confinement) -> Iterator[Way]:
    made = way_or_skip(request.param, confinement)
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
