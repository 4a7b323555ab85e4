"""The verbs that look, and those that change a task, against a daemon whose answers the test lays out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from carma.cli import ALIASES, VERBS, carma, follow
from carma.errors import NotAllowed, WrongState
from carma.wire import api_types as t
from tests.unit.cli.scripted_daemon import NOW, SERVER, FakeDaemon, finished, gpu_view, running, task_view

EXPLANATION = t.Explanation(
    task=1,
    policy="magm",
    state="queued",
    reason="needs 12.4 GiB; most free is 9.1 GiB on GPU 2",
    needs_mib=12_700,
    needs_source="declared",
    reserved_start_at=NOW + 60,
    entries=(
        t.ExplainEntry(gpu="GPU-0", index=0, accepted=False, reason="is drained: fan", code="Drained"),
        t.ExplainEntry(gpu="GPU-1", index=1, accepted=True, reason="", score=29.5, parts={"room_mib": 29.5}),
    ),
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "80")
        yield fake


def call(*words: str, **more: Any) -> Result:
    result = CliRunner().invoke(carma, list(words), **more)
    assert "Traceback" not in result.output
    return result


def test_the_queue_prints_waiting_tasks_with_reasons(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: running(1), 2: task_view(2), 3: finished(3)}
    lines = call("queue").stdout.splitlines()
    assert lines[0].split() == ["ID", "NAME", "ST", "TIME", "GPUS", "WHERE", "(WHY)"]
    assert lines[1].split() == ["1", "train", "R", "01:39", "1x12.4G", "GPU", "2"]
    assert "PD" in lines[2]
    assert len(lines) == 3


def test_the_queue_is_the_callers_unless_asked_otherwise(daemon: FakeDaemon) -> None:
    call("queue")
    call("ls", "-u", "all")
    call("queue", "-a", "-s", "running", "-n", "5")
    asked = [query for name, _, query, _ in daemon.requests if name == "tasks"]
    every = {"limit": "100000"}
    assert asked == [every, {"user": "all", **every}, {"user": "all", "state": "running", "limit": "5"}]


def test_columns_can_be_chosen_and_a_wrong_one_names_the_nearest(daemon: FakeDaemon) -> None:
    daemon.tasks = {2: task_view(2)}
    assert call("queue", "-o", "id,code,command", "--no-header").stdout.split() == [
        "2",
        "GpuMemory",
        "python",
        "train.py",
    ]
    result = call("queue", "-o", "id,comand")
    assert result.exit_code == 2
    assert "'command'" in result.stderr


@pytest.mark.parametrize("words", [["queue"], ["queue", "-a"], ["gpus"], ["history"], ["explain", "1"], ["show", "1"]])
def test_tables_fit_80_columns_and_carry_no_control_characters(daemon: FakeDaemon, words: list[str]) -> None:
    evil: dict[str, Any] = {
        "name": "long" * 30 + "\x1b[31m\n",
        "comment": "\x07",
        "command": ("x" * 200, "\x1b]0;title\x07"),
    }
    daemon.tasks = {1: running(1, **evil), 2: task_view(2, **evil), 3: finished(3, **evil)}
    daemon.answers["gpus"] = [gpu_view(0), gpu_view(1, state="closed", reason="SM activity is 0.93, the cap is 0.80")]
    daemon.answers["explain"] = EXPLANATION
    result = call(*words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert all(char.isprintable() or char == "\n" for char in result.stdout)


@pytest.mark.parametrize("verb", ["queue", "history"])
def test_columns_of_json_are_refused(daemon: FakeDaemon, verb: str) -> None:
    assert call(verb, "--json", "-o", "id").exit_code == 2
    assert daemon.requests == []


def test_explain_has_no_empty_column(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: running(1)}
    daemon.answers["explain"] = replace(EXPLANATION, state="running", entries=EXPLANATION.entries[1:])
    assert "SCORE" in call("explain", "1").stdout
    assert "WHY" not in call("explain", "1").stdout


def test_run_lists_no_options_of_several_tasks() -> None:
    assert "--array" in call("submit", "--help").stdout
    shown = call("run", "--help").stdout
    assert not {"--array", "--param", "--stdin", "--dry-run"} & set(shown.replace(",", " ").split())


def test_a_missing_choice_is_one_line() -> None:
    error = call("completion").stderr.splitlines()
    assert "bash, zsh, fish" in error[0]
    assert len(error) == 2


def test_wide_cuts_nothing(daemon: FakeDaemon) -> None:
    daemon.tasks = {2: task_view(2, name="n" * 100)}
    assert "n" * 100 in call("queue", "--wide").stdout


@pytest.mark.parametrize("words", [["queue"], ["gpus"], ["history"]])
def test_json_of_lists_is_a_list(daemon: FakeDaemon, words: list[str]) -> None:
    assert json.loads(call(*words, "--json").stdout) == []
    daemon.tasks = {2: task_view(2), 3: finished(3)}
    daemon.answers["gpus"] = [gpu_view(0)]
    (entry,) = json.loads(call(*words, "--json").stdout)
    assert isinstance(entry, dict)


def test_show_json_has_the_names_that_hold(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: running(1)}
    shown = json.loads(call("show", "1", "--json").stdout)
    names = {"id", "state", "outcome", "attempts", "gpus", "estimate", "booking_mib", "observed_mib", "reason"}
    assert names <= shown.keys()
    assert msgspec.convert(shown, t.TaskView) == daemon.tasks[1]


def test_show_json_has_the_parts_of_an_estimate_and_the_first_booking(daemon: FakeDaemon) -> None:
    estimate = t.EstimateView(footprint_mib=12_000, upper_mib=12_700, source="trace", parts_mib={"weights": 400})
    shown = running(1, estimate=estimate)
    attempt = replace(shown.attempts[0], booking_mib=11_550, placed_mib=12_700)
    daemon.tasks = {1: replace(shown, booking_mib=11_550, attempts=(attempt,))}
    found = json.loads(call("show", "1", "--json").stdout)
    assert found["estimate"]["parts_mib"] == {"weights": 400}
    assert (found["attempts"][0]["booking_mib"], found["attempts"][0]["placed_mib"]) == (11_550, 12_700)


def test_explain_json_has_one_entry_a_gpu(daemon: FakeDaemon) -> None:
    daemon.tasks, daemon.answers["explain"] = {1: task_view(1)}, EXPLANATION
    entries = json.loads(call("explain", "1", "--json").stdout)
    assert [(each["gpu"], each["accepted"], each["reason"], each["score"]) for each in entries] == [
        ("GPU-0", False, "is drained: fan", None),
        ("GPU-1", True, "", 29.5),
    ]


def test_gpus_prints_a_dash_for_a_missing_metric(daemon: FakeDaemon) -> None:
    foreign = (t.ForeignView(pid=1, name="x", memory_mib=5),)
    daemon.answers["gpus"] = [gpu_view(0, name="A100", used_mib=None, sm_active=None, tasks=(), foreign=foreign)]
    row = call("info", "--no-header").stdout.split()
    assert row[:7] == ["0", "A100", "-", "+1", "foreign", "-/12.4/40.0", "-"]


def test_history_as_csv_is_for_programs(daemon: FakeDaemon) -> None:
    daemon.tasks = {3: finished(3, code=7)}
    lines = call("history", "--csv", "-o", "id,st,exit,time,peak").stdout.splitlines()
    assert lines == ["id,st,exit,time,peak", "3,F,7,90.0,11000"]


def test_an_empty_queue_is_reported_on_stderr(daemon: FakeDaemon) -> None:
    result = call("queue")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "carma history" in result.stderr
    assert daemon.requests


def test_logs_are_passed_on_byte_for_byte(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1)}
    daemon.output = {"stdout": b"\x00\xff out\r\n", "stderr": b"err"}
    assert call("logs", "--stdout", "1").stdout_bytes == b"\x00\xff out\r\n"
    assert call("logs", "--stderr", "-n", "3", "--attempt", "1", "1").stdout_bytes == b"err"
    assert daemon.requests[-1][2] == {"stream": "stderr", "attempt": "1", "tail": "3"}


@pytest.mark.parametrize("words", [("1",), ("--attempt", "1", "1"), ("-f", "1"), ("-f", "--attempt", "1", "1")])
def test_logs_have_both_streams_with_a_line_between_them(daemon: FakeDaemon, words: tuple[str, ...]) -> None:
    daemon.tasks = {1: finished(1)}
    daemon.output = {"stdout": b"\xff out", "stderr": b"failed\n"}
    assert call("logs", *words).stdout_bytes == b"\xff out\n==> stderr <==\nfailed\n"
    daemon.output["stderr"] = b""
    assert call("logs", *words).stdout_bytes == b"\xff out"
    view = finished(1)
    one_file = msgspec.structs.replace(view.attempts[0], stderr=view.attempts[0].stdout)
    daemon.tasks = {1: msgspec.structs.replace(view, attempts=(one_file,))}
    daemon.output["stderr"] = daemon.output["stdout"]
    assert call("logs", *words).stdout_bytes == b"\xff out"


def test_both_streams_of_a_running_task_are_followed_at_once(daemon: FakeDaemon) -> None:
    daemon.tasks, daemon.output = {1: running(1)}, {"stdout": b"out\n", "stderr": b"err\n"}
    usual, asked, at_once = daemon.answer, 0, False

    def answer(route: Any, task: int | None, query: dict[str, str], body: Any) -> Any:
        nonlocal asked, at_once
        asked += route.name == "task"
        at_once = at_once or (query.get("stream") == "stderr" and daemon.tasks[1].state == "running")
        if at_once or asked > 30:
            daemon.tasks = {1: finished(1)}
        return usual(route, task, query, body)

    daemon.answer = answer  # type: ignore[method-assign]
    lines = call("logs", "-f", "1").stdout.splitlines()
    assert at_once
    assert {"out", "err", "==> stderr <=="} <= set(lines)


def test_streams_that_are_followed_are_mixed_as_they_arrive() -> None:
    begun, failed = threading.Event(), threading.Event()

    def stdout() -> Iterator[tuple[str, bytes]]:
        yield "stdout", b"step 1"
        assert failed.wait(60)
        yield "stdout", b"step 2\n"

    def stderr() -> Iterator[tuple[str, bytes]]:
        assert begun.wait(60)
        yield "stderr", b"warning\n"

    found = b""
    for piece in follow.headed(follow.as_they_arrive([stdout(), stderr()])):
        found += piece
        begun.set()
        if b"warning" in found:
            failed.set()
    assert found == b"step 1\n==> stderr <==\nwarning\n==> stdout <==\nstep 2\n"


def test_output_in_a_file_of_the_user_is_read_by_the_user(daemon: FakeDaemon, tmp_path: Path) -> None:
    from carma.errors import NotFound

    own = tmp_path / "own.log"
    own.write_bytes(b"one\ntwo\nthree\n")
    view = finished(1)
    attempt = msgspec.structs.replace(view.attempts[0], stdout=str(own))
    daemon.tasks = {1: msgspec.structs.replace(view, attempts=(attempt,))}
    daemon.refuses["logs"] = NotFound("this output was sent elsewhere", "read it there")
    assert call("logs", "1").stdout == "one\ntwo\nthree\n"
    assert call("logs", "-n", "2", "-f", "1").stdout == "two\nthree\n"
    own.unlink()
    assert call("logs", "1").exit_code == 4


def test_wait_returns_the_highest_code(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1), 2: finished(2, code=9), 3: finished(3, code=5), 4: running(4)}
    assert call("wait", "1").exit_code == 0
    assert call("wait", "1-3").exit_code == 9
    assert call("wait", "1", "9").exit_code == 4
    assert call("wait", "--timeout", "0.01s", "4").exit_code == 124


def test_run_follows_both_streams_and_returns_the_code(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1, code=6, advice="leave --gpu-mem out")}
    daemon.output = {"stdout": b"hello\n", "stderr": b"oh\n"}
    result = call("run", "--", "true")
    assert (result.exit_code, result.stdout) == (6, "hello\n")
    assert "oh\n" in result.stderr
    assert "task 1 failed with exit code 6\ncarma: advice: leave --gpu-mem out\n" in result.stderr


def test_cancel_by_id_name_and_all(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: running(1), 2: task_view(2, name="sweep"), 3: finished(3, name="sweep")}
    assert call("cancel", "--signal", "INT", "1").exit_code == 0
    assert call("cancel", "--name", "sweep").exit_code == 0
    assert call("cancel", "--all").exit_code == 0
    asked = [(task, body.signal) for name, task, _, body in daemon.requests if name == "cancel"]
    assert asked == [(1, 2), (2, 15), (1, 15), (2, 15)]
    assert call("cancel").exit_code == 2
    assert call("cancel", "--name", "nobody").exit_code == 4


def test_each_task_is_tried_and_the_worst_code_returned(daemon: FakeDaemon) -> None:
    daemon.tasks = {2: task_view(2)}
    result = call("hold", "1", "2")
    assert result.exit_code == 4
    assert "there is no task 1" in result.stderr
    assert result.stdout == "hold 2\n"


@pytest.mark.parametrize(("error", "code"), [(NotAllowed("it is grace's task"), 4), (WrongState("it has ended"), 1)])
def test_refusals_have_their_exit_code(daemon: FakeDaemon, error: Any, code: int) -> None:
    daemon.tasks = {1: task_view(1)}
    for verb in ("cancel", "hold", "release", "retry"):
        daemon.refuses[verb] = error
        result = call(verb, "1")
        assert result.exit_code == code
        assert result.stderr == f"carma: {error}\n"


def test_update_sends_only_given_properties(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: task_view(1)}
    assert call("update", "1", "--gpu-mem", "2G", "--time", "5").exit_code == 0
    assert daemon.asked("update") == [t.UpdateRequest(gpu_memory_mib=2048, time_limit_s=300.0)]
    assert call("update", "1").exit_code == 2


def test_drain_and_resume(daemon: FakeDaemon) -> None:
    assert call("drain", "0", "GPU-1", "--reason", "fan").exit_code == 0
    assert call("resume").exit_code == 0
    assert daemon.asked("drain") == [t.DrainRequest(gpu="0", reason="fan"), t.DrainRequest(gpu="GPU-1", reason="fan")]
    assert daemon.asked("resume") == [t.DrainRequest()]


def test_config_shows_value_and_origin(daemon: FakeDaemon) -> None:
    daemon.answers["settings"] = [t.SettingView(name="gate.sm_active", value=0.7, origin="flag --set gate.sm_active")]
    line = call("config", "show").stdout.splitlines()[1]
    assert line.split(maxsplit=2) == ["gate.sm_active", "0.7", "flag --set gate.sm_active"]
    assert call("config", "show", "nope").exit_code == 4


def test_config_check_lists_every_mistake(daemon: FakeDaemon, tmp_path: Path) -> None:
    file = tmp_path / "carma.toml"
    file.write_text("[gate]\nsm_activ = 0.5\nsm_occupancy = 7\n")
    result = call("config", "check", str(file))
    assert result.exit_code == 2
    assert "gate.sm_active" in result.stderr
    assert "gate.sm_occupancy" in result.stderr
    file.write_text("[gate]\nsm_active = 0.5\n")
    assert call("config", "check", str(file)).stdout == f"{file}: ok\n"
    assert call("config", "check", str(tmp_path / "absent")).exit_code == 2
    assert not daemon.requests


def test_doctor_finds_the_daemon(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    findings = {each["check"]: each for each in json.loads(call("doctor", "--json").stdout)}
    assert findings["daemon"]["verdict"] == "ok"
    assert findings["directory"]["verdict"] == "ok"
    assert "policy magm" in findings["daemon"]["text"]
    (daemon.home / "config.toml").write_text("[gate]\nnope = 1\n")
    result = call("doctor")
    assert result.exit_code == 1
    assert "gate.nope" in result.stdout


def test_doctor_judges_the_daemon_that_serves_the_user(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    (daemon.home / "config.toml").write_text("[gate]\nnope = 1\n")  # another's: not this user's to mend
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    monkeypatch.setattr("os.access", lambda *_: False)
    findings = {each["check"]: each for each in json.loads(call("doctor", "--json").stdout)}
    assert (findings["directory"]["verdict"], findings["settings"]["verdict"]) == ("ok", "ok")
    assert "/data/carma" in findings["directory"]["text"]
    daemon.answers["server"] = msgspec.structs.replace(SERVER, uid=4242, gpus=1)
    findings = {each["check"]: each for each in json.loads(call("doctor", "--json").stdout)}
    assert (findings["directory"]["verdict"], findings["settings"]["verdict"]) == ("bad", "bad")
    assert "1 GPU," in findings["daemon"]["text"]


def test_down_asks_and_waits_until_it_is_gone(daemon: FakeDaemon) -> None:

    def end(route: Any, task: Any, query: Any, body: Any, usual: Any = daemon.answer) -> Any:
        answer = usual(route, task, query, body)
        if route.name == "shutdown":
            (daemon.home / "carma.sock").unlink()
        return answer

    daemon.answer = end  # type: ignore[method-assign]
    result = call("down", "--cancel")
    assert result.exit_code == 0
    assert daemon.asked("shutdown") == [t.ShutdownRequest(cancel_running=True)]


def test_every_verb_has_help_with_an_example() -> None:
    for name in [*VERBS, *ALIASES]:
        result = call(name, "--help")
        assert result.exit_code == 0
        assert f"  carma {ALIASES.get(name, name)}" in result.stdout.partition("Examples:")[2], name
