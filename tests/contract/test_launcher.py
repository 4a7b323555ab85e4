"""The launcher that starts processes and the fake in memory keep the contract of launchers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.outcome import Failed
from carma.launch.process import ProcessLauncher
from carma.testing.fake_launcher import AT_ONCE, FOREVER, FakeLauncher, Plan
from carma.testing.launcher_contract import LauncherContract, LauncherSubject
from tests.launch_orders import shell, spec_of, tidy

PLANS = {
    "succeeds": AT_ONCE,
    "fails": Plan(outcome=Failed(3), after_s=0.0),
    "runs": FOREVER,
    "stubborn": Plan(ignores=(signal.SIGTERM,)),
    "saves": Plan(saves_in_s=0.0),
    "nowhere": Plan(outcome=Failed(126, "cannot enter the working directory"), after_s=0.0, starts=False),
}


def in_memory(_: Path) -> LauncherSubject:
    launcher = FakeLauncher(lambda order: PLANS[order.spec.name])
    return LauncherSubject(launcher, lambda behaviour: spec_of("true", name=behaviour), lambda: True)


def processes(directory: Path) -> LauncherSubject:
    specs = {
        "succeeds": shell("exit 0"),
        "fails": shell("exit 3"),
        "runs": spec_of("sleep", "600"),
        "stubborn": shell("trap '' TERM; : > ready; while :; do sleep 0.05; done", directory),
        "saves": shell("trap 'exit 0' USR1; : > ready; while :; do sleep 0.05; done", directory),
        "nowhere": shell("exit 0", directory / "nowhere"),
    }
    launcher = ProcessLauncher(directory / "attempts", run_as_submitter=False)
    return LauncherSubject(launcher, specs.__getitem__, (directory / "ready").exists)


class TestLaunchers(LauncherContract):
    @pytest.fixture(params=[in_memory, processes])
    def subject(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LauncherSubject]:
        made: LauncherSubject = request.param(tmp_path)
        yield made
        tidy(tmp_path / "attempts")
