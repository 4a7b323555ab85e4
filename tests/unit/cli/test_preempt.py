"""`carma preempt`, `carma drain --preempt`, and what lists and cards say of a task that was asked to save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from carma.cli import carma
from carma.wire import api_types as t
from tests.unit.cli.scripted_daemon import FakeDaemon, running


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        yield fake


def call(*words: str, **more: Any) -> Result:
    return CliRunner().invoke(carma, list(words), **more)


def fill(daemon: FakeDaemon) -> None:
    """1 saves, 2 does not, 3 was asked already, 4 saves on another GPU."""
    saves = {number: replace(running(number), checkpoint_signal=10, checkpoint_grace_s=60.0) for number in (1, 3, 4)}
    daemon.tasks = {
        1: replace(saves[1], gpus=("GPU-0",), gpu_indices=(0,)),
        2: replace(running(2), gpus=("GPU-0",), gpu_indices=(0,)),
        3: replace(
            saves[3], asked_to_save_at=5.0, reason="asked to save a checkpoint 12 s ago by carol", reason_code="Saving"
        ),
        4: replace(saves[4], gpus=("GPU-1",), gpu_indices=(1,)),
    }


def asked(daemon: FakeDaemon) -> list[int | None]:
    return [task for route, task, _query, _body in daemon.requests if route == "preempt"]


def test_tasks_are_asked_by_their_ids(daemon: FakeDaemon) -> None:
    fill(daemon)
    assert call("preempt", "1", "4", "--hold", "--reason", "tonight").exit_code == 0
    assert asked(daemon) == [1, 4]
    assert daemon.asked("preempt") == [t.PreemptRequest(hold=True, reason="tonight")] * 2


def test_all_selects_tasks_that_save_checkpoints_and_were_not_asked(daemon: FakeDaemon) -> None:
    fill(daemon)
    assert call("preempt", "--all").exit_code == 0
    assert asked(daemon) == [1, 4]


def test_preempt_needs_a_selection_of_tasks(daemon: FakeDaemon) -> None:
    assert call("preempt").exit_code == 2
    assert not daemon.requests


@pytest.mark.parametrize(
    ("words", "told"), [((), []), (("--preempt",), [1, 4]), (("1", "--preempt"), [4]), (("GPU-0", "--preempt"), [1])]
)
def test_a_drain_with_preempt_asks_only_tasks_that_save_checkpoints_on_its_gpus(
    daemon: FakeDaemon, words: tuple[str, ...], told: list[int]
) -> None:
    fill(daemon)
    assert call("drain", "--reason", "fan", *words).exit_code == 0
    assert asked(daemon) == told
    assert all(body.reason == "GPU drained: fan" for body in daemon.asked("preempt"))


def test_a_list_and_a_card_say_that_it_was_asked(daemon: FakeDaemon) -> None:
    fill(daemon)
    assert "asked to save a checkpoint 12 s ago by carol" in call("queue", "--wide").stdout
    card = call("show", "3").stdout
    assert "asked to save a checkpoint 12 s ago by carol" in card
    assert "SIGUSR1" in card
