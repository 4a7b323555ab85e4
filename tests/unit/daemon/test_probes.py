"""Probes: processes that read files named by a user. Starts, reuse, limits, failures; real processes throughout."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carma.core.model.values import Owner, TaskSpec
from carma.daemon.probes import pool as module
from carma.daemon.probes.pool import PROBES_PER_USER, WAITING_PER_USER, Probes
from carma.daemon.probes.program import Request, take_identity
from carma.errors import Busy, CarmaError, NotRunnable
from carma.procfs import processes
from carma.testing.launcher_contract import order_of
from tests.launch_orders import gone, spec_of
from tests.unit.launch.test_frameworks import environment_at

LIMIT_S = 60.0
ME = Owner(os.geteuid(), os.getegid(), "me")
RUNNABLE = spec_of("true")


def with_probes(work: Callable[[Probes], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        probes = Probes()
        try:
            async with asyncio.timeout(LIMIT_S):
                await work(probes)
        finally:
            await probes.close()

    asyncio.run(limited())


def children() -> set[int]:
    """The living child processes of this one."""
    return {pid for pid, one in processes().items() if one.parent == os.getpid() and not one.ended}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_one_process_answers_request_after_request(tmp_path: Path) -> None:
    async def work(probes: Probes) -> None:
        before = children()
        await probes.check_runnable(RUNNABLE, ME)
        started = children() - before
        for _ in range(20):
            await probes.check_runnable(RUNNABLE, ME)
            with pytest.raises(NotRunnable, match="does not exist"):
                await probes.check_runnable(spec_of("true", directory=tmp_path / "missing"), ME)
        assert len(started) == 1
        assert children() - before == started

    with_probes(work)


def test_a_refusal_arrives_with_its_hint(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")

    async def work(probes: Probes) -> None:
        with pytest.raises(NotRunnable, match="executable") as caught:
            await probes.check_runnable(spec_of("./script", directory=tmp_path), ME)
        assert "chmod +x" in caught.value.hint
        with pytest.raises(NotRunnable, match="is a directory"):
            await probes.check_runnable(spec_of("true", directory=tmp_path, output=str(tmp_path)), ME)

    with_probes(work)


def test_a_request_that_the_check_cannot_handle_is_an_error_and_not_the_end_of_the_probe() -> None:
    async def work(probes: Probes) -> None:
        before = children()
        with pytest.raises(CarmaError, match="null byte"):
            await probes.check_runnable(TaskSpec(command=("true",), directory="/\0"), ME)
        started = children() - before
        await probes.check_runnable(RUNNABLE, ME)
        assert children() - before == started

    with_probes(work)


def test_requests_beyond_the_probes_of_a_user_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUBMIT_LIMIT_S", LIMIT_S)

    async def work(probes: Probes) -> None:
        before = children()
        count = PROBES_PER_USER + WAITING_PER_USER
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(probes.check_runnable(RUNNABLE, ME))
            await asyncio.sleep(0)
            with pytest.raises(Busy, match=f"{count} of your requests"):
                await probes.check_runnable(RUNNABLE, ME)
        assert len(children() - before) <= PROBES_PER_USER
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_the_number_of_idle_probes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_PROBES", 1)

    async def work(probes: Probes) -> None:
        before = children()
        await asyncio.gather(*(probes.check_runnable(RUNNABLE, ME) for _ in range(PROBES_PER_USER)))
        await until(lambda: len(children() - before) == 1)

    with_probes(work)


def test_an_old_probe_is_replaced_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGE_LIMIT_S", 0.05)

    async def work(probes: Probes) -> None:
        before = children()
        await probes.check_runnable(RUNNABLE, ME)
        (first,) = children() - before
        await until(lambda: first not in children())
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


# Failures. Each leaves all counters as they were.


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_probe_that_cannot_be_started_is_busy_and_takes_no_place(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async def work(probes: Probes) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            for _ in range(2 * (PROBES_PER_USER + WAITING_PER_USER)):
                with pytest.raises(Busy, match="start a process"):
                    await probes.check_runnable(RUNNABLE, ME)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_without_descriptors_a_check_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def work(probes: Probes) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", fail)
            with pytest.raises(Busy):
                await probes.check_runnable(RUNNABLE, ME)
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_a_probe_that_was_killed_while_idle_is_replaced_unnoticed() -> None:
    async def work(probes: Probes) -> None:
        before = children()
        for _ in range(3):
            await probes.check_runnable(RUNNABLE, ME)
            (pid,) = children() - before
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: gone(pid))  # type: ignore[misc]
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_a_probe_that_always_ends_without_an_answer_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(probes: Probes) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_PROGRAM", "import sys; sys.exit(3)")
            for _ in range(2 * PROBES_PER_USER):
                with pytest.raises(Busy, match="ended twice"):
                    await probes.check_runnable(RUNNABLE, ME)
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(probes: Probes) -> None:
        monkeypatch.setattr(module, "_PROGRAM", "import os\nwhile True: os.write(1, b'x' * 65536)")
        with pytest.raises(Busy):
            await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_a_probe_that_does_not_answer_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(probes: Probes) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_PROGRAM", "import time; time.sleep(1000)")
            patch.setattr(module, "SUBMIT_LIMIT_S", 0.05)
            patch.setattr(module, "LAUNCH_LIMIT_S", 0.05)
            before = children()
            with pytest.raises(NotRunnable, match=r"did not answer within 0\.05 s"):
                await probes.check_runnable(RUNNABLE, ME)
            found = await probes.find_frameworks(order_of(RUNNABLE))
            assert "did not answer within 0.05 s" in found.problem
            await until(lambda: children() == before)
        await probes.check_runnable(RUNNABLE, ME)

    with_probes(work)


def test_a_cancelled_check_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(probes: Probes) -> None:
        before = children()
        with monkeypatch.context() as patch:
            patch.setattr(module, "_PROGRAM", "import time; time.sleep(1000)")
            asked = [asyncio.create_task(probes.check_runnable(RUNNABLE, ME)) for _ in range(2 * PROBES_PER_USER)]
            await until(lambda: len(children() - before) == PROBES_PER_USER)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await until(lambda: children() == before)
        await asyncio.gather(*(probes.check_runnable(RUNNABLE, ME) for _ in range(2 * PROBES_PER_USER)))

    with_probes(work)


# What a probe inherits, and its end.


def test_a_probe_inherits_no_descriptor_and_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the daemon")

    async def work(probes: Probes) -> None:
        before = children()
        await probes.check_runnable(RUNNABLE, ME)
        (pid,) = children() - before
        links = {name: os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        assert set(links) == {"0", "1", "2"}
        assert links["0"] == links["1"]
        assert links["2"] == "/dev/null"
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        assert os.readlink(f"/proc/{pid}/cwd") == "/"

    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        with_probes(work)


def test_a_probe_ends_when_the_socket_of_the_daemon_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        probe = module._start(theirs)
        theirs.close()
        ours.sendall(b"null\n")
        ours.close()
        assert probe.wait(LIMIT_S) == 0


def test_a_probe_that_hangs_ends_itself_when_its_daemon_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = "probe.SELF_DESTRUCT_S = 1; probe.answer = lambda _: time.sleep(1000); probe.main()"
    program = f"import sys, time; sys.path[:] = sys.argv[1:]; from carma.daemon.probes import program as probe; {hang}"
    monkeypatch.setattr(module, "_PROGRAM", program)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        probe = module._start(theirs)
        theirs.close()
        request = msgspec.json.encode(Request(question="runnable", spec=RUNNABLE))
        ours.sendall(b"null\n" + request + b"\n")
        ours.close()
        assert probe.wait(LIMIT_S) == -signal.SIGALRM


def test_the_groups_of_the_user_are_taken_before_the_ids_that_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    for name in ("initgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *values, name=name: calls.append((name, *values)))
    take_identity(None)
    assert calls == []
    take_identity(Owner(54321, 54322, "uid 54321"))
    assert calls == [
        ("initgroups", "uid 54321", 54322),
        ("setresgid", 54322, 54322, 54322),
        ("setresuid", 54321, 54321, 54321),
    ]


# Frameworks.


def test_the_frameworks_of_a_command_are_found_by_a_probe(tmp_path: Path) -> None:
    environment_at(tmp_path / "v", "2.11.0")

    async def work(probes: Probes) -> None:
        found = await probes.find_frameworks(order_of(spec_of(str(tmp_path / "v" / "bin" / "python"), "x.py")))
        assert (found.certain, found.problem, found.versions("torch")) == (True, "", ("2.11.0",))

    with_probes(work)


def test_without_a_probe_the_frameworks_are_unknown_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def work(probes: Probes) -> None:
        monkeypatch.setattr(subprocess, "Popen", fail)
        found = await probes.find_frameworks(order_of(RUNNABLE))
        assert "cannot start a process" in found.problem

    with_probes(work)
