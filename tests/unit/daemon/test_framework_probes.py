"""Launches that need to know the frameworks of their command: the files are read before the launcher is asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from carma.core.model.events import StopRequested, TaskSubmitted
from carma.core.model.outcome import Cancelled, Succeeded
from carma.core.model.settings import Sharing
from carma.core.model.status import Finished, Running, Starting
from carma.core.model.values import AttemptKey, Confinement, Frameworks, Interpreter, Owner, TaskId, TaskSpec
from carma.core.policies import magm
from carma.core.ports import Launcher, LaunchOrder
from carma.core.state import State
from carma.daemon.executor import FindFrameworks
from carma.daemon.loop import Loop
from carma.daemon.probes import pool as probes_module
from carma.daemon.probes.pool import Probes
from carma.daemon.recovery_on_start import ReplayedLog, reconcile
from carma.daemon.shell import Shell
from carma.launch.confinement import GpuConfiner
from carma.launch.process import ProcessLauncher
from carma.store.memory import MemoryStore
from carma.testing.fake_launcher import AT_ONCE, FOREVER, FakeLauncher
from tests.hanging_fs import hanging_mount
from tests.launch_orders import shell as script
from tests.launch_orders import spec_of, tidy
from tests.unit.daemon.shells import make_executor, make_shell
from tests.unit.daemon.test_loop import OPEN, Card, Declared

LIMIT_S = 60.0
ME = Owner(os.geteuid(), os.getegid(), "me")
SLOW, QUICK = TaskId(1), TaskId(2)


class Lookup:
    """Answers for SLOW only when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked: list[TaskId] = []

    async def __call__(self, order: LaunchOrder) -> Frameworks:
        self.asked.append(order.key.task)
        if order.key.task == SLOW:
            await self.released.wait()
        return Frameworks(interpreters=(Interpreter("/usr/bin/python", {"torch": "2.11.0"}),))


class Forgetful(FakeLauncher):
    """Cannot exclude that a runner of an earlier daemon has the order."""

    def has_order(self, key: AttemptKey) -> bool:  # noqa: ARG002 (the protocol's name)
        return True


class Server:
    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    async def submit(self, task: TaskId, spec: TaskSpec | None = None) -> AttemptKey:
        made = spec or spec_of("true", gpu_memory_mib=2_000)
        await self.shell.commit([TaskSubmitted(self.shell.clock.now(), task, ME, made)])
        return AttemptKey(task, 1)

    async def until(self, holds: Callable[[State], bool]) -> None:
        assert await self.shell.wait_for(holds, LIMIT_S)

    async def until_state(self, task: TaskId, kind: type[Starting | Running | Finished]) -> None:
        await self.until(lambda state: isinstance(state.tasks[task].status, kind))

    async def stop(self, task: TaskId) -> None:
        await self.shell.commit([StopRequested(self.shell.clock.now(), task, Cancelled("me"), 0.0)])

    def outcome(self, task: TaskId) -> object:
        status = self.shell.state.tasks[task].status
        return status.outcome if isinstance(status, Finished) else None

    def confinement(self, task: TaskId) -> Confinement | None:
        return self.shell.state.tasks[task].attempts[-1].confinement


@contextlib.asynccontextmanager
async def serving(launcher: Launcher, find: FindFrameworks) -> AsyncIterator[Server]:
    shell = make_shell(MemoryStore(), State(OPEN, magm.POLICY))
    loop = Loop(shell, make_executor(shell, launcher, (Declared(),), find), Card(), period_s=0.05)
    running = asyncio.create_task(loop.run())
    try:
        await reconcile(shell, loop, ReplayedLog(shell.state, 0))
        yield Server(shell)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await loop.close()
        await loop.writer.close()


def go(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(4 * LIMIT_S):
            await work

    asyncio.run(limited())


def launched(launcher: FakeLauncher) -> dict[TaskId, LaunchOrder]:
    return {order.key.task: order for order in launcher.launched}


def test_a_launch_that_waits_for_its_files_delays_no_other_launch_and_no_poll() -> None:
    async def work() -> None:
        lookup, launcher = Lookup(), FakeLauncher(lambda _: AT_ONCE)
        async with serving(launcher, lookup) as server:
            await server.submit(SLOW)
            await server.until_state(SLOW, Starting)
            await server.submit(QUICK)
            await server.until_state(QUICK, Finished)
            assert SLOW not in launched(launcher)
            assert isinstance(server.shell.state.tasks[SLOW].status, Starting)
            lookup.released.set()
            await server.until_state(SLOW, Finished)
            found = launched(launcher)[SLOW].frameworks
            assert found.versions("torch") == ("2.11.0",)

    go(work())


def test_an_attempt_that_is_stopped_while_its_files_are_read_is_never_launched() -> None:
    async def work() -> None:
        lookup, launcher = Lookup(), FakeLauncher(lambda _: FOREVER)
        async with serving(launcher, lookup) as server:
            await server.submit(SLOW)
            await server.until(lambda _: lookup.asked == [SLOW])
            await server.stop(SLOW)
            lookup.released.set()
            await server.until_state(SLOW, Finished)
            assert server.outcome(SLOW) == Cancelled("me")
            assert launcher.launched == []

    go(work())


def test_an_attempt_whose_runner_may_exist_is_launched_again_although_it_is_to_stop() -> None:
    """The runner finds the request to stop beside the order and answers for the attempt."""

    async def work() -> None:
        lookup, launcher = Lookup(), Forgetful(lambda _: AT_ONCE)
        async with serving(launcher, lookup) as server:
            await server.submit(SLOW)
            await server.until(lambda _: lookup.asked == [SLOW])
            await server.stop(SLOW)
            lookup.released.set()
            await server.until_state(SLOW, Finished)
            assert SLOW in launched(launcher)

    go(work())


def test_a_task_that_has_its_gpu_alone_needs_no_lookup() -> None:
    async def work() -> None:
        lookup, launcher = Lookup(), FakeLauncher(lambda _: AT_ONCE)
        async with serving(launcher, lookup) as server:
            await server.submit(SLOW, spec_of("true", gpu_memory_mib=2_000, exclusive=True))
            await server.until_state(SLOW, Finished)
            assert lookup.asked == []

    go(work())


def test_a_hanging_environment_delays_only_its_own_launch_which_then_goes_on_without_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real probes, launcher and processes. The environment is named by a variable, so the command itself can run."""
    monkeypatch.setattr(probes_module, "LAUNCH_LIMIT_S", LIMIT_S)
    remote, logs = tmp_path / "remote", tmp_path / "logs"
    remote.mkdir()
    spec = script("exit 0", gpu_memory_mib=2_000)
    hanging = TaskSpec(
        command=spec.command,
        directory="/",
        environment={**spec.environment, "VIRTUAL_ENV": str(remote)},
        gpu_memory_mib=2_000,
    )

    async def work() -> None:
        probes = Probes()
        launcher = ProcessLauncher(
            logs, run_as_submitter=False, confiner=GpuConfiner(Sharing(mechanism="timeslice"), None)
        )
        async with serving(launcher, probes.find_frameworks) as server:
            await server.submit(SLOW, hanging)
            await asyncio.to_thread(mount.until_held)
            await server.submit(QUICK, spec)
            await server.until_state(QUICK, Finished)
            assert server.outcome(QUICK) == Succeeded()
            assert isinstance(server.shell.state.tasks[SLOW].status, Starting)
            mount.resume()
            await server.until_state(SLOW, Finished)
            mount.hang()
            monkeypatch.setattr(probes_module, "LAUNCH_LIMIT_S", 0.5)
            third = TaskId(3)
            await server.submit(third, hanging)
            await server.until_state(third, Finished)
            assert server.outcome(third) == Succeeded()
            confinement = server.confinement(third)
            assert confinement is not None
            assert "did not answer within 0.5 s" in confinement.note
            assert "framework" not in [guard.rung for guard in confinement.guards]
            mount.resume()
        await probes.close()

    try:
        with hanging_mount(remote) as mount:
            mount.hang()
            go(work())
    finally:
        tidy(logs)
