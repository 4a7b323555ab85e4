"""Checks of users' files by a daemon that is root: the kernel decides, with the credentials of the user concerned."""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from carma.core.model.values import Owner, TaskSpec
from carma.daemon.probes.pool import PROBES_PER_USER, Probes
from carma.errors import Busy, NotRunnable
from carma.procfs import processes
from carma.testing.launcher_contract import order_of
from tests.hanging_fs import HangingMount, hanging_mount
from tests.launch_orders import spec_of
from tests.unit.launch.test_frameworks import environment_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the identity of another user")

LIMIT_S = 60.0
ALICE, BOB = Owner(54321, 54321, "uid 54321"), Owner(54322, 54322, "uid 54322")
IN_GROUP = Owner(54323, 54400, "uid 54323")
GROUP = 54400
_ACL_USER_OBJECT, _ACL_USER, _ACL_GROUP_OBJECT, _ACL_MASK, _ACL_OTHER = 1, 2, 4, 16, 32
_NO_ID = 0xFFFFFFFF


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach. Those of pytest are closed to others."""
    with tempfile.TemporaryDirectory(prefix="carma-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def with_probes(work: Callable[[Probes], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        probes = Probes()
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                await work(probes)
        finally:
            await probes.close()

    asyncio.run(limited())


async def refused(probes: Probes, owner: Owner, **spec: Any) -> str:
    """The message of the refusal; empty if the command passed."""
    fields = {"command": ("/bin/sh",), "directory": "/", **spec}
    try:
        await probes.check_runnable(TaskSpec(**fields), owner)
    except NotRunnable as error:
        return str(error)
    return ""


def allow_by_acl(path: Path, uid: int) -> None:
    """An access list with read and execute for this user and nothing for all others."""
    entries = [(_ACL_USER_OBJECT, 7, _NO_ID), (_ACL_USER, 5, uid), (_ACL_GROUP_OBJECT, 0, _NO_ID)]
    entries += [(_ACL_MASK, 5, _NO_ID), (_ACL_OTHER, 0, _NO_ID)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", value)
    except OSError as error:
        pytest.skip(f"no access lists on this file system: {error}")


def test_directories_and_programs_are_judged_for_their_user(place: Path) -> None:
    private = place / "private"
    private.mkdir()
    program = private / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    os.chown(private, ALICE.uid, ALICE.gid)
    private.chmod(0o700)

    async def work(probes: Probes) -> None:
        assert await refused(probes, ALICE, directory=str(private)) == ""
        assert await refused(probes, ALICE, command=(str(program),)) == ""
        assert "may not enter" in await refused(probes, BOB, directory=str(private))
        assert "not executable for you" in await refused(probes, BOB, command=(str(program),))
        program.chmod(0o700)  # of root
        assert "not executable for you" in await refused(probes, ALICE, command=(str(program),))

    with_probes(work)


def test_a_group_may_use_what_belongs_to_it(place: Path) -> None:
    shared = place / "shared"
    shared.mkdir()
    os.chown(shared, 0, GROUP)
    shared.chmod(0o750)

    async def work(probes: Probes) -> None:
        assert await refused(probes, IN_GROUP, directory=str(shared)) == ""
        assert "may not enter" in await refused(probes, ALICE, directory=str(shared))

    with_probes(work)


def test_an_access_list_admits_exactly_the_users_in_it(place: Path) -> None:
    listed = place / "listed"
    listed.mkdir()
    allow_by_acl(listed, ALICE.uid)

    async def work(probes: Probes) -> None:
        assert await refused(probes, ALICE, directory=str(listed)) == ""
        assert "may not enter" in await refused(probes, BOB, directory=str(listed))

    with_probes(work)


def test_the_answer_does_not_tell_what_is_in_a_directory_that_is_closed_to_the_user(place: Path) -> None:
    closed = place / "closed"
    (closed / "xx").mkdir(parents=True)
    (closed / "xx" / "program").write_text("#!/bin/sh\n")
    (closed / "xx" / "program").chmod(0o755)
    closed.chmod(0o700)

    async def work(probes: Probes) -> None:
        for make in (
            lambda name: {"directory": f"{closed}/{name}"},
            lambda name: {"directory": f"{closed}/{name}/program"},
            lambda name: {"command": (f"{closed}/{name}/program",)},
            lambda name: {"command": ("program",), "environment": {"PATH": f"{closed}/{name}"}},
            lambda name: {"output": f"{closed}/{name}"},
            lambda name: {"output": f"{closed}/{name}/program"},
            lambda name: {"error": f"{closed}/{name}/program/%j"},
        ):
            there, missing = [await refused(probes, ALICE, **make(name)) for name in ("xx", "yy")]
            assert there.replace("xx", "yy") == missing

    with_probes(work)


def test_output_that_the_user_may_not_write_is_refused(place: Path) -> None:
    own, other = place / "own", place / "other"
    for path, user in ((own, ALICE), (other, BOB)):
        path.mkdir()
        os.chown(path, user.uid, user.gid)
        (path / "log").write_text("")
        os.chown(path / "log", user.uid, user.gid)

    async def work(probes: Probes) -> None:
        for output in ("new", "log", "%j.out", "/dev/null"):
            assert await refused(probes, ALICE, output=str(own / output)) == ""
        for output in ("new", "new-%j.out"):
            assert f"may not create files in {other}" in await refused(probes, ALICE, output=str(other / output))
        assert f"may not write to {other / 'log'}" in await refused(probes, ALICE, error=str(other / "log"))
        other.chmod(0o700)
        assert "cannot be reached: permission denied" in await refused(
            probes, ALICE, output=str(other / "logs" / "new")
        )

    with_probes(work)


def test_frameworks_are_found_as_far_as_the_user_may_read(place: Path) -> None:
    site = environment_at(place / "v", "2.11.0")

    async def work(probes: Probes) -> None:
        async def found(owner: Owner) -> tuple[str, ...]:
            order = order_of(spec_of(str(place / "v" / "bin" / "python")), owner=owner)
            frameworks = await probes.find_frameworks(order)
            assert frameworks.problem == ""
            return frameworks.versions("torch")

        assert await found(ALICE) == ("2.11.0",)
        (site / "torch" / "version.py").chmod(0o600)
        assert await found(ALICE) == ("",)
        (place / "v").chmod(0o700)
        assert await found(ALICE) == ()
        os.chown(place / "v", ALICE.uid, ALICE.gid)
        assert await found(ALICE) == ("",)
        assert await found(BOB) == ()

    with_probes(work)


def test_a_fuse_mount_that_is_open_to_its_user_only_can_be_used_by_that_user(place: Path) -> None:
    """The kernel asks for the real and the saved uid as well; a process that took only the effective one is refused."""
    (place / "remote").mkdir()

    async def work(probes: Probes) -> None:
        assert await refused(probes, ALICE, directory=str(place / "remote")) == ""
        assert "may not enter" in await refused(probes, BOB, directory=str(place / "remote"))

    with hanging_mount(place / "remote", only_for=ALICE.uid):
        with_probes(work)


def test_a_probe_cannot_be_traced_or_read_by_its_user() -> None:
    async def work(probes: Probes) -> None:
        assert await refused(probes, ALICE) == ""
        (pid,) = (one for one in children() if is_of(one, ALICE.uid))
        assert os.stat(f"/proc/{pid}/mem").st_uid == 0  # not dumpable: its files in /proc belong to root
        assert os.stat(f"/proc/{pid}/environ").st_uid == 0

    with_probes(work)


def children() -> list[int]:
    return [pid for pid, about in processes().items() if about.parent == os.getpid()]


def is_of(pid: int, uid: int) -> bool:
    """Whether a process belongs to a user by its real, effective, saved and file system uid."""
    with open(f"/proc/{pid}/status") as file:
        return f"\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in file.read()


def test_hanging_checks_of_one_user_are_limited_and_delay_no_other_user(place: Path) -> None:
    (place / "remote").mkdir()

    async def work(probes: Probes, remote: str) -> None:
        await hang(probes, remote, mount)
        for directory in (remote, "/"):  # the probes that were left behind hold all places of this user
            with pytest.raises(Busy, match=f"{PROBES_PER_USER} earlier checks of your files hang"):
                await refused(probes, ALICE, directory=directory)
        assert await refused(probes, BOB) == ""
        assert (await probes.find_frameworks(order_of(spec_of("true"), owner=ALICE))).problem != ""
        mount.resume()
        while True:
            try:
                assert await refused(probes, ALICE, directory=remote) == ""
                return
            except Busy:
                await asyncio.sleep(0.01)

    with hanging_mount(place / "remote") as mount:
        mount.hang()
        with_probes(lambda probes: work(probes, str(place / "remote")))


def test_a_request_that_waits_for_a_hanging_probe_goes_on_when_that_probe_has_ended(place: Path) -> None:
    (place / "remote").mkdir()

    async def work(probes: Probes) -> None:
        assert await refused(probes, BOB) == ""
        hanging = asyncio.create_task(hang(probes, str(place / "remote"), mount))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(refused(probes, ALICE))
        await hanging
        assert not waiting.done()
        mount.resume()
        assert await waiting == ""

    with hanging_mount(place / "remote") as mount:
        mount.hang()
        with_probes(work)


async def hang(probes: Probes, remote: str, mount: HangingMount) -> None:
    """All probes of ALICE hang, and no request waits for their answers."""
    asked = [asyncio.create_task(refused(probes, ALICE, directory=remote)) for _ in range(PROBES_PER_USER)]
    await asyncio.to_thread(mount.until_held, PROBES_PER_USER)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


def test_the_end_of_the_pool_does_not_wait_for_a_probe_that_hangs(place: Path) -> None:
    (place / "remote").mkdir()

    async def work(probes: Probes) -> None:
        await hang(probes, str(place / "remote"), mount)
        await probes.close()  # does not return within the limit of the test if it waits for the probe
        assert any(is_of(pid, ALICE.uid) for pid in children())
        mount.resume()

    with hanging_mount(place / "remote") as mount:
        mount.hang()
        with_probes(work)
