"""What every launcher keeps to: the one that starts processes and the one in memory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carma.core.model.outcome import Failed, Succeeded
from carma.core.model.values import TaskSpec
from carma.core.ports import Found, Launcher, LaunchOrder
from carma.launch.process import ProcessLauncher
from carma.testing.fake_launcher import AT_ONCE, FOREVER, FakeLauncher, Plan
from tests.launch_orders import key, look, order_of, shell, spec_of, tidy, until, until_ended, until_running

PLANS = {
    "succeeds": AT_ONCE,
    "fails": Plan(outcome=Failed(3), after_s=0.0),
    "runs": FOREVER,
    "stubborn": Plan(ignores=(signal.SIGTERM,)),
    "saves": Plan(saves_in_s=0.0),
    "nowhere": Plan(outcome=Failed(126, "cannot enter the working directory"), after_s=0.0, starts=False),
}


class Subject:
    """A launcher, orders of a known behaviour for it, and whether an attempt has come to the point of it."""

    def __init__(self, launcher: Launcher, spec: Callable[[str], TaskSpec], ready: Callable[[], bool]) -> None:
        self.launcher = launcher
        self.ready = ready
        self._spec = spec

    def order(self, behaviour: str, task: int = 1) -> LaunchOrder:
        return order_of(self._spec(behaviour), task)

    def launch(self, behaviour: str, task: int = 1) -> None:
        self.launcher.launch(self.order(behaviour, task))


def in_memory(_: Path) -> Subject:
    launcher = FakeLauncher(lambda order: PLANS[order.spec.name])
    return Subject(launcher, lambda behaviour: spec_of("true", name=behaviour), lambda: True)


def processes(directory: Path) -> Subject:
    specs = {
        "succeeds": shell("exit 0"),
        "fails": shell("exit 3"),
        "runs": spec_of("sleep", "600"),
        "stubborn": shell("trap '' TERM; : > ready; while :; do sleep 0.05; done", directory),
        "saves": shell("trap 'exit 0' USR1; : > ready; while :; do sleep 0.05; done", directory),
        "nowhere": shell("exit 0", directory / "nowhere"),
    }
    launcher = ProcessLauncher(directory / "attempts", run_as_submitter=False)
    return Subject(launcher, specs.__getitem__, (directory / "ready").exists)


@pytest.fixture(params=[in_memory, processes])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    made: Subject = request.param(tmp_path)
    yield made
    tidy(tmp_path / "attempts")


def test_an_order_that_was_never_given_is_neither_running_nor_ended(subject: Subject) -> None:
    assert subject.launcher.poll([key(9)]) == (Found(key=key(9)),)
    assert subject.launcher.pids([key(9)]) == {}


def test_a_success_has_a_process_and_both_times(subject: Subject) -> None:
    subject.launch("succeeds")
    assert until_ended(subject.launcher, key()) == Succeeded()
    found = look(subject.launcher, key())
    assert found.pid is not None
    assert found.started_at is not None
    assert found.ended_at is not None
    assert found.started_at <= found.ended_at


def test_an_exit_code_is_an_ordinary_failure(subject: Subject) -> None:
    subject.launch("fails")
    assert until_ended(subject.launcher, key()) == Failed(3)


def test_a_running_attempt_shows_its_process(subject: Subject) -> None:
    subject.launch("runs")
    pid = until_running(subject.launcher, key())
    assert subject.launcher.pids([key()])[pid] == key()
    assert look(subject.launcher, key()).outcome is None


def test_how_it_shares_its_gpus_is_known_from_the_start(subject: Subject) -> None:
    subject.launch("runs")
    until_running(subject.launcher, key())
    found = look(subject.launcher, key())
    assert found.confinement is not None
    assert found.confinement.mechanism == "timeslice"
    assert found.trouble is None


def test_a_signal_ends_it_and_is_named(subject: Subject) -> None:
    subject.launch("runs")
    until_running(subject.launcher, key())
    subject.launcher.signal(key(), signal.SIGTERM)
    outcome = until_ended(subject.launcher, key())
    assert outcome == Failed(143, "ended by SIGTERM")
    assert subject.launcher.pids([key()]) == {}


def test_sigkill_ends_what_ignores_sigterm(subject: Subject) -> None:
    subject.launch("stubborn")
    until_running(subject.launcher, key())
    until(subject.ready)
    subject.launcher.signal(key(), signal.SIGTERM)
    subject.launcher.signal(key(), signal.SIGKILL)
    outcome = until_ended(subject.launcher, key())
    assert isinstance(outcome, Failed)
    assert outcome.code == 137  # 143 if SIGTERM had done it
    assert "SIGKILL" in outcome.message


def test_the_same_order_twice_is_one_process(subject: Subject) -> None:
    subject.launch("runs")
    subject.launch("runs")
    pid = until_running(subject.launcher, key())
    subject.launch("runs")
    assert look(subject.launcher, key()).pid == pid
    assert list(subject.launcher.pids([key()])) == [pid]


def test_an_order_for_what_has_ended_changes_nothing(subject: Subject) -> None:
    subject.launch("fails")
    until_ended(subject.launcher, key())
    before = look(subject.launcher, key())
    subject.launch("fails")
    assert look(subject.launcher, key()) == before


def test_what_cannot_start_is_an_outcome_without_a_process(subject: Subject) -> None:
    subject.launch("nowhere")
    outcome = until_ended(subject.launcher, key())
    assert isinstance(outcome, Failed)
    assert outcome.code == 126
    assert "working directory" in outcome.message
    assert look(subject.launcher, key()).pid is None


def test_every_key_gets_one_answer_in_order(subject: Subject) -> None:
    subject.launch("fails", 1)
    subject.launch("runs", 2)
    until_ended(subject.launcher, key(1))
    until_running(subject.launcher, key(2))
    found = subject.launcher.poll([key(2), key(7), key(1)])
    assert [one.key for one in found] == [key(2), key(7), key(1)]
    assert [one.outcome for one in found] == [None, None, Failed(3)]


def test_a_signal_to_what_is_gone_does_nothing(subject: Subject) -> None:
    subject.launch("succeeds")
    until_ended(subject.launcher, key())
    subject.launcher.signal(key(), signal.SIGKILL)
    subject.launcher.signal(key(8), signal.SIGKILL, whole_tree=False)
    assert look(subject.launcher, key()).outcome == Succeeded()
    assert look(subject.launcher, key(8)) == Found(key=key(8))


def test_a_signal_to_one_attempt_leaves_the_others(subject: Subject) -> None:
    subject.launch("runs", 1)
    subject.launch("runs", 2)
    until_running(subject.launcher, key(1))
    pid = until_running(subject.launcher, key(2))
    subject.launcher.signal(key(1), signal.SIGKILL)
    until_ended(subject.launcher, key(1))
    assert look(subject.launcher, key(2)) == subject.launcher.poll([key(2)])[0]
    assert subject.launcher.pids([key(1), key(2)]) == {pid: key(2)}


def test_one_that_listens_is_asked_and_leaves(subject: Subject) -> None:
    subject.launch("saves")
    until_running(subject.launcher, key())
    until(subject.ready)
    assert subject.launcher.ask(key(), signal.SIGUSR1, 7.0)
    assert until_ended(subject.launcher, key()) == Succeeded()
    assert look(subject.launcher, key()).told_at == 7.0


def test_one_that_does_not_listen_is_left_alone(subject: Subject) -> None:
    subject.launch("runs")
    pid = until_running(subject.launcher, key())
    assert not subject.launcher.ask(key(), signal.SIGUSR1, 7.0)
    assert not subject.launcher.ask(key(8), signal.SIGUSR1, 7.0)
    assert look(subject.launcher, key()).outcome is None
    assert subject.launcher.pids([key()]) == {pid: key()}
    subject.launcher.signal(key(), signal.SIGKILL)
    until_ended(subject.launcher, key())
    assert look(subject.launcher, key()).told_at is None
