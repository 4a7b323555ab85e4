"""Starts that hang, runners that are stopped or killed with their command, and descriptors that run out."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import cgroups, procfs
from carma.core.model.outcome import Failed, LaunchFailed, Lost, Outcome, Succeeded
from carma.core.model.values import AttemptKey
from carma.launch import attempt_records as records
from carma.launch import process
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.launch.process import ProcessLauncher
from carma.testing.launcher_contract import key, look, order_of, until, until_ended, until_running
from tests.hanging_fs import HangingMount, hanging_mount
from tests.launch_orders import gone, read_pid, runner_of, shell, tidy, until_file


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "attempts"
    tidy(tmp_path / "attempts")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[HangingMount]:
    (tmp_path / "mount").mkdir()
    with hanging_mount(tmp_path / "mount") as made:
        yield made


def hang_in_directory(launcher: ProcessLauncher, mount: HangingMount, tmp_path: Path) -> None:
    """An attempt that is stuck before its start: not even SIGKILL ends its process."""
    mount.hang()
    launcher.launch(order_of(shell("exit 0", tmp_path / "mount")))
    mount.until_held()


def test_a_start_that_hangs_in_the_working_directory_ends_as_launch_failed(
    place: Path, tmp_path: Path, mount: HangingMount
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, start_timeout_s=1.0)
    hang_in_directory(launcher, mount, tmp_path)
    outcome = until_ended(launcher, key())
    assert isinstance(outcome, LaunchFailed)
    assert f"entering the working directory {tmp_path}/mount did not finish" in outcome.reason
    launcher.release(key())
    assert launcher.pids([key()]) == {}


def test_a_start_that_hangs_in_the_output_file_ends_as_launch_failed(
    place: Path, tmp_path: Path, mount: HangingMount
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, start_timeout_s=1.0)
    mount.hang()
    launcher.launch(order_of(shell("exit 0", output=str(tmp_path / "mount" / "log"))))
    outcome = until_ended(launcher, key())
    assert isinstance(outcome, LaunchFailed)
    assert f"opening {tmp_path}/mount/log did not finish" in outcome.reason


def test_a_start_that_hangs_can_be_cancelled_also_by_the_next_daemon(
    place: Path, tmp_path: Path, mount: HangingMount
) -> None:
    hang_in_directory(ProcessLauncher(place, run_as_submitter=False), mount, tmp_path)
    second = ProcessLauncher(place, run_as_submitter=False)
    assert look(second, key()).outcome is None
    second.signal(key(), signal.SIGTERM)
    assert until_ended(second, key()) == Failed(143, "stopped before it started")


def test_a_runner_that_is_stopped_before_the_start_is_killed_and_replaced(
    place: Path, tmp_path: Path, mount: HangingMount
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    hang_in_directory(launcher, mount, tmp_path)
    claim = launcher.files.claim(key())
    assert claim is not None
    os.kill(claim.pid, signal.SIGSTOP)
    launcher.signal(key(), signal.SIGKILL)
    assert look(launcher, key()).outcome is None  # the runner has not answered yet
    launcher.signal(key(), signal.SIGKILL)
    until(lambda: not procfs.alive(claim.pid, claim.start_ticks))
    assert look(launcher, key()).outcome is None
    launcher.launch(order_of(shell("exit 0", tmp_path / "mount")))  # as the daemon does with an order without a runner
    assert until_ended(launcher, key()) == Failed(137, "stopped before it started")


def test_a_runner_that_never_starts_its_command_is_killed_after_the_timeout(
    place: Path, tmp_path: Path, mount: HangingMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, start_timeout_s=1.0)
    monkeypatch.setattr(process, "RUNNER_MARGIN_S", 0.0)
    hang_in_directory(launcher, mount, tmp_path)
    claim = launcher.files.claim(key())
    assert claim is not None
    os.kill(claim.pid, signal.SIGSTOP)
    assert isinstance(until_ended(launcher, key()), LaunchFailed)
    until(lambda: not procfs.alive(claim.pid, claim.start_ticks))


def test_a_runner_that_was_stopped_is_woken_when_its_command_is_killed(place: Path) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    launcher.launch(order_of(shell("sleep 600")))
    until_running(launcher, key())
    os.kill(runner_of(place, key()), signal.SIGSTOP)
    launcher.signal(key(), signal.SIGKILL)
    assert until_ended(launcher, key()) == Failed(137, "ended by SIGKILL")


def test_a_runner_that_hangs_before_it_claims_the_order_is_killed_after_the_timeout(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, start_timeout_s=0.5)
    monkeypatch.setattr(process, "RUNNER_MARGIN_S", 0.0)
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import os, time; open('pid', 'w').write(f'{os.getpid()}\\n'); time.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(process, "RUNNER", (sys.executable, str(hangs)))
        launcher.launch(order_of(shell("exit 0")))
    assert look(launcher, key()).claimed  # it is not given again
    assert isinstance(until_ended(launcher, key()), LaunchFailed)
    pid = read_pid(tmp_path / "pid")
    until(lambda: gone(pid))


def test_a_slow_start_counts_as_claimed(place: Path, tmp_path: Path, mount: HangingMount) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    hang_in_directory(launcher, mount, tmp_path)
    assert look(launcher, key()).claimed
    assert look(ProcessLauncher(place, run_as_submitter=False), key()).claimed
    mount.resume()
    assert until_ended(launcher, key()) == Succeeded()


def outcome_of(launcher: ProcessLauncher, which: AttemptKey) -> Outcome | None:
    return look(launcher, which).outcome


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in held:
            os.close(fd)


def test_a_record_that_cannot_be_read_does_not_count_as_missing(tmp_path: Path) -> None:
    assert records.read(str(tmp_path / "exit.json")) is None
    records.write(str(tmp_path / "exit.json"), {"code": 0})
    with no_descriptors_left(), pytest.raises(OSError, match="open files"):
        records.read(str(tmp_path / "exit.json"))
    assert records.read(str(tmp_path / "exit.json")) == {"code": 0}


def test_an_attempt_that_ended_while_descriptors_had_run_out_keeps_its_outcome(place: Path, tmp_path: Path) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    launcher.launch(order_of(shell(until_file(tmp_path / "go"), tmp_path)))
    until_running(launcher, key())
    runner = runner_of(place, key())
    start_ticks = procfs.processes()[runner].start_ticks
    (tmp_path / "go").touch()
    until(lambda: not procfs.alive(runner, start_ticks))
    with no_descriptors_left(), pytest.raises(OSError, match="open files") as raised:
        outcome_of(launcher, key())
    assert raised.value.errno == errno.EMFILE
    assert outcome_of(launcher, key()) == Succeeded()


def test_a_running_attempt_does_not_count_as_ended_while_descriptors_have_run_out(place: Path) -> None:
    ProcessLauncher(place, run_as_submitter=False).launch(order_of(shell("sleep 600")))
    launcher = ProcessLauncher(place, run_as_submitter=False)  # knows nothing yet, as after a restart
    until_running(launcher, key())
    with no_descriptors_left(), pytest.raises(OSError, match="open files"):
        outcome_of(launcher, key())
    assert outcome_of(launcher, key()) is None


def test_a_runner_that_is_killed_before_it_claims_the_order_is_replaced(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    killed = tmp_path / "killed.py"
    killed.write_text("import os; os.kill(os.getpid(), 9)\n")
    with monkeypatch.context() as patched:
        patched.setattr(process, "RUNNER", (sys.executable, str(killed)))
        launcher.launch(order_of(shell("exit 0")))
    outcomes: list[Outcome | None] = []

    def give_again() -> bool:
        outcomes.append(outcome_of(launcher, key()))
        launcher.launch(order_of(shell("exit 0")))
        return outcomes[-1] is not None

    until(give_again)
    assert outcomes[-1] == Succeeded()


def test_an_order_without_descriptors_left_is_given_again_and_not_a_failure(place: Path) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False)
    with no_descriptors_left():
        launcher.launch(order_of(shell("exit 0")))
    assert outcome_of(launcher, key()) is None
    launcher.launch(order_of(shell("exit 0")))
    assert until_ended(launcher, key()) == Succeeded()


@pytest.fixture
def groups(place: Path) -> Iterator[AttemptCgroups]:
    found = cgroups.find()
    if isinstance(found, str):
        pytest.skip(found)
    made = AttemptCgroups(found, place)
    yield made
    made.kill(key())
    made.remove(key())


def test_a_child_that_cleared_its_environment_ends_when_runner_and_command_are_killed_together(
    place: Path, tmp_path: Path, groups: AttemptCgroups
) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, groups=groups)
    script = "setsid env -i /bin/sh -c 'echo $$ > child.tmp; mv child.tmp child; exec sleep 600' & sleep 600"
    launcher.launch(order_of(shell(script, tmp_path)))
    pid = until_running(launcher, key())
    child = read_pid(tmp_path / "child")
    assert child in groups.members(key())
    for victim in (runner_of(place, key()), pid):
        os.kill(victim, signal.SIGKILL)
    outcome = until_ended(launcher, key())
    assert isinstance(outcome, Lost)
    until(lambda: gone(child))
    launcher.release(key())
    assert groups.existing() == []


def test_attempts_of_two_daemons_with_the_same_key_have_different_cgroups(
    tmp_path: Path, groups: AttemptCgroups
) -> None:
    other = AttemptCgroups(groups.cgroups, tmp_path / "elsewhere")
    groups.create(key())
    assert groups.existing() == [key()]
    assert other.existing() == []
