"""What the shell completes, and the scripts for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from carma.cli import carma
from carma.errors import NotAllowed
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, running, task_view


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "80")
        yield fake


def completed(*words: str) -> list[str]:
    found = ShellComplete(carma, {}, "carma", "_CARMA_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


def test_ids_names_policies_and_columns_are_completed(daemon: FakeDaemon) -> None:
    daemon.tasks = {
        7: running(7, name="fit"),
        12: task_view(12, name="eval"),
        13: finished(13),
        8: running(8, name="fit"),
    }
    assert completed("cancel", "") == ["7", "12", "8"]
    assert completed("cancel", "1") == ["12"]
    assert completed("retry", "") == ["13"]
    assert completed("logs", "-f", "1") == ["12", "13"]
    assert completed("cancel", "--name", "") == ["fit", "eval"]
    assert completed("up", "--policy", "go") == ["goodput"]
    assert completed("queue", "-o", "id,st") == ["id,st", "id,state", "id,steps"]
    daemon.refuses["tasks"] = NotAllowed("no")
    assert completed("cancel", "") == []


def test_completion_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_CARMA_COMPLETE" in CliRunner().invoke(carma, ["completion", shell]).stdout
    monkeypatch.setenv("COMP_WORDS", "carma can")
    monkeypatch.setenv("COMP_CWORD", "1")
    completed = CliRunner().invoke(carma, [], env={"_CARMA_COMPLETE": "bash_complete"})
    assert "cancel" in completed.stdout
