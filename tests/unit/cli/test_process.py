"""The command as a process: what it imports, its exit codes, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.cli.error_output import INTERRUPTED
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, running, stale_socket, task_view

LIMIT_S = 180.0
ROOT = Path(__file__).parents[3]
IMPORTED = """
import json, os, sys
from carma.cli import main
sys.stdout = open(os.devnull, "w")
code = main(sys.argv[1:])
sys.stdout = sys.__stdout__
print(json.dumps({"code": code, "modules": sorted(sys.modules)}))
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


def imported(home: Path, *words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["code"] == 0, done.stderr
    return set(answer["modules"])


def test_help_imports_no_verb_and_nothing_heavy(tmp_path: Path) -> None:
    modules = imported(tmp_path, "--help")
    assert not modules & {"rich", "msgspec", "starlette", "uvicorn", "asyncio", "sqlite3", "carma.client", "carma.core"}
    assert {name for name in modules if name.startswith("carma.cli.")} == {"carma.cli.error_output"}


@pytest.mark.parametrize(
    "words",
    [["queue"], ["gpus"], ["history"], ["show", "1"], ["explain", "1"], ["submit", "--dry-run", "--json", "--", "x"]],
)
def test_json_never_imports_rich(daemon: FakeDaemon, words: list[str]) -> None:
    from tests.unit.cli.test_read import EXPLANATION

    daemon.tasks, daemon.answers["explain"] = {1: task_view(1)}, EXPLANATION
    modules = imported(daemon.home, *words) if "--json" in words else imported(daemon.home, *words, "--json")
    assert "msgspec" in modules
    assert not modules & {"rich", "starlette", "carma.daemon"}


def test_no_daemon_is_exit_code_3_with_what_to_do(daemon: FakeDaemon) -> None:
    daemon.stop()
    (daemon.home / "carma.sock").unlink()
    for words in (["queue"], ["submit", "--parsable", "--", "true"], ["down"]):
        done = carma(daemon.home, *words)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith("carma: ")
        assert "carma up" in done.stderr
    stale_socket(daemon.home / "carma.sock")
    assert carma(daemon.home, "queue").returncode == 3


def test_exit_codes_of_a_process(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1, code=42)}
    assert carma(daemon.home, "wait", "1").returncode == 42
    assert carma(daemon.home, "show", "7").returncode == 4
    assert carma(daemon.home, "sumbit").returncode == 2
    assert carma(daemon.home).returncode == 0


def test_a_typing_mistake_names_the_nearest_verb(tmp_path: Path) -> None:
    done = carma(tmp_path, "sumbit")
    assert "carma submit" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unexpected_error_is_a_line_and_a_traceback_only_when_asked_for(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: task_view(1)}
    daemon.answers["explain"] = b"this is not JSON"
    done = carma(daemon.home, "explain", "1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Traceback" in carma(daemon.home, "explain", "1", CARMA_DEBUG="1").stderr


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
def test_ctrl_c_detaches_and_says_how_to_return(daemon: FakeDaemon, words: list[str], back: str) -> None:
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


def test_a_closed_stdout_is_quiet_and_a_submission_is_told_all_the_same(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: task_view(1)}
    for words in (["queue"], ["queue", "--json"], ["show", "1"]):
        done = without_stdout(daemon.home, *words)
        assert (done.returncode, done.stderr) == (1, "")
    done = without_stdout(daemon.home, "submit", "--", "true")
    assert done.returncode == 1
    assert "submitted task 1" in done.stderr


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


def test_a_unit_can_be_printed_without_a_daemon(tmp_path: Path) -> None:
    system, user = carma(tmp_path, "up", "--print-unit"), carma(tmp_path, "up", "--print-unit", "--user")
    assert "KillMode=process" in system.stdout
    assert "Delegate=yes\nDelegateSubgroup=daemon\n" in system.stdout
    assert "WantedBy=default.target" in user.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "gate"], "--set 'gate'"),
        (["--set", "gate.sm_activ=1"], "gate.sm_active"),
        (["--config", "/nowhere.toml"], "no settings file"),
        (["--virtual-gpus", "0"], "virtual-gpus"),
        (["--gpu-memory", "much"], "is not a size"),
    ],
)
def test_wrong_flags_of_up_are_usage_errors(daemon: FakeDaemon, words: list[str], said: str) -> None:
    done = carma(daemon.home, "up", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_version(tmp_path: Path) -> None:
    assert carma(tmp_path, "--version").stdout == carma(tmp_path, "version").stdout
