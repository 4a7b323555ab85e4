"""Cgroups: on the hierarchies of this machine (needs root), and on a directory tree that imitates version 2."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import cgroups
from carma.cgroups import Cgroup, Cgroups
from tests.boxes import wait_until

JOIN = 'for file in {files}; do echo 0 > "$file"; done; '
FORKS = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
UNIT = "/system.slice/carma.service"


@pytest.fixture(params=[cgroups.ROOT, os.path.join(cgroups.ROOT, "unified")])
def groups(request: pytest.FixtureRequest) -> Cgroups:
    found = cgroups.find(root=request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def limited() -> Cgroups:
    found = cgroups.find()
    if isinstance(found, str) or not (found.limits_pids and found.limits_memory):
        pytest.skip(f"no cgroups with limits: {found if isinstance(found, str) else found.problem}")
    return found


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    made = f"test-{secrets.token_hex(8)}"
    yield made
    for fixture in ("groups", "limited"):
        if fixture in request.fixturenames and (group := request.getfixturevalue(fixture).open(made)) is not None:
            group.kill()
            group.remove()


def started_in(group: Cgroup, script: str) -> subprocess.Popen[bytes]:
    join = JOIN.format(files=" ".join(group.procs_files))
    return subprocess.Popen(["/bin/sh", "-c", join + script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def end_of(process: subprocess.Popen[bytes]) -> int:
    process.communicate()
    return process.returncode


def test_a_process_that_joined_and_its_children_are_members(groups: Cgroups, name: str) -> None:
    group = groups.create(name)
    assert group.members() == []
    process = started_in(group, "sleep 1000 & echo $!; wait")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert group.members() == sorted((process.pid, child))
    assert groups.names().count(name) == 1
    assert group.kill()
    end_of(process)
    assert group.members() == []


def test_kill_ends_processes_that_fork_all_the_time(limited: Cgroups, name: str) -> None:
    group = limited.create(name, pids=50)
    process = started_in(group, f"exec {sys.executable} -c '{FORKS}'")
    wait_until(lambda: bool(group.pids_refused()), "the limit was never met")
    assert group.kill()
    assert end_of(process) == -9
    assert group.members() == []


def test_create_twice_is_the_same_cgroup_and_remove_leaves_one_in_use(groups: Cgroups, name: str) -> None:
    group = groups.create(name)
    process = started_in(groups.create(name), "echo joined; exec sleep 1000")
    assert process.stdout is not None
    assert process.stdout.readline() == b"joined\n"
    group.remove()
    assert groups.open(name) is not None
    assert group.members() == [process.pid]
    group.kill()
    end_of(process)
    group.remove()
    assert groups.open(name) is None
    assert name not in groups.names()
    group.remove()


def test_a_cgroup_can_be_removed_as_soon_as_its_processes_were_killed(groups: Cgroups, name: str) -> None:
    """A process with much memory takes a while to end after it has left the list of members."""
    group = groups.create(name)
    script = 'held = bytearray(b"x") * (256 << 20); print("held", flush=True); import time; time.sleep(1000)'
    process = started_in(group, f"exec {sys.executable} -c '{script}'")
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert group.kill()
    group.remove()
    assert groups.open(name) is None
    end_of(process)


def test_the_limit_of_processes_holds_and_refusals_are_counted(limited: Cgroups, name: str) -> None:
    group = limited.create(name, pids=10)
    process = started_in(group, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1000 & done; sleep 1000")
    wait_until(lambda: bool(group.pids_refused()), "the limit was never met")
    assert len(group.members()) <= 10
    group.kill()
    end_of(process)


def test_the_memory_limit_holds_and_kills_are_counted(limited: Cgroups, name: str) -> None:
    group = limited.create(name, memory_bytes=64 << 20)
    assert group.oom_kills() == 0
    group = limited.create(name, memory_bytes=128 << 20)  # limits may be raised
    group = limited.create(name, memory_bytes=64 << 20)
    script = "x = bytearray(256 << 20)"
    assert end_of(started_in(group, f"exec {sys.executable} -c '{script}'")) == -9
    assert group.oom_kills() == 1


def test_a_program_without_site_packages_can_import_it() -> None:
    source = str(Path(cgroups.__file__).parents[1])
    code = (
        f"import sys; sys.path.append({source!r}); from carma import cgroups; print(type(cgroups.find(enable=False)))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a b", "x" * 300])
def test_a_name_cannot_leave_the_directory(bad: str, tmp_path: Path) -> None:
    groups = Cgroups(2, {"": str(tmp_path)}, frozenset())
    if bad == "..":
        assert groups.open(bad) is None  # the prefix makes it an ordinary name
    else:
        with pytest.raises(ValueError):
            groups.create(bad)


class Tree:
    """Files as version 2 has them, for a unit with the daemon in a subgroup."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cgroup"
        self.unit = self.root / UNIT.lstrip("/")
        for place in (self.root, self.unit, self.unit / "daemon"):
            place.mkdir(parents=True, exist_ok=True)
            (place / "cgroup.controllers").write_text("cpu memory pids\n")
            for name in ("cgroup.subtree_control", "cgroup.procs", "cgroup.type"):
                (place / name).write_text("")
        self.own = root / "own"
        self.own.write_text(f"0::{UNIT}/daemon\n")
        self.systemd = root / "systemd"
        self.systemd.mkdir()
        self.delegated: set[str] = {str(self.unit)}

    def find(self, *, enable: bool = True) -> Cgroups | str:
        return cgroups.find(root=str(self.root), own=str(self.own), systemd=str(self.systemd), enable=enable)

    def child(self, name: str, **files: str) -> Path:
        place = self.unit / f"carma.{name}"
        place.mkdir()
        for file, text in files.items():
            (place / file.replace("_", ".", 1)).write_text(text)
        return place


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path)

    def getxattr(path: str, name: str) -> bytes:
        if name == "trusted.delegate" and path in made.delegated:
            return b"1"
        raise OSError("no such attribute")

    monkeypatch.setattr(os, "getxattr", getxattr)
    return made


def test_version_2_enables_the_controllers_of_a_delegated_unit(tree: Tree) -> None:
    found = tree.find()
    assert isinstance(found, Cgroups)
    assert (found.version, found.limits_pids, found.limits_memory, found.problem) == (2, True, True, "")
    assert "+memory" in (tree.unit / "cgroup.subtree_control").read_text()


def test_looking_only_changes_nothing(tree: Tree) -> None:
    found = tree.find(enable=False)
    assert isinstance(found, Cgroups)
    assert (found.limits_pids, found.limits_memory) == (True, True)
    assert (tree.unit / "cgroup.subtree_control").read_text() == ""


def test_a_unit_that_contains_processes_has_cgroups_without_limits(tree: Tree) -> None:
    (tree.unit / "cgroup.procs").write_text("17\n")
    found = tree.find(enable=False)
    assert isinstance(found, Cgroups)
    assert (found.limits_pids, found.limits_memory) == (False, False)
    assert "DelegateSubgroup=daemon" in found.problem


def test_a_controller_that_is_missing_is_named(tree: Tree) -> None:
    (tree.unit / "cgroup.controllers").write_text("cpu memory\n")
    found = tree.find()
    assert isinstance(found, Cgroups)
    assert (found.limits_pids, found.limits_memory) == (False, True)
    assert "pids" in found.problem


def test_a_cgroup_that_systemd_did_not_delegate_is_not_used(tree: Tree) -> None:
    tree.delegated.clear()
    found = tree.find()
    assert isinstance(found, str)
    assert "Delegate=yes" in found


def test_without_systemd_the_own_cgroup_is_used(tree: Tree) -> None:
    tree.delegated.clear()
    tree.systemd.rmdir()
    found = tree.find()
    assert isinstance(found, Cgroups)
    assert "+memory" in (tree.unit / "daemon" / "cgroup.subtree_control").read_text()


def test_version_2_limits_are_written_and_its_counters_read(tree: Tree) -> None:
    found = tree.find()
    assert isinstance(found, Cgroups)
    place = tree.child(
        "a.1",
        pids_max="",
        memory_max="",
        memory_events="low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\n",
        pids_events="max 4\n",
        cgroup_procs="",
    )
    (place / "memory.swap.max").write_text("")
    group = found.create("a.1", pids=20, memory_bytes=1 << 20)
    assert (place / "pids.max").read_text() == "20"
    assert (place / "memory.max").read_text() == "1048576"
    assert (place / "memory.swap.max").read_text() == "0"
    assert (group.oom_kills(), group.pids_refused()) == (3, 4)
    assert group.procs_files == [str(place / "cgroup.procs")]
    assert found.names() == ["a.1"]


def test_hierarchies_of_version_1_are_used_below_the_own_cgroup(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/\n3:pids:/user/me\n2:memory:/docker/abc\n0::/\n")
    for place in ("pids/user/me", "memory"):  # a container shows its own memory cgroup as the root
        (tmp_path / "root" / place).mkdir(parents=True)
        (tmp_path / "root" / place / "cgroup.procs").write_text("")
    found = cgroups.find(root=str(tmp_path / "root"), own=str(own))
    assert isinstance(found, Cgroups)
    assert (found.version, found.limits_pids, found.limits_memory) == (1, True, True)
    group = found.create("x")
    assert [os.path.relpath(path, tmp_path / "root") for path in group.directories] == [
        "pids/user/me/carma.x",
        "memory/carma.x",
    ]


def test_no_hierarchy_at_all_is_a_sentence(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert isinstance(cgroups.find(root=str(tmp_path), own=str(own)), str)


def test_oom_kills_are_counted_or_none() -> None:
    count = cgroups.oom_kills()
    assert count is None or count >= 0
