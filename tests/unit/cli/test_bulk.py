"""Lists longer than a screen, verbs on all tasks of a user, and tasks that end in the meantime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from carma.cli import carma, queue
from carma.errors import WrongState
from carma.wire.routes import Route
from tests.unit.cli.scripted_daemon import FakeDaemon, running, task_view


class Limited(FakeDaemon):
    """Lists as many tasks as requested, by default 10. The tasks in `over` end together with the first one."""

    over: tuple[int, ...] = ()

    def answer(self, route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        answer = super().answer(route, task, query, body)
        if route.name == "cancel" and task in self.over:
            raise WrongState(f"task {task} is over")
        return answer[: int(query.get("limit", 10))] if route.name == "tasks" else answer


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limited]:
    with Limited() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "80")
        yield fake


def call(*words: str) -> Result:
    return CliRunner().invoke(carma, list(words))


def tasks_asked(daemon: FakeDaemon, verb: str) -> list[int | None]:
    return [task for name, task, _, _ in daemon.requests if name == verb]


def test_json_is_never_cut(daemon: Limited) -> None:
    daemon.tasks = {number: task_view(number) for number in range(1, 1_002)}
    assert len(json.loads(call("queue", "--json").stdout)) == 1_001
    assert len(json.loads(call("queue", "--json", "-n", "7").stdout)) == 7


def test_a_cut_table_has_a_note(daemon: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_ROWS", 3)
    daemon.tasks = {number: task_view(number) for number in range(1, 6)}
    short = call("queue", "--no-header")
    assert len(short.stdout.splitlines()) == 3
    assert short.stderr == "… and 2 more; -n 0 shows all\n"
    for words in (["-n", "0"], ["-n", "5"]):
        whole = call("queue", "--no-header", *words)
        assert (len(whole.stdout.splitlines()), whole.stderr) == (5, "")


@pytest.mark.parametrize("words", [["--all"], ["--name", "train"]])
def test_all_reaches_every_task(daemon: Limited, words: list[str]) -> None:
    daemon.tasks = {number: task_view(number) for number in range(1, 33)}
    result = call("cancel", *words)
    assert result.exit_code == 0
    assert len(tasks_asked(daemon, "cancel")) == 32
    assert result.stdout.splitlines()[19:] == ["cancel 20", "… and 12 more tasks"]


def test_tasks_that_ended_with_another_are_no_mistake_unless_they_were_named(daemon: Limited) -> None:
    daemon.tasks = {1: running(1), 2: task_view(2), 3: task_view(3)}
    daemon.over = (2, 3)
    result = call("cancel", "--all")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "cancel 1\n", "")
    result = call("cancel", "1", "2")
    assert result.exit_code == 1
    assert result.stderr == "carma: task 2 is over\n"


def test_hold_and_release_take_all_that_can_be(daemon: Limited) -> None:
    daemon.tasks = {1: running(1), 2: task_view(2), 3: task_view(3, held=True, name="other")}
    assert call("hold", "--all").exit_code == 0
    assert call("release", "--all").exit_code == 0
    assert (tasks_asked(daemon, "hold"), tasks_asked(daemon, "release")) == ([2], [3])
    assert call("release", "--name", "nobody").exit_code == 4
    assert call("hold", "--all", "2").exit_code == 2


def test_numbers_are_asked_for_in_words() -> None:
    for words, said in (
        (["queue", "-n", "x"], "'x' is not a whole number"),
        (["submit", "--priority", "99999", "--", "true"], "between -10,000 and 10,000"),
        (["submit", "--priority", "9" * 23, "--", "true"], "between -10,000 and 10,000"),
        (["simulate", "--seed", "9" * 23], "between 0 and 999,999,999,999,999"),
        (["simulate", "--seed", "1" + 15 * "0"], "between 0 and 999,999,999,999,999"),
        (["up", "--speed", "1e9"], "between 1e-06 and 100,000"),
        (["logs", "--attempt", "0", "1"], "at least 1"),
    ):
        result = call(*words)
        assert result.exit_code == 2
        assert said in result.stderr
    assert "RANGE" not in "".join(call(verb, "--help").stdout for verb in ("queue", "submit", "history", "update"))
