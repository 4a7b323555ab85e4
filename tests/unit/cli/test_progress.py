"""Steps and slowdown on the screens that show them, and the flag that switches the counting off."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from carma.cli import carma
from carma.cli.wording import progress_text, rate_text, slowdown_text
from carma.wire.api_types import ProgressView, TaskView
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, gpu_view, running

MEASURED = ProgressView(steps=12_345, steps_per_s=8.0, alone_steps_per_s=10.0, last_step_at=990.0, slowdown=1.25)
PAUSED = ProgressView(steps=12_345, alone_steps_per_s=10.0, last_step_at=400.0)
FIRST_RUN = ProgressView(steps=1, steps_per_s=0.0125, last_step_at=990.0)
INFERRED = ProgressView(slowdown=1.31, inferred=True)
PAUSED_INFERRED = replace(PAUSED, slowdown=1.31, inferred=True)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "160")
        yield fake


def output(*words: str) -> str:
    result = CliRunner().invoke(carma, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def with_progress(view: TaskView, progress: ProgressView) -> TaskView:
    attempts = tuple(replace(attempt, progress=progress) for attempt in view.attempts)
    return replace(view, attempts=attempts, progress=progress)


def test_the_wording_of_progress() -> None:
    shown = {
        "measured": MEASURED,
        "paused": PAUSED,
        "first run": FIRST_RUN,
        "inferred": INFERRED,
        "paused, inferred": PAUSED_INFERRED,
        "nothing is known": ProgressView(),
    }
    assert_wording("progress", {name: progress_text(progress, 1_000.0) for name, progress in shown.items()})


def test_rates_and_slowdowns_have_few_digits_and_mark_what_is_inferred() -> None:
    assert [rate_text(rate) for rate in (1234.5, 12.34, 1.0, 0.0834, None)] == ["1234", "12.3", "1.0", "0.083", "-"]
    assert [slowdown_text(one) for one in (MEASURED, INFERRED, PAUSED)] == ["1.25", "~1.3", "-"]


def test_show_prints_the_progress_of_each_attempt(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: with_progress(running(1), MEASURED)}
    assert "12,345 optimizer steps, 8.0 steps/s, slowdown 1.25 (10.0 steps/s alone)" in output("show", "1")
    view = json.loads(output("show", "1", "--json"))
    assert view["progress"] == view["attempts"][0]["progress"]
    assert view["progress"]["slowdown"] == 1.25
    assert view["progress"]["inferred"] is False


def test_history_has_columns_for_progress(daemon: FakeDaemon) -> None:
    daemon.answers["history"] = [with_progress(finished(1), MEASURED), with_progress(finished(2), INFERRED)]
    titles, *rows = output("history", "--wide").splitlines()
    assert titles.split()[-4:-1] == ["STEPS", "STEP/S", "SLOWDOWN"]
    assert "12,345     8.0      1.25" in rows[0]
    assert "-       -      ~1.3" in rows[1]
    assert "STEPS" not in output("history")
    table = list(csv.reader(io.StringIO(output("history", "--csv", "-o", "id,steps,rate,slowdown"))))
    assert table[1:] == [["1", "12345", "8.0", "1.25"], ["2", "", "", "1.31"]]


def test_gpus_prints_the_slowdown_of_each_task_whose_slowdown_is_known(daemon: FakeDaemon) -> None:
    daemon.answers["gpus"] = [gpu_view(0, progress={7: MEASURED, 8: INFERRED, 9: PAUSED})]
    assert " 7:1.25,8:~1.3 " in output("gpus", "--wide")
    assert json.loads(output("gpus", "--json"))[0]["progress"]["8"]["inferred"] is True


def test_the_switch_travels_from_flags_and_files(daemon: FakeDaemon, tmp_path: Path) -> None:
    script, file = tmp_path / "run.sh", tmp_path / "task.toml"
    script.write_text("#!/bin/sh\n#CARMA --no-progress\ntrue\n")
    file.write_text('command = ["true"]\nprogress = false\n')
    for words in (["--", "true"], ["--no-progress", "--", "true"], [str(script)], ["--file", str(file)]):
        output("submit", *words)
    output("submit", "--progress", str(script))
    assert [request.spec.progress for request in daemon.asked("submit")] == [True, False, False, False, True]
