"""The launcher and its runners, on real processes: trees, crashes, adoption, refusals."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import procfs
from carma.core.model.outcome import Failed, Lost, OutOfMemory, Succeeded
from carma.core.model.values import Owner, TaskSpec
from carma.core.ports import AttemptReport
from carma.launch import attempt_records as records
from carma.launch import output_files
from carma.launch.process import RUNNER, ProcessLauncher
from carma.testing.launcher_contract import key, look, order_of, until, until_ended, until_running
from tests.launch_orders import gone, read_pid, runner_of, shell, spec_of, tidy, until_file

# Leaves its parent and its session, as daemons do, and says who it is.
DOUBLE_FORK = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open("orphan.tmp", "w") as file:
            file.write(f"{os.getpid()}\\n")
        os.rename("orphan.tmp", "orphan")
        time.sleep(600)
    os._exit(0)
while not os.path.exists("orphan"):
    time.sleep(0.01)
time.sleep(600 if sys.argv[1] == "stay" else 0)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "attempts"
    tidy(tmp_path / "attempts")


@pytest.fixture
def launcher(place: Path) -> ProcessLauncher:
    return ProcessLauncher(place, run_as_submitter=False)


def double_forked(directory: Path, what: str = "stay") -> TaskSpec:
    return spec_of(sys.executable, "-I", "-S", "-c", DOUBLE_FORK, what, directory=directory, grace_s=0.2)


def test_the_whole_tree_is_known_and_killed(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(double_forked(tmp_path)))
    main = until_running(launcher, key())
    orphan = read_pid(tmp_path / "orphan")
    assert launcher.pids([key()]) == {main: key(), orphan: key()}
    launcher.signal(key(), signal.SIGKILL)
    assert until_ended(launcher, key()) == Failed(137, "ended by SIGKILL")
    assert gone(orphan)


def test_what_a_command_leaves_behind_ends_with_it(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(double_forked(tmp_path, "leave")))
    assert until_ended(launcher, key()) == Succeeded()
    assert gone(read_pid(tmp_path / "orphan"))


def test_a_leftover_that_ignores_sigterm_is_killed_after_its_grace(launcher: ProcessLauncher, tmp_path: Path) -> None:
    script = (
        "(trap '' TERM; echo $$ > ready; exec sleep 600) & while [ ! -s ready ]; do sleep 0.02; done; echo $! > left"
    )
    launcher.launch(order_of(shell(script, tmp_path, grace_s=0.2)))
    assert until_ended(launcher, key()) == Succeeded()
    assert gone(read_pid(tmp_path / "left"))


def test_a_new_daemon_adopts_running_attempts_and_gets_their_outcomes(place: Path, tmp_path: Path) -> None:
    first = ProcessLauncher(place, run_as_submitter=False)
    first.launch(order_of(shell(until_file(tmp_path / "go", code=5), tmp_path)))
    pid = until_running(first, key())
    second = ProcessLauncher(place, run_as_submitter=False)
    second.launch(order_of(shell("exit 1")))  # given again: does nothing
    assert look(second, key()).pid == pid
    (tmp_path / "go").touch()
    assert until_ended(second, key()) == Failed(5)


def test_signals_to_the_runner_do_not_lose_the_exit_code(
    launcher: ProcessLauncher, place: Path, tmp_path: Path
) -> None:
    launcher.launch(order_of(shell(until_file(tmp_path / "go", code=5))))
    until_running(launcher, key())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(runner_of(place, key()), number)
    (tmp_path / "go").touch()
    assert until_ended(launcher, key()) == Failed(5)


def test_a_command_that_outlives_its_runner_is_lost_at_its_end_and_its_tree_is_ended(
    launcher: ProcessLauncher, place: Path, tmp_path: Path
) -> None:
    launcher.launch(order_of(double_forked(tmp_path)))
    main = until_running(launcher, key())
    orphan = read_pid(tmp_path / "orphan")
    over = runner_of(place, key())
    os.kill(over, signal.SIGKILL)
    until(lambda: gone(over))
    assert look(launcher, key()).pid == main
    assert look(launcher, key()).outcome is None
    assert launcher.pids([key()]) == {main: key(), orphan: key()}  # found by what it started with
    os.kill(main, signal.SIGKILL)
    assert isinstance(until_ended(launcher, key()), Lost)
    until(lambda: gone(orphan))


def test_a_runner_that_dies_before_the_start_is_replaced(launcher: ProcessLauncher, place: Path) -> None:
    folder = place / str(key())
    folder.mkdir(parents=True)
    dead = {"pid": 2**22 + 1, "start_ticks": 1, "boot_id": procfs.boot_id()}
    (folder / records.CLAIM).write_text(json.dumps(dead))
    assert look(launcher, key()) == AttemptReport(key=key())
    launcher.launch(order_of(shell("exit 4")))
    assert until_ended(launcher, key()) == Failed(4)


def test_runners_that_die_again_and_again_end_as_lost(launcher: ProcessLauncher, place: Path) -> None:
    folder = place / str(key())
    folder.mkdir(parents=True)
    for name in (records.CLAIM, "dead-claim-1", "dead-claim-2", "dead-claim-3"):
        (folder / name).write_text(json.dumps({"pid": 2**22 + 1, "start_ticks": 1, "boot_id": procfs.boot_id()}))
    launcher.launch(order_of(shell("exit 0")))
    assert isinstance(look(launcher, key()).outcome, Lost)


def test_after_a_restart_of_the_machine_a_running_attempt_is_lost(launcher: ProcessLauncher, place: Path) -> None:
    folder = place / str(key())
    folder.mkdir(parents=True)
    me = procfs.process(os.getpid())
    assert me is not None
    then = {"pid": me.pid, "start_ticks": me.start_ticks, "boot_id": "of another start"}
    started = {**then, "runner": then, "started_at": 1.0, "token": "t", "logs": [[1, 1, 0], [1, 1, 0]]}
    (folder / records.CLAIM).write_text(json.dumps(then))
    (folder / records.STARTED).write_text(json.dumps(started))
    assert look(launcher, key()).outcome == Lost("the machine restarted")
    launcher.signal(key(), signal.SIGKILL)  # the pid is ours now; this test would die
    assert launcher.pids([key()]) == {}


def test_a_reused_pid_is_not_the_old_process() -> None:
    me = procfs.process(os.getpid())
    assert me is not None
    assert procfs.alive(me.pid, me.start_ticks)
    assert not procfs.alive(me.pid, me.start_ticks - 1)
    assert not procfs.send(me.pid, me.start_ticks - 1, signal.SIGKILL)


def test_many_runners_for_one_order_start_one_process(place: Path, tmp_path: Path) -> None:
    """The daemon behaves as if it were killed just after each order."""
    launcher = ProcessLauncher(place, run_as_submitter=False)
    launcher.launch(order_of(shell("echo once >> starts; " + until_file(tmp_path / "go"), tmp_path)))
    command = [*RUNNER, str(place / str(key()))]
    others = [subprocess.Popen(command) for _ in range(4)]
    until_running(launcher, key())
    (tmp_path / "go").touch()
    assert [one.wait(60) for one in others] == [0] * 4
    assert until_ended(launcher, key()) == Succeeded()
    assert (tmp_path / "starts").read_text() == "once\n"


def test_a_stop_that_comes_before_the_start_prevents_it(launcher: ProcessLauncher, place: Path, tmp_path: Path) -> None:
    folder = place / str(key())
    folder.mkdir(parents=True)
    launcher.signal(key(), signal.SIGTERM)
    launcher.launch(order_of(shell(f"echo ran > {tmp_path}/ran")))
    assert until_ended(launcher, key()) == Failed(143, "stopped before it started")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (signal.SIGTERM, r"killed with SIGKILL: it did not end within [\d.]+ s after SIGTERM"),
        (signal.SIGINT, r"killed with SIGKILL: it did not end within [\d.]+ s after SIGINT"),
        (signal.SIGKILL, "ended by SIGKILL"),
        (signal.SIGUSR1, "ended by SIGKILL"),
    ],
)
def test_the_outcome_of_a_killed_task_is_the_same_for_the_next_daemon(
    place: Path, tmp_path: Path, first: signal.Signals, said: str
) -> None:
    before = ProcessLauncher(place, run_as_submitter=False)
    before.launch(
        order_of(shell("trap '' TERM INT USR1; : > ready; while :; do sleep 0.05; done", tmp_path, grace_s=0.2))
    )
    until_running(before, key())
    until((tmp_path / "ready").exists)
    before.signal(key(), first)
    after = ProcessLauncher(place, run_as_submitter=False)
    after.signal(key(), signal.SIGKILL)
    after.signal(key(), signal.SIGKILL)
    outcome = until_ended(after, key())
    assert isinstance(outcome, Failed)
    assert re.fullmatch(said, outcome.message)


def test_a_kill_by_another_process_does_not_count_as_ours(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell("trap '' TERM; : > ready; while :; do sleep 0.05; done", tmp_path, grace_s=0.2)))
    pid = until_running(launcher, key())
    until((tmp_path / "ready").exists)
    launcher.signal(key(), signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)
    assert until_ended(launcher, key()) == Failed(137, "ended by SIGKILL")
    launcher.signal(key(), signal.SIGKILL)  # too late to have done it
    assert look(launcher, key()).outcome == Failed(137, "ended by SIGKILL")


def test_a_runner_whose_directory_is_removed_ends(launcher: ProcessLauncher, place: Path, tmp_path: Path) -> None:
    launcher.launch(order_of(shell(until_file(tmp_path / "go"))))
    until_running(launcher, key())
    over = runner_of(place, key())
    shutil.rmtree(place / str(key()))
    (tmp_path / "go").touch()
    until(lambda: look(launcher, key()).pid is None and gone(over))


def test_tasks_of_other_users_are_not_started_as_ours(launcher: ProcessLauncher, tmp_path: Path) -> None:
    other = Owner(os.geteuid() + 1, os.getegid(), "somebody")
    launcher.launch(order_of(shell(f": > {tmp_path}/ran"), owner=other))
    outcome = until_ended(launcher, key())
    assert isinstance(outcome, Failed)
    assert "somebody" in outcome.message
    assert not (tmp_path / "ran").exists()


def test_a_directory_that_cannot_be_written_is_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    launcher = ProcessLauncher(tmp_path / "file" / "attempts", run_as_submitter=False)
    launcher.launch(order_of(shell("exit 0")))
    outcome = look(launcher, key()).outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == 126


def test_an_oom_is_recognised_from_the_output_of_its_own_attempt_only(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    """Two attempts append to one file; the second fails without output."""
    oom = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has' >&2; exit 1"
    launcher.launch(order_of(shell(oom, tmp_path, output="log"), attempt=1))
    first = until_ended(launcher, key(1, 1))
    assert isinstance(first, OutOfMemory)
    assert first.asked_mib == 2048
    launcher.launch(order_of(shell("exit 1", tmp_path, output="log"), attempt=2))
    assert until_ended(launcher, key(1, 2)) == Failed(1)
    assert "CUDA out of memory" in (tmp_path / "log").read_text()


def test_an_attempt_whose_directory_was_removed_is_unknown(launcher: ProcessLauncher, place: Path) -> None:
    launcher.launch(order_of(shell("exit 0")))
    until_ended(launcher, key())
    shutil.rmtree(place / str(key()))
    until(lambda: look(launcher, key()) == AttemptReport(key=key()))  # once its runner has ended


def test_an_attempt_whose_records_cannot_be_read_does_not_hide_the_ends_of_others(
    launcher: ProcessLauncher, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = tmp_path / "go"
    for task in (1, 2, 3):
        launcher.launch(order_of(shell(until_file(go, code=task)), task))
        until_running(launcher, key(task))
    exit_record = place / str(key(2)) / records.EXIT
    exit_record.mkdir()  # in place of a record on a damaged disk
    go.touch()
    for task in (1, 3):
        assert until_ended(launcher, key(task)) == Failed(task)
    for known in (launcher, ProcessLauncher(place, run_as_submitter=False)):  # also after a restart
        for _ in range(3):
            found = known.poll([key(1), key(2), key(3)])
            assert [report.outcome for report in found] == [Failed(1), None, Failed(3)]
            assert found[1] == AttemptReport(key=key(2), claimed=True)
    assert [text for text in caplog.messages if str(key(2)) in text] == [
        f"the files of attempt 2.1 cannot be read; it is tried again: [Errno 21] Is a directory: '{exit_record}'"
    ] * 2
    exit_record.rmdir()
    exit_record.write_text('{"ended_at": 1.0, "code": 2}')
    assert until_ended(launcher, key(2)) == Failed(2)


@pytest.mark.parametrize("number", sorted(records.NO_RESOURCES))
def test_a_machine_without_descriptors_or_memory_fails_the_poll(
    launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(launcher.files, "claim", refused)
    with pytest.raises(OSError, match=os.strerror(number)):
        launcher.poll([key()])


def test_records_that_could_not_be_dropped_are_dropped_later(
    launcher: ProcessLauncher, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leased(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "leased")

    launcher.launch(order_of(shell("echo out")))
    until_ended(launcher, key())
    with monkeypatch.context() as patched:
        patched.setattr(output_files, "seal", leased)
        launcher.release(key())
        launcher.maintain()
    assert (place / str(key()) / records.STARTED).exists()
    launcher.maintain()
    assert sorted(os.listdir(place / str(key()))) == ["exit.json", "stdout.log"]


def test_an_attempt_without_a_directory_has_no_records_to_drop(launcher: ProcessLauncher, place: Path) -> None:
    launcher.launch(order_of(shell("exit 0")))
    until_ended(launcher, key())
    shutil.rmtree(place / str(key()))
    launcher.release(key())
    assert launcher._unreleased == set()


def test_the_output_of_an_attempt_that_still_runs_is_not_sealed_by_a_daemon_that_does_not_know_it(
    launcher: ProcessLauncher, place: Path, tmp_path: Path
) -> None:
    launcher.launch(order_of(shell(f"echo out; {until_file(tmp_path / 'go')}")))
    until_running(launcher, key())
    ProcessLauncher(place, run_as_submitter=False).release(key())  # of a database that was lost
    assert (place / str(key()) / "stdout.log").stat().st_mode & 0o777 == 0o600
    (tmp_path / "go").touch()
    until_ended(launcher, key())
    assert (place / str(key()) / "stdout.log").stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("tagged", [True, False])
def test_the_server_switches_tags_for_experiment_trackers_off(place: Path, tagged: bool) -> None:
    launcher = ProcessLauncher(place, run_as_submitter=False, tracker_tags=tagged)
    launcher.launch(
        order_of(shell('test "${WANDB_TAGS+set}${MLFLOW_RUN_CONTEXT+set}" = ' + ("setset" if tagged else '""')))
    )
    assert until_ended(launcher, key()) == Succeeded()
