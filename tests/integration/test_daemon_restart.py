"""A daemon that goes and comes back: tasks go on without it, and nothing of theirs is lost or done twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from msgspec.structs import replace

from carma.core.model.events import Durable, StopRequested, TaskEstimated, TaskPlaced, TaskSubmitted
from carma.core.model.outcome import Cancelled
from carma.core.model.values import AttemptKey, Booking, GpuId, Notify, Owner, Placement, TaskId, TaskSpec
from carma.store.sqlite import SqliteStore
from tests.harness import LIMIT_S, Daemon, daemon_at_rest, serving, until

BEFORE = 1_700_000_000.0  # when the log of an earlier life was written
PLACEMENT = Placement(gpus=(GpuId("GPU-of-before"),), booking=Booking(memory_mib=100, source="declared"))


def gate(daemon: Daemon) -> tuple[Path, tuple[str, ...]]:
    """A command that says when it runs and goes on until the file appears; it ends with 7."""
    file = daemon.home / "go"
    return file, ("sh", "-c", 'echo "$CARMA_ATTEMPT" >> runs; while ! [ -e go ]; do sleep 0.02; done; exit 7')


def runs(daemon: Daemon) -> list[str]:
    file = daemon.home / "runs"
    return file.read_text().split() if file.exists() else []


def earlier_log(daemon: Daemon, *events: Durable) -> None:
    """What a daemon that was killed right after these events leaves behind."""
    store = SqliteStore(daemon.paths.database)
    store.new_task_ids(1)
    store.append(events)
    store.close()


def submitted(daemon: Daemon) -> TaskSubmitted:
    spec = TaskSpec(
        command=("sh", "-c", 'echo "$CARMA_ATTEMPT" >> runs'),
        directory=str(daemon.home),
        environment={"PATH": os.environ["PATH"]},
    )
    return TaskSubmitted(BEFORE, TaskId(1), Owner(os.geteuid(), os.getegid(), "me"), spec)


def test_a_running_task_is_adopted_after_kill_9() -> None:
    with serving() as daemon:
        go, command = gate(daemon)
        task = daemon.submit(*command)
        before = daemon.until_state(task, "running")
        daemon.kill()
        daemon.start()
        after = daemon.until_state(task, "running")
        assert after.attempts[0].pid == before.attempts[0].pid
        go.touch()
        assert daemon.wait(task).outcome == {"kind": "failed", "code": 7, "message": ""}
        assert runs(daemon) == ["1"]


def test_a_clean_stop_leaves_tasks_running() -> None:
    with serving() as daemon:
        go, command = gate(daemon)
        task = daemon.submit(*command)
        pid = daemon.until_state(task, "running").attempts[0].pid
        assert pid is not None
        assert daemon.stop() == 0
        os.kill(pid, 0)
        go.touch()
        daemon.start()
        assert daemon.wait(task).exit_code == 7
        assert runs(daemon) == ["1"]


def test_a_task_that_ended_while_no_daemon_looked_gets_its_outcome() -> None:
    with serving() as daemon:
        go, command = gate(daemon)
        task = daemon.submit(*command)
        daemon.until_state(task, "running")
        daemon.kill()
        go.touch()
        until(lambda: bool(list(daemon.paths.log_dir.glob("*/exit.json"))), "the runner wrote down the end")
        over_by = time.time()
        daemon.start()
        view = daemon.wait(task)
        assert (view.exit_code, len(view.attempts)) == (7, 1)
        assert view.started_at is not None
        assert view.ended_at is not None
        assert view.started_at <= view.ended_at <= over_by, (
            "the recorded end is the time at which the process ended, not the time at which it was noticed"
        )
        assert view.attempts[0].ended_at == view.ended_at


def test_waiting_tasks_are_still_there_and_run() -> None:
    with serving(gpus=1, placement__policy="exclusive") as daemon:
        go, command = gate(daemon)
        first = daemon.submit(*command)
        daemon.until_state(first, "running")
        waiting = [daemon.submit("sh", "-c", "exit 0") for _ in range(5)]
        daemon.kill()
        daemon.start()
        assert {view.id for view in daemon.client.tasks()} == {first, *waiting}
        go.touch()
        assert [daemon.wait(task).exit_code for task in waiting] == [0] * 5


def test_a_restart_with_fewer_gpus_loses_no_waiting_task() -> None:
    with serving(gpus=2) as daemon:
        daemon.client.drain("0")
        gang = daemon.submit("true", gpus=2)
        daemon.stop()
        daemon.environ["CARMA_VIRTUAL__GPUS"] = "1"
        daemon.start()
        daemon.client.resume("0")
        assert daemon.wait(daemon.submit("true")).exit_code == 0
        view = daemon.client.task(gang)
        assert (view.state, view.reason_code) == ("queued", "NeverFits")
        assert view.reason == "it asks for 2 GPUs; this server has 1"
        daemon.stop()
        daemon.environ["CARMA_VIRTUAL__GPUS"] = "2"
        daemon.start()
        assert daemon.wait(gang).exit_code == 0


def test_a_stop_that_was_asked_for_before_the_crash_is_carried_out_after_it() -> None:
    with serving() as daemon:
        command = ("sh", "-c", "trap '' TERM; echo 1 >> runs; while :; do sleep 0.05; done")
        task = daemon.submit(*command, grace_s=0.3)
        until(lambda: bool(runs(daemon)), "the task runs and is deaf")
        daemon.client.cancel(task)
        daemon.kill()
        daemon.start()
        assert (daemon.wait(task).outcome or {})["kind"] == "cancelled"


def test_a_task_whose_estimate_was_lost_is_estimated_again() -> None:
    with daemon_at_rest() as daemon:
        earlier_log(daemon, submitted(daemon))
        daemon.start()
        assert daemon.wait(1).exit_code == 0
        assert runs(daemon) == ["1"]


def test_an_attempt_that_was_placed_but_never_launched_is_launched_once() -> None:
    with daemon_at_rest() as daemon:
        key = AttemptKey(TaskId(1), 1)
        earlier_log(
            daemon, submitted(daemon), TaskEstimated(BEFORE, TaskId(1), None), TaskPlaced(BEFORE, key, PLACEMENT)
        )
        daemon.start()
        assert daemon.wait(1).exit_code == 0
        assert runs(daemon) == ["1"]


def test_an_attempt_that_was_cancelled_before_it_was_launched_never_starts() -> None:
    with daemon_at_rest() as daemon:
        key = AttemptKey(TaskId(1), 1)
        earlier_log(
            daemon,
            submitted(daemon),
            TaskEstimated(BEFORE, TaskId(1), None),
            TaskPlaced(BEFORE, key, PLACEMENT),
            StopRequested(BEFORE, TaskId(1), Cancelled("ada"), 10.0),
        )
        daemon.start()
        assert (daemon.wait(1).outcome or {})["kind"] == "cancelled"
        assert runs(daemon) == []


def test_logs_of_a_lost_database_are_not_taken_for_those_of_new_tasks() -> None:
    with serving() as daemon:
        old = daemon.submit("sh", "-c", "exit 5")
        assert daemon.wait(old).exit_code == 5
        daemon.stop()
        for file in daemon.home.glob("carma.db*"):
            file.unlink()
        assert daemon.spawn().wait(LIMIT_S) == 1
        assert "--new-database" in daemon.log
        daemon.start("--new-database")
        new = daemon.submit("true")
        assert new > old
        assert daemon.wait(new).exit_code == 0


def test_time_does_not_go_back_over_a_restart() -> None:
    """The log of an earlier life may be from a machine whose clock ran ahead."""
    ahead = 4_000_000_000.0
    with daemon_at_rest() as daemon:
        earlier_log(daemon, TaskSubmitted(ahead, TaskId(1), submitted(daemon).owner, submitted(daemon).spec))
        daemon.start()
        view = daemon.wait(1)
        assert view.ended_at is not None
        assert view.ended_at >= ahead


def test_a_task_killed_from_outside_is_a_failure_not_a_loss() -> None:
    with serving() as daemon:
        _, command = gate(daemon)
        task = daemon.submit(*command)
        pid = daemon.until_state(task, "running").attempts[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert daemon.wait(task).exit_code == 128 + signal.SIGKILL


def test_a_notice_outlasts_kill_9_and_is_sent_once() -> None:
    def told(daemon: Daemon) -> list[str]:
        file = daemon.home / "told"
        return file.read_text().splitlines() if file.exists() else []

    def is_reported(task: int) -> bool:
        return any(line.event == "notice_sent" for line in daemon.client.story(task))

    with daemon_at_rest() as daemon:
        first = submitted(daemon)
        notify = Notify(targets=("""sh -c 'echo "$CARMA_TASK_ID $CARMA_NOTICE" >> told'""",))
        earlier_log(
            daemon,
            replace(first, spec=replace(first.spec, notify=notify)),
            StopRequested(BEFORE, TaskId(1), Cancelled("root"), 10.0),
        )
        daemon.start()
        until(lambda: is_reported(1), "the notice was sent")
        failed = daemon.submit("false", notify=notify)
        until(lambda: is_reported(failed), "the second notice was sent")
        daemon.kill()
        daemon.start()
        assert daemon.wait(daemon.submit("true")).exit_code == 0
        assert daemon.stop() == 0  # it waits for what is being sent
        assert told(daemon) == ["1 failure", f"{failed} failure"]
