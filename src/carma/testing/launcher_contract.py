"""What every launcher must do, as tests: subclass `LauncherContract` and define the fixture `subject`.

A subject is a launcher with a task for each behaviour:

- `succeeds` ends with exit code 0, `fails` with 3.
- `runs` runs until a signal ends it. `stubborn` ignores SIGTERM.
- `saves` ends with exit code 0 on SIGUSR1.
- `nowhere` cannot start, because its working directory does not exist.

pytest finds the inherited tests. This module does not import pytest.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from carma.core.model.outcome import Failed, Outcome, Succeeded
from carma.core.model.settings import Stopping
from carma.core.model.values import AttemptKey, Booking, GpuId, Owner, Placement, TaskId, TaskSpec
from carma.core.ports import AttemptReport, Launcher, LaunchOrder

LIMIT_S = 180.0


def key(task: int = 1, attempt: int = 1) -> AttemptKey:
    return AttemptKey(TaskId(task), attempt)


def order_of(
    spec: TaskSpec, task: int = 1, attempt: int = 1, *, owner: Owner | None = None, gpus: tuple[str, ...] = ("GPU-0a",)
) -> LaunchOrder:
    placement = Placement(gpus=tuple(GpuId(gpu) for gpu in gpus), booking=Booking(memory_mib=4096, source="declared"))
    whose = owner if owner is not None else Owner(os.geteuid(), os.getegid(), "me")
    grace_s = Stopping().grace_of(spec)
    return LaunchOrder(key=key(task, attempt), owner=whose, spec=spec, placement=placement, gpus=(), grace_s=grace_s)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.01)


def look(launcher: Launcher, which: AttemptKey) -> AttemptReport:
    (found,) = launcher.poll([which])
    return found


def until_running(launcher: Launcher, which: AttemptKey) -> int:
    until(lambda: look(launcher, which).pid is not None)
    pid = look(launcher, which).pid
    assert pid is not None
    return pid


def until_ended(launcher: Launcher, which: AttemptKey) -> Outcome:
    until(lambda: look(launcher, which).outcome is not None)
    outcome = look(launcher, which).outcome
    assert outcome is not None
    return outcome


class LauncherSubject(NamedTuple):
    """`spec` makes the task of a behaviour; `ready` tells whether `stubborn` and `saves` handle their signals."""

    launcher: Launcher
    spec: Callable[[str], TaskSpec]
    ready: Callable[[], bool]

    def launch(self, behaviour: str, task: int = 1) -> None:
        self.launcher.launch(order_of(self.spec(behaviour), task))


class LauncherContract:
    def test_an_order_that_was_never_given_is_neither_running_nor_ended(self, subject: LauncherSubject) -> None:
        assert subject.launcher.poll([key(9)]) == (AttemptReport(key=key(9)),)
        assert subject.launcher.pids([key(9)]) == {}

    def test_a_success_has_a_process_and_both_times(self, subject: LauncherSubject) -> None:
        subject.launch("succeeds")
        assert until_ended(subject.launcher, key()) == Succeeded()
        found = look(subject.launcher, key())
        assert found.pid is not None
        assert found.started_at is not None
        assert found.ended_at is not None
        assert found.started_at <= found.ended_at

    def test_an_exit_code_is_an_ordinary_failure(self, subject: LauncherSubject) -> None:
        subject.launch("fails")
        assert until_ended(subject.launcher, key()) == Failed(3)

    def test_a_running_attempt_shows_its_process(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        pid = until_running(subject.launcher, key())
        assert subject.launcher.pids([key()])[pid] == key()
        assert look(subject.launcher, key()).outcome is None

    def test_a_started_attempt_reports_its_confinement(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        until_running(subject.launcher, key())
        found = look(subject.launcher, key())
        assert found.confinement is not None
        assert found.confinement.mechanism == "timeslice"
        assert found.trouble is None

    def test_a_signal_ends_an_attempt_and_the_outcome_names_it(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        until_running(subject.launcher, key())
        subject.launcher.signal(key(), signal.SIGTERM)
        outcome = until_ended(subject.launcher, key())
        assert outcome == Failed(143, "ended by SIGTERM")
        assert subject.launcher.pids([key()]) == {}

    def test_sigkill_ends_an_attempt_that_ignores_sigterm(self, subject: LauncherSubject) -> None:
        subject.launch("stubborn")
        until_running(subject.launcher, key())
        until(subject.ready)
        subject.launcher.signal(key(), signal.SIGTERM)
        subject.launcher.signal(key(), signal.SIGKILL)
        outcome = until_ended(subject.launcher, key())
        assert isinstance(outcome, Failed)
        assert outcome.code == 137  # 143 if SIGTERM had done it
        assert "SIGKILL" in outcome.message

    def test_the_same_order_twice_is_one_process(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        subject.launch("runs")
        pid = until_running(subject.launcher, key())
        subject.launch("runs")
        assert look(subject.launcher, key()).pid == pid
        assert list(subject.launcher.pids([key()])) == [pid]

    def test_an_order_for_an_ended_attempt_changes_nothing(self, subject: LauncherSubject) -> None:
        subject.launch("fails")
        until_ended(subject.launcher, key())
        before = look(subject.launcher, key())
        subject.launch("fails")
        assert look(subject.launcher, key()) == before

    def test_a_failure_to_start_is_an_outcome_without_a_process(self, subject: LauncherSubject) -> None:
        subject.launch("nowhere")
        outcome = until_ended(subject.launcher, key())
        assert isinstance(outcome, Failed)
        assert outcome.code == 126
        assert "working directory" in outcome.message
        assert look(subject.launcher, key()).pid is None

    def test_every_key_gets_one_answer_in_order(self, subject: LauncherSubject) -> None:
        subject.launch("fails", 1)
        subject.launch("runs", 2)
        until_ended(subject.launcher, key(1))
        until_running(subject.launcher, key(2))
        found = subject.launcher.poll([key(2), key(7), key(1)])
        assert [one.key for one in found] == [key(2), key(7), key(1)]
        assert [one.outcome for one in found] == [None, None, Failed(3)]

    def test_a_signal_to_an_ended_or_unknown_attempt_has_no_effect(self, subject: LauncherSubject) -> None:
        subject.launch("succeeds")
        until_ended(subject.launcher, key())
        subject.launcher.signal(key(), signal.SIGKILL)
        subject.launcher.signal(key(8), signal.SIGKILL)
        assert look(subject.launcher, key()).outcome == Succeeded()
        assert look(subject.launcher, key(8)) == AttemptReport(key=key(8))

    def test_a_signal_to_one_attempt_leaves_the_others(self, subject: LauncherSubject) -> None:
        subject.launch("runs", 1)
        subject.launch("runs", 2)
        until_running(subject.launcher, key(1))
        pid = until_running(subject.launcher, key(2))
        subject.launcher.signal(key(1), signal.SIGKILL)
        until_ended(subject.launcher, key(1))
        assert look(subject.launcher, key(2)) == subject.launcher.poll([key(2)])[0]
        assert subject.launcher.pids([key(1), key(2)]) == {pid: key(2)}

    def test_a_paused_attempt_goes_on_after_its_pause_and_twice_is_once(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        pid = until_running(subject.launcher, key())
        until(lambda: subject.launcher.pause(key()))
        assert subject.launcher.pause(key())
        assert look(subject.launcher, key()).outcome is None
        assert subject.launcher.unpause(key())
        assert subject.launcher.unpause(key())
        assert subject.launcher.pids([key()]) == {pid: key()}
        assert not subject.launcher.pause(key(8))
        assert subject.launcher.unpause(key(8)), "nothing is left to do"

    def test_a_signal_that_stops_a_paused_attempt_ends_it(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        until_running(subject.launcher, key())
        until(lambda: subject.launcher.pause(key()))
        subject.launcher.signal(key(), signal.SIGTERM)
        assert until_ended(subject.launcher, key()) == Failed(143, "ended by SIGTERM")

    def test_an_attempt_with_a_handler_gets_the_checkpoint_signal_and_ends(self, subject: LauncherSubject) -> None:
        subject.launch("saves")
        until_running(subject.launcher, key())
        until(subject.ready)
        assert subject.launcher.request_checkpoint(key(), signal.SIGUSR1, 7.0)
        assert until_ended(subject.launcher, key()) == Succeeded()
        assert look(subject.launcher, key()).checkpoint_asked_at == 7.0

    def test_an_attempt_without_a_handler_gets_no_checkpoint_signal(self, subject: LauncherSubject) -> None:
        subject.launch("runs")
        pid = until_running(subject.launcher, key())
        assert not subject.launcher.request_checkpoint(key(), signal.SIGUSR1, 7.0)
        assert not subject.launcher.request_checkpoint(key(8), signal.SIGUSR1, 7.0)
        assert look(subject.launcher, key()).outcome is None
        assert subject.launcher.pids([key()]) == {pid: key()}
        subject.launcher.signal(key(), signal.SIGKILL)
        until_ended(subject.launcher, key())
        assert look(subject.launcher, key()).checkpoint_asked_at is None
