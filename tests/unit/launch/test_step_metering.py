"""The launcher prepares the counting of steps, and starts a task without it where it is off or fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.outcome import Succeeded
from carma.launch.attempt_records import STEPS
from carma.launch.process import ProcessLauncher
from carma.launch.step_metering import HOOK_DIRECTORY
from carma.step_file import LIMIT_BYTES, VARIABLE
from carma.testing.launcher_contract import key, order_of, until, until_ended, until_running
from tests.launch_orders import shell, tidy, until_file

PRINT = f'echo "$PYTHONPATH ${VARIABLE}"'


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "attempts"
    tidy(tmp_path / "attempts")


def printed(place: Path) -> str:
    return (place / str(key()) / "stdout.log").read_text()


def test_a_task_finds_the_hook_and_an_empty_file_of_its_own(place: Path) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    launcher.launch(order_of(shell(f'{PRINT}; test -w "${VARIABLE}" && test ! -s "${VARIABLE}"')))
    assert until_ended(launcher, key()) == Succeeded()
    file = place / str(key()) / STEPS
    assert printed(place) == f"{HOOK_DIRECTORY} {file}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    launcher.release(key())
    assert not file.exists()


@pytest.mark.parametrize(("server", "task"), [(False, True), (True, False)])
def test_where_it_is_off_a_task_has_neither(place: Path, server: bool, task: bool) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, count_steps=server)
    launcher.launch(order_of(shell(PRINT, progress=task)))
    assert until_ended(launcher, key()) == Succeeded()
    assert printed(place) == " \n"
    assert not (place / str(key()) / STEPS).exists()


def test_a_task_whose_file_cannot_be_made_runs_without_it(place: Path) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    (place / str(key()) / STEPS).mkdir(parents=True)
    launcher.launch(order_of(shell("exit 0")))
    assert until_ended(launcher, key()) == Succeeded()


def test_a_file_that_grows_is_cut_also_if_the_task_has_its_own_output_files(place: Path, tmp_path: Path) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    grow = f'head -c 5000000 /dev/zero >> "${VARIABLE}"'
    script = f"{grow}; {until_file(tmp_path / 'end')}"
    launcher.launch(order_of(shell(script, output=str(tmp_path / "out"), error=str(tmp_path / "out"))))
    until_running(launcher, key())
    file = place / str(key()) / STEPS
    until(lambda: file.stat().st_size == LIMIT_BYTES)
    (tmp_path / "end").touch()
    assert until_ended(launcher, key()) == Succeeded()
