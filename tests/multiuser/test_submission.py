"""Submissions: what they may learn about the file system, what they may do to root's processes, and to other users'.

A submission is checked before it is accepted, by a daemon that may read everything, and its environment and paths are
chosen by its sender.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Daemon, until
from tests.multiuser.hanging import hanging_directory
from tests.multiuser.people import PATH, Person
from tests.multiuser.serving import (
    Answer,
    ask,
    ask_as,
    attempt_folder,
    ended,
    resting_root_daemon,
    root_daemon,
    shell,
    spec,
    submit,
    try_submit,
)

# What a submission tells about files.


class Hidden:
    """A directory of Bob's that Alice cannot enter, and what is in it. `absent` is not."""

    def __init__(self, bob: Person) -> None:
        self.folder = bob.folder(f"hidden-{secrets.token_hex(4)}")
        (self.folder / "there").mkdir()
        (self.folder / "program").write_text("#!/bin/sh\n")
        (self.folder / "program").chmod(0o755)
        (self.folder / "public").symlink_to("/tmp")


@pytest.fixture(scope="module")
def hidden(bob: Person) -> Hidden:
    return Hidden(bob)


# Pairs of submissions that differ only in whether a hidden file exists.
PROBES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "directory": ({"directory": "{}/there"}, {"directory": "{}/absent"}),
    "directory_and_up": ({"directory": "{}/there/../../../.."}, {"directory": "{}/absent/../../../.."}),
    "link_to_a_public_directory": ({"directory": "{}/public"}, {"directory": "{}/absent"}),
    "program": ({"command": ["{}/program"]}, {"command": ["{}/absent"]}),
    "program_and_up": (
        {"command": ["{}/there/../../../../bin/sh"]},
        {"command": ["{}/absent/../../../../bin/sh"]},
    ),
    "output": ({"output": "{}/there/out"}, {"output": "{}/absent/out"}),
    "output_is_a_directory": ({"output": "{}/there"}, {"output": "{}/absent"}),
    "output_and_up": ({"output": "{}/there/../../../../out"}, {"output": "{}/absent/../../../../out"}),
    "error": ({"error": "{}/there/out"}, {"error": "{}/absent/out"}),
}


def fill(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [fill(each, folder) for each in value]
    return value.format(folder)


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())
def test_a_submission_does_not_tell_what_is_in_a_closed_directory(
    daemon: Daemon, alice: Person, hidden: Hidden, probe: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    told = []
    for fields in probe:
        given = {name: fill(value, hidden.folder) for name, value in fields.items()}
        body = {"spec": {**spec(alice, "/bin/sh", "-c", "true"), **given}, "held": True}
        answer = ask_as(alice, daemon, "POST", "/tasks", body)
        told.append((answer.status, answer.json.get("code"), shape(answer)))
    assert told[0] == told[1]


def shape(answer: Answer) -> str:
    """The message without the names that the sender chose."""
    text = str(answer.json.get("message", ""))
    for word in ("there", "absent", "program", "public"):
        text = text.replace(word, "NAME")
    return text


# What the environment of a submission does to processes of root's.


def hostile_environment(alice: Person) -> tuple[dict[str, str], Path]:
    """Every variable by which a program can be made to run something else. What runs writes down its user."""
    marker = alice.home / f"ran-{secrets.token_hex(4)}"
    marker.touch()
    alice.own(marker, 0o666)
    folder = alice.folder(f"hostile-{secrets.token_hex(4)}", 0o755)
    line = f"id -u >> {marker}\n"
    script = folder / "script.sh"
    script.write_text(line)
    for name in ("sh", "python", "python3", "env", "mkdir", "nvidia-cuda-mps-control", "nvidia-smi", "systemd-run"):
        (folder / name).write_text(f"#!/bin/sh\n{line}exit 1\n")
        (folder / name).chmod(0o755)
    code = f"import os\nwith open({str(marker)!r}, 'a') as file: file.write(str(os.getuid()) + '\\n')\n"
    for name in ("sitecustomize.py", "usercustomize.py", "json.py", "carma.py", "startup.py", "ctypes.py"):
        (folder / name).write_text(code)
    named = {
        **dict.fromkeys(("BASH_ENV", "ENV", "PROMPT_COMMAND"), str(script)),
        **dict.fromkeys(("PYTHONPATH", "PYTHONUSERBASE", "PYTHONHOME", "PERL5LIB", "LD_LIBRARY_PATH"), str(folder)),
        **dict.fromkeys(("GCONV_PATH", "LOCPATH", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"), str(folder)),
        "PYTHONSTARTUP": str(folder / "startup.py"),
        "PYTHONINSPECT": "1",
        "PYTHONBREAKPOINT": "os.abort",
        "LD_PRELOAD": f"{folder}/preloaded.so",
        "LD_AUDIT": f"{folder}/audited.so",
        "CARMA_HOME": str(folder),
        "CARMA_DAEMON__ADMINS": alice.name,
        "CARMA_LAUNCH__RUN_AS_SUBMITTER": "no",
        "CARMA_VGPU_DIR": str(folder),
        "NOTIFY_SOCKET": f"{folder}/notify",
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
        "PATH": f"{folder}:{PATH}",
    }
    return named, marker


def test_the_environment_of_a_submission_runs_nothing_as_root(daemon: Daemon, alice: Person) -> None:
    named, marker = hostile_environment(alice)
    task = submit(alice, daemon, "/bin/sh", "-c", "true", environment=named)
    ended(daemon, task)
    by_name = submit(alice, daemon, "sh", environment=named)
    ended(daemon, by_name)
    users = set(marker.read_text().split())
    assert users <= {str(alice.uid)}
    assert "preloaded.so" not in daemon.log
    log = attempt_folder(daemon, task) / "runner.log"
    assert not log.exists() or log.read_bytes() == b""
    assert ask_as(alice, daemon, "GET", "/server").json["you_are_admin"] is False


def test_a_directory_of_hostile_modules_is_not_where_root_imports_from(daemon: Daemon, alice: Person) -> None:
    """The working directory of a task is Alice's; a runner that imported from it would run her code as root."""
    named, marker = hostile_environment(alice)
    place = Path(named["PYTHONPATH"])
    task = shell(alice, daemon, "true", directory=str(place))
    assert ended(daemon, task).exit_code == 0
    assert set(marker.read_text().split()) <= {str(alice.uid)}


# What one user's submissions do to those of others.


def test_a_directory_of_one_user_that_hangs_does_not_hold_up_others(alice: Person, bob: Person) -> None:
    """More of Alice's submissions wait for her directory than any limit for all users together would allow."""
    with root_daemon() as daemon, hanging_directory(alice) as place:
        sent = alice.home / f"sent-{secrets.token_hex(4)}"
        with alice.background(lambda: send_and_wait(daemon, spec(alice, "true", directory=str(place)), 80, sent)):
            until(sent.exists, "all submissions of hers are sent")
            for _ in range(3):
                assert try_submit(bob, daemon, "true").status == 201
            assert ask_as(bob, daemon, "GET", "/server").status == 200


def send_and_wait(daemon: Daemon, what: dict[str, Any], count: int, sent: Path) -> None:
    data = json.dumps({"spec": what}).encode()
    head = f"POST /v1/tasks HTTP/1.1\r\nhost: carma\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    connections = []
    for _ in range(count):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(daemon.paths.socket))
        connection.sendall(head + data)
        connections.append(connection)
    sent.touch()
    signal.pause()


def test_submissions_that_failed_for_lack_of_threads_take_no_place(alice: Person, bob: Person) -> None:
    """No thread and no process can be started for a while, as on a machine without free ones."""
    with resting_root_daemon() as daemon:
        switch = daemon.home / "exhausted"
        daemon.prelude = _EXHAUSTED.format(switch=str(switch))
        daemon.start()
        switch.touch()

        def fail() -> set[int]:
            body = {"spec": spec(alice, "true")}
            return {ask(daemon, "POST", "/tasks", body).status for _ in range(140)}

        statuses = alice.act(fail)
        assert statuses <= {201, 500, 503, 507}
        switch.unlink()
        until(lambda: try_submit(bob, daemon, "true").status == 201, "Bob can submit again", limit_s=20.0)


# No thread, fork or spawn works as long as a file exists.
_EXHAUSTED = """
import errno, os, threading
def _guarded(original, error):
    def call(*args, **kwargs):
        if os.path.exists({switch!r}):
            raise error()
        return original(*args, **kwargs)
    return call
threading.Thread.start = _guarded(threading.Thread.start, lambda: RuntimeError("can't start new thread"))
for _name in ("fork", "posix_spawn", "posix_spawnp"):
    setattr(os, _name, _guarded(getattr(os, _name), lambda: OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
import subprocess
subprocess.Popen.__init__ = _guarded(subprocess.Popen.__init__, lambda: OSError(errno.EAGAIN, "no process"))
"""
