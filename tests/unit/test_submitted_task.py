"""`carma.submit` from Python, against a daemon that keeps what it got. docs/python.md runs against a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import carma
from carma import errors
from carma.core.model.values import Dependency, TaskId
from carma.wire.routes import Route
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, running


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setattr("carma.submitted_task.RETRY_S", 0.01)
        yield fake


def test_a_submission_has_the_directory_and_environment_of_the_program(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", "here")
    umask = os.umask(0o027)
    first = carma.submit(["python", "train.py"], gpu_memory="12GiB", name="fit", time_limit_s=60.0)
    carma.submit(("true",), gpus=2, gpu_memory=900, environment={"A": "1"}, directory="sub", after=[first, 9])
    one, two = (request.spec for request in daemon.asked("submit"))
    assert (first.id, one.command, one.directory) == (1, ("python", "train.py"), str(tmp_path))
    assert (one.environment["MARK"], one.gpu_memory_mib, one.name, one.time_limit_s) == ("here", 12_288, "fit", 60.0)
    assert (two.gpus, two.gpu_memory_mib, two.environment) == (2, 900, {"A": "1"})
    assert (two.directory, two.after) == (str(tmp_path / "sub"), (Dependency(TaskId(1)), Dependency(TaskId(9))))
    assert (one.umask, two.umask, os.umask(umask)) == (0o027, 0o027, 0o027)
    with pytest.raises(TypeError, match=r"\['python', 'train.py'\]"):
        carma.submit("python train.py")


def test_waiting_outlasts_a_restart_of_the_daemon_and_ends_at_its_timeout(daemon: FakeDaemon) -> None:
    one = carma.SubmittedTask(1)
    daemon.tasks = {1: running(1)}
    with pytest.raises(TimeoutError, match="task 1 has not ended"):
        one.wait(timeout_s=0.01)
    usual, asked = daemon.answer, 0

    def answer(route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        nonlocal asked
        asked += route.name == "task"
        if asked in (2, 3):
            raise errors.Unreachable("no daemon listens")
        daemon.tasks[1] = running(1) if asked == 1 else finished(1, code=6)
        return usual(route, task, query, body)

    daemon.answer = answer  # type: ignore[method-assign]
    assert (one.wait().exit_code, one.view().state) == (6, "finished")
    assert asked > 4
    daemon.output = {"stdout": b"out \xff", "stderr": b"err"}
    assert (one.logs(), one.logs("stderr")) == ("out \ufffd", "err")
    one.cancel()
    assert len(daemon.asked("cancel")) == 1


def test_the_package_imports_its_client_when_it_is_used() -> None:
    program = "import sys, carma; assert not [name for name in sys.modules if 'msgspec' in name]; carma.submit"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    with pytest.raises(AttributeError):
        carma.nothing  # noqa: B018
