"""A real daemon, a real process that saves on a signal: it is asked, leaves, comes back and goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.values import SaveSignal
from tests.harness import Daemon, daemon_at_rest, serving, until, virtual

# Counts up to a number; USR1 makes it save and end. Each start is noted, with what it found in its environment.
COUNTER = """
import json, os, pathlib, signal, sys, time
goal, status, stays = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["stays"]
saved, notes = pathlib.Path("saved"), pathlib.Path("notes")
count = int(saved.read_text()) if saved.exists() else 0
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
names = ("CARMA_ATTEMPT", "CARMA_RESTART_COUNT", "CARMA_PREEMPTED")
with notes.open("a") as file:
    file.write(json.dumps({"from": count, **{name: os.environ.get(name) for name in names}}) + "\\n")
while count < goal or pathlib.Path("wait").exists():
    time.sleep(0.01)
    count += 1
    print(count, flush=True)
    if asked:
        pathlib.Path("told").write_text(str(len(asked)))
        if not stays:
            new = pathlib.Path("saving")
            new.write_text(str(count))
            new.replace(saved)
            sys.exit(status)
pathlib.Path("done").write_text(str(count))
"""


def counting(daemon: Daemon, goal: int = 5, status: int = 3, *more: str, grace_s: float = 60.0, **spec: object) -> int:
    (daemon.home / "wait").touch()
    command = (sys.executable, "-c", COUNTER, str(goal), str(status), *more)
    task = daemon.submit(*command, checkpoint=SaveSignal(10, grace_s), gpu_memory_mib=100, **spec)
    until((daemon.home / "notes").exists, "it counts")
    return task


def notes(home: Path) -> list[dict[str, object]]:
    file = home / "notes"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving(gpus=1) as made:
        yield made


def come_back(daemon: Daemon, task: int, attempt: int) -> None:
    until(lambda: len(notes(daemon.home)) >= attempt, "it has started again")
    until(lambda: daemon.client.task(task).state == "running", "and is known to run")


@pytest.mark.parametrize("status", [0, 3])
def test_it_saves_comes_back_and_goes_on_where_it_was(daemon: Daemon, status: int) -> None:
    task = counting(daemon, 5, status)
    daemon.until_state(task, "running")
    assert "asked to save" in daemon.client.preempt(task).note
    come_back(daemon, task, 2)
    saved = int((daemon.home / "saved").read_text())
    (daemon.home / "wait").unlink()
    view = daemon.wait(task)
    assert view.outcome == {"kind": "succeeded"}
    assert [(attempt.outcome or {})["kind"] for attempt in view.attempts] == ["preempted", "succeeded"]
    assert notes(daemon.home) == [
        {"from": 0, "CARMA_ATTEMPT": "1", "CARMA_RESTART_COUNT": "0", "CARMA_PREEMPTED": None},
        {"from": saved, "CARMA_ATTEMPT": "2", "CARMA_RESTART_COUNT": "1", "CARMA_PREEMPTED": "1"},
    ]
    assert int((daemon.home / "done").read_text()) >= saved
    story = [line.text for line in daemon.client.story(task)]
    assert any("to save a checkpoint and end within" in text for text in story)
    assert any("saved a checkpoint and ended, as" in text for text in story)


def test_with_hold_it_waits_until_it_is_released(daemon: Daemon) -> None:
    task = counting(daemon)
    daemon.until_state(task, "running")
    daemon.client.preempt(task, hold=True, reason="the GPU is needed")
    until(lambda: daemon.client.task(task).held, "it is back and held")
    view = daemon.client.task(task)
    assert (view.state, view.code) == ("queued", "H")
    (daemon.home / "wait").unlink()
    daemon.client.release(task)
    assert daemon.wait(task).exit_code == 0


def test_a_task_that_does_not_leave_keeps_running_and_is_marked(daemon: Daemon) -> None:
    task = counting(daemon, 5, 0, "stays", grace_s=1.0)
    daemon.until_state(task, "running")
    daemon.client.preempt(task)
    until((daemon.home / "told").exists, "it was told")
    until(lambda: daemon.client.task(task).reason_code == "Stayed", "its grace is over")
    assert daemon.client.task(task).state == "running"
    (daemon.home / "wait").unlink()
    view = daemon.wait(task)
    assert view.outcome == {"kind": "succeeded"}
    assert len(view.attempts) == 1


def test_a_task_that_does_not_listen_gets_no_signal(daemon: Daemon) -> None:
    """`sleep` would die of the signal."""
    task = daemon.submit("sleep", "600", checkpoint=SaveSignal(10, 1.0), gpu_memory_mib=100)
    daemon.until_state(task, "running")
    pid = daemon.client.task(task).attempts[-1].pid
    daemon.client.preempt(task)
    until(lambda: daemon.client.task(task).reason_code == "Stayed", "its grace is over")
    view = daemon.client.task(task)
    assert (view.state, view.attempts[-1].pid, len(view.attempts)) == ("running", pid, 1)


def told_or_missed(daemon: Daemon, task: int) -> bool:
    return (daemon.home / "told").exists() or daemon.client.task(task).reason_code == "Stayed"


@pytest.mark.parametrize("ends_meanwhile", [True, False])
def test_a_kill_9_between_the_request_and_the_end_loses_nothing(ends_meanwhile: bool) -> None:
    with daemon_at_rest(gpus=1) as daemon:
        daemon.start()
        task = counting(daemon, grace_s=10.0)
        daemon.until_state(task, "running")
        daemon.client.preempt(task)
        if ends_meanwhile:
            until((daemon.home / "saved").exists, "it was told")
        daemon.kill()
        daemon.start()
        if not ends_meanwhile:  # killed between the record of the request and the signal, it is not asked by that one
            until(lambda: told_or_missed(daemon, task), "it was told, or the request was missed")
            if not (daemon.home / "told").exists():
                daemon.client.preempt(task)
        come_back(daemon, task, 2)
        (daemon.home / "wait").unlink()
        view = daemon.wait(task)
        assert view.outcome == {"kind": "succeeded"}
        assert [(attempt.outcome or {})["kind"] for attempt in view.attempts] == ["preempted", "succeeded"]
        assert notes(daemon.home)[1]["from"] == int((daemon.home / "saved").read_text())
        assert (daemon.home / "told").read_text() == "1", "told once"


def test_the_first_in_line_gets_the_gpu_of_a_task_of_lower_priority() -> None:
    asks = {"preemption__enabled": "true", "preemption__after_s": "0.5", "preemption__least_run_s": "0"}
    with serving(gpus=1, placement__policy="exclusive", **asks) as daemon:
        low = counting(daemon, priority=-5)
        daemon.until_state(low, "running")
        high = daemon.submit("sh", "-c", "test -e saved", gpu_memory_mib=100)
        view = daemon.wait(high)
        assert view.exit_code == 0, "what runs now runs after the other has saved"
        come_back(daemon, low, 2)
        story = [line.text for line in daemon.client.story(low)]
        assert any(f"task {high}, of priority 0, waits for its GPUs" in text for text in story)
        (daemon.home / "wait").unlink()
        assert daemon.wait(low).exit_code == 0


def test_a_task_that_ends_before_it_was_asked_has_succeeded(daemon: Daemon) -> None:
    ends = "while [ ! -e enough ]; do sleep 0.01; done; echo x >> ran"
    task = daemon.submit("sh", "-c", ends, checkpoint=SaveSignal(10, 600.0), gpu_memory_mib=100)
    daemon.until_state(task, "running")
    daemon.client.preempt(task)
    (daemon.home / "enough").touch()
    view = daemon.wait(task)
    assert (view.outcome, len(view.attempts)) == ({"kind": "succeeded"}, 1)
    assert (daemon.home / "ran").read_text() == "x\n"


def test_a_slow_program_is_asked_to_save_when_it_listens(daemon: Daemon) -> None:
    """Without a handler the signal would be its end."""
    wait = "import pathlib, time\nwhile not pathlib.Path('listen').exists(): time.sleep(0.01)\n"
    (daemon.home / "wait").touch()
    saves = SaveSignal(10, 600.0)
    task = daemon.submit(sys.executable, "-c", wait + COUNTER, "5", "3", checkpoint=saves, gpu_memory_mib=100)
    daemon.until_state(task, "running")
    daemon.client.preempt(task)
    assert daemon.client.task(task).reason_code == "Saving"
    (daemon.home / "listen").touch()
    come_back(daemon, task, 2)
    assert [(one.outcome or {}).get("kind") for one in daemon.client.task(task).attempts] == ["preempted", None]
    assert (daemon.home / "told").read_text() == "1"


def test_a_virtual_task_continues_where_it_was(daemon: Daemon) -> None:
    """The task cannot end before it is asked: its gate is closed until then."""
    file = daemon.home / "progress"
    save = ("--ramp-s", "0", "--save", str(file), "--gate", str(daemon.home / "gate"))
    task = daemon.submit(*virtual(1_000, 0.5, *save), checkpoint=SaveSignal(10, 600.0), gpu_memory_mib=1_200)
    daemon.until_state(task, "running")
    daemon.client.preempt(task)
    until(file.exists, "it has saved")
    (daemon.home / "gate").touch()
    view = daemon.wait(task)
    assert view.outcome == {"kind": "succeeded"}
    assert [(one.outcome or {})["kind"] for one in view.attempts] == ["preempted", "succeeded"]
    assert b"saved: 0.0 s of work are done" in b"".join(daemon.client.logs(task, attempt=1))
    assert b"done: 0.5 s of work" in b"".join(daemon.client.logs(task, attempt=2))
