"""Messages besides tables: for an empty list, for a waiting task, for an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.cli.checks import gpu_checks as cards
from carma.cli.checks.doctor_facts import DoctorFacts
from carma.cli.error_output import complain
from carma.cli.output import spinner
from carma.cli.up import _kind
from carma.errors import NoGpus
from carma.wire import api_types as t
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, gpu_view, running, task_view


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "80")
        yield fake


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["queue"], "none of your tasks waits or runs;"),
        (["queue", "-a"], "no task waits or runs;"),
        (["queue", "-u", "bob", "-s", "running"], "no task of bob is running;"),
        (["history"], "no task has ended yet;"),
        (["history", "-s", "failed"], "no task with these properties has ended;"),
    ],
)
def test_the_message_for_an_empty_list_names_the_filter(daemon: FakeDaemon, words: list[str], told: str) -> None:
    result = CliRunner().invoke(carma, words)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith(told)
    assert daemon.requests


def test_work_that_takes_long_is_announced_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("carma.cli.output.ANNOUNCED_AFTER_S", 0.0)
    printed = ""
    with spinner("trial run of x"):
        while not printed:
            printed = capsys.readouterr().err
    assert printed == "carma: trial run of x ...\n"
    monkeypatch.setattr("carma.cli.output.ANNOUNCED_AFTER_S", 60.0)
    with spinner("trial run of x"), spinner("trial run of x", quiet=True):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("view", "words", "told"),
    [
        (task_view(1), [], "task 1 has not started; `carma explain 1` prints the reason"),
        (
            finished(1, attempts=(), outcome={"kind": "cancelled", "by": "bob"}),
            [],
            "task 1 cancelled by bob before it started",
        ),
        (finished(1), [], "task 1 has printed nothing"),
        (running(1), [], "task 1 has printed nothing yet"),
        (finished(1), ["--stdout"], "stdout is empty; `carma logs 1` prints both streams"),
        (finished(1), ["--stderr"], "stderr is empty; `carma logs 1` prints both streams"),
    ],
    ids=["waits", "never ran", "nothing", "nothing yet", "stdout", "stderr"],
)
def test_logs_say_why_there_are_none(daemon: FakeDaemon, view: t.TaskView, words: list[str], told: str) -> None:
    daemon.tasks = {1: view}
    result = CliRunner().invoke(carma, ["logs", *words, "1"])
    assert result.stdout == ""
    assert result.stderr == f"carma: note: {told}\n"


def test_following_prints_a_wait_only_for_a_task_that_waits(daemon: FakeDaemon) -> None:
    starting = task_view(1, reason="placed on GPU 0: idle", reason_code="Starting")
    answers = [starting, *[task_view(1)] * 20, finished(1)]  # one question may be several requests

    def answer(route: Any, task: Any, query: Any, body: Any, usual: Any = daemon.answer) -> Any:
        if route.name == "task" and len(answers) > 1:
            daemon.tasks[1] = answers.pop(0)
        elif route.name == "task":
            daemon.tasks[1] = answers[0]
        return usual(route, task, query, body)

    daemon.tasks = {1: starting}
    daemon.answer = answer  # type: ignore[method-assign]
    result = CliRunner().invoke(carma, ["run", "--", "true"])
    waits = [line for line in result.stderr.splitlines() if " waits: " in line]
    assert waits == ["carma: task 1 waits: needs 12.4 GiB; most free is 9.1 GiB on GPU 2"]


def test_a_settings_file_that_names_no_policy_or_estimator_of_ours_is_found_out(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    file = tmp_path / "carma.toml"
    for text, nearest in (
        ('[placement]\npolicy = "magmm"\n', "magm"),
        ('[memory]\nsources = ["declard"]\n', "declared"),
    ):
        file.write_text(text)
        result = CliRunner().invoke(carma, ["config", "check", str(file)])
        assert result.exit_code == 2
        assert nearest in result.stderr
    (daemon.home / "config.toml").write_text('[placement]\npolicy = "magmm"\n')
    assert "magmm" in CliRunner().invoke(carma, ["doctor"]).stdout


def test_doctor_accepts_missing_real_gpus_if_the_daemon_has_virtual_ones(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(**_: object) -> None:
        raise NoGpus("the GPUs cannot be read", "try virtual ones")

    monkeypatch.setattr("carma.monitor.nvml.open_nvml", none)
    daemon.answers["gpus"] = [gpu_view(0, kind="virtual")]
    assert cards.gpus(DoctorFacts()).verdict == "ok"
    daemon.answers["gpus"] = [gpu_view(0)]
    assert cards.gpus(DoctorFacts()).verdict == "warn"


def test_a_gpu_name_with_its_memory_is_not_extended() -> None:
    assert _kind("Virtual GPU 40 GiB", 40_960) == "Virtual GPU 40 GiB"
    assert _kind("NVIDIA H200", 143_360) == "NVIDIA H200, 140.0 GiB"


def test_an_error_is_folded_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    complain("many words that do not fit in thirty columns", "do something")
    assert capsys.readouterr().err.splitlines() == [
        "carma: many words that do not fit in thirty columns",
        "  hint: do something",
    ]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    complain("many words that do not fit in thirty columns", "do something")
    assert capsys.readouterr().err.splitlines() == [
        "carma: many words that do not",
        "        fit in thirty columns",
        "  hint: do something",
    ]
