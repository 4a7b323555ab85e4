"""The command as a process: what it imports, its exit codes, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import __version__
from carma.cli import main
from carma.cli.error_output import INTERRUPTED
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, running, stale_socket, task_view
from tests.unit.cli.test_read import EXPLANATION

LIMIT_S = 180.0
ROOT = Path(__file__).parents[3]
IMPORTED = """
import json, os, sys
from carma.cli import main
sys.stdout = open(os.devnull, "w")
codes = [main(words) for words in json.loads(sys.argv[1])]
sys.stdout = sys.__stdout__
print(json.dumps({"codes": codes, "modules": sorted(sys.modules)}))
"""


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        yield fake


def environment(home: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("CARMA_")}
    return {**own, "CARMA_HOME": str(home), "COLUMNS": "80", **more}


def carma(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "carma", *words],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def imported(home: Path, *commands: list[str]) -> set[str]:
    """The modules that these commands import in one process."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(commands)],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["codes"] == [0] * len(commands), done.stderr
    return set(answer["modules"])


def test_help_imports_no_verb_and_nothing_heavy(tmp_path: Path) -> None:
    modules = imported(tmp_path, ["--help"])
    assert not modules & {
        "rich",
        "msgspec",
        "starlette",
        "uvicorn",
        "asyncio",
        "sqlite3",
        "textual",
        "carma.client",
        "carma.core",
    }
    assert {name for name in modules if name.startswith("carma.cli.")} == {"carma.cli.error_output"}


def test_json_never_imports_rich(daemon: FakeDaemon) -> None:
    daemon.tasks, daemon.answers["explain"] = {1: task_view(1)}, EXPLANATION
    verbs = ("queue", "gpus", "history", "users", "show 1", "explain 1")
    dry_run = ["submit", "--dry-run", "--json", "--", "x"]
    modules = imported(daemon.home, *([*verb.split(), "--json"] for verb in verbs), dry_run)
    assert "msgspec" in modules
    assert not modules & {"rich", "starlette", "carma.daemon"}


def test_no_daemon_is_exit_code_3_with_a_hint(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.stop()
    (daemon.home / "carma.sock").unlink()
    monkeypatch.setenv("CARMA_HOME", str(daemon.home))
    for words in (["queue"], ["submit", "--parsable", "--", "true"], ["down"]):
        assert main(words) == 3
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("carma: ")
        assert "carma up" in printed.err
    stale_socket(daemon.home / "carma.sock")
    assert main(["queue"]) == 3


def test_exit_codes_of_a_process(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1, code=42)}
    assert carma(daemon.home, "wait", "1").returncode == 42
    assert carma(daemon.home, "show", "7").returncode == 4


def test_a_typing_mistake_names_the_nearest_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sumbit"]) == 2
    error = capsys.readouterr().err
    assert "carma submit" in error
    assert len(error.splitlines()) == 1


def test_an_unexpected_error_prints_a_traceback_only_with_carma_debug(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.tasks = {1: task_view(1)}
    daemon.answers["explain"] = b"this is not JSON"
    monkeypatch.setenv("CARMA_HOME", str(daemon.home))
    assert main(["explain", "1"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("CARMA_DEBUG", "1")
    assert main(["explain", "1"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_not_an_error_message(daemon: FakeDaemon) -> None:
    daemon.tasks = {number: task_view(number) for number in range(1, 50)}
    for words in (["queue"], ["queue", "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "carma", *words],
                env=environment(daemon.home),
                stdout=writer,
                stderr=subprocess.PIPE,
                timeout=LIMIT_S,
                check=False,
            )
        finally:
            os.close(writer)
        assert done.stderr == b""


@pytest.mark.parametrize(
    ("words", "back"), [(["wait", "1"], "carma logs -f 1"), (["run", "--", "true"], "carma cancel 1")]
)
def test_ctrl_c_detaches_and_prints_the_command_to_return(daemon: FakeDaemon, words: list[str], back: str) -> None:
    daemon.tasks = {1: running(1) if words[0] == "wait" else task_view(1)}
    process = subprocess.Popen(
        [sys.executable, "-m", "carma", *words],
        env=environment(daemon.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + LIMIT_S
        while not any(name == "task" and query for name, _, query, _ in daemon.requests):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert back in stderr
    assert ("stopped waiting" if words[0] == "wait" else "detached") in stderr
    assert "Traceback" not in stderr
    assert daemon.asked("cancel") == []


# In click's place, so that it comes while the command itself is still being imported.
PRESSED = "import signal; signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize("how", [["-m", "carma"], ["-c", "import sys; from {0} import {1}; sys.exit({1}())"]])
def test_ctrl_c_while_it_is_being_imported(tmp_path: Path, how: list[str]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["carma"].partition(":")  # as pip makes the program
    (tmp_path / "click.py").write_text(PRESSED)
    words = [word.format(module, function) for word in how]
    done = subprocess.run(
        [sys.executable, *words, "--help"],
        env={**environment(tmp_path), "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "src")))},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, b"", b"")


def without_stdout(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = 'exec "$@" >&-'
    return subprocess.run(
        ["/bin/sh", "-c", line, "sh", sys.executable, "-m", "carma", *words],
        env=environment(home),
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_closed_stdout_causes_no_message_except_for_a_submission(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: task_view(1)}
    for words in (["queue"], ["queue", "--json"], ["show", "1"]):
        done = without_stdout(daemon.home, *words)
        assert (done.returncode, done.stderr) == (1, "")
    done = without_stdout(daemon.home, "submit", "--", "true")
    assert done.returncode == 1
    assert "submitted task 1" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_message_without_a_traceback(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1)}
    for words in (["submit", "--", "true"], ["submit", "--parsable", "--", "true"], ["history"], ["--help"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "carma", *words],
                env=environment(daemon.home),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr.startswith("carma: ")
        assert len(done.stderr.splitlines()) == 1
        assert ("submitted task" in done.stderr) == (words[0] == "submit")


def test_characters_that_stdout_has_not_are_replaced(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: task_view(1, name="größe-🙂")}
    table = carma(daemon.home, "queue", PYTHONIOENCODING="ascii")
    assert (table.returncode, table.stderr) == (0, "")
    assert "gr??e-?" in table.stdout
    whole = carma(daemon.home, "queue", "--json", PYTHONIOENCODING="ascii")
    assert json.loads(whole.stdout)[0]["name"] == "größe-🙂"


SILENT = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_stopped_daemon_is_named_and_bad(daemon: FakeDaemon) -> None:
    home = daemon.home / "h"
    home.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT, str(home / "carma.sock")], stdout=subprocess.PIPE, text=True
    )
    soon = "import sys, carma.transport; carma.transport._CHECK_S = 0.05; from carma.cli import main; sys.exit(main())"
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        for words, code in ((["queue"], 3), (["doctor", "--json"], 1)):
            done = subprocess.run(
                [sys.executable, "-c", soon, *words],
                env=environment(home),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert done.returncode == code
            assert f"(pid {process.pid})" in done.stdout + done.stderr
            assert f"kill -CONT {process.pid}" in done.stdout + done.stderr
            assert "not known" not in done.stdout + done.stderr
    finally:
        process.kill()
        process.communicate()


def test_a_unit_can_be_printed_without_a_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARMA_HOME", str(tmp_path))
    assert main(["up", "--print-unit"]) == 0
    system = capsys.readouterr().out
    assert main(["up", "--print-unit", "--user"]) == 0
    assert "KillMode=process" in system
    assert "Delegate=yes\nDelegateSubgroup=daemon\n" in system
    assert "WantedBy=default.target" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_unit_starts_the_daemon_with_the_given_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARMA_HOME", str(tmp_path))
    (tmp_path / "a b.toml").touch()
    flags = ["--virtual-gpus", "2", "--policy", "lug", "--set", "gate.sm_active=0.7"]
    assert main(["up", "--print-unit", "--user", *flags, "--config", str(tmp_path / "a b.toml")]) == 0
    (start,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(start.removeprefix("ExecStart="))
    assert words[1] == "up"
    assert set(words[2:]) == {
        "--virtual-gpus=2",
        "--policy=lug",
        "--set=gate.sm_active=0.7",
        f"--config={tmp_path}/a b.toml",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "gate"], "--set 'gate'"),
        (["--set", "gate.sm_activ=1"], "gate.sm_active"),
        (["--config", "/nowhere.toml"], "no settings file"),
        (["--virtual-gpus", "0"], "virtual-gpus"),
        (["--gpu-memory", "much"], "is not a size"),
        (["--user"], "--print-unit"),
        (["--print-unit", "--detach"], "--detach"),
        (["--print-unit", "--set", "gate.sm_activ=1"], "gate.sm_active"),
        (["--speed", "2"], "--speed"),
        (["--gpu-memory", "40GiB"], "--gpu-memory"),
    ],
)
def test_wrong_flags_of_up_are_usage_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setenv("CARMA_HOME", str(tmp_path))
    assert main(["up", *words]) == 2
    assert said in capsys.readouterr().err


def test_both_forms_of_the_version_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for word in ("--version", "version"):
        assert main([word]) == 0
        printed.append(capsys.readouterr().out)
    assert printed == [f"carma {__version__}\n"] * 2
