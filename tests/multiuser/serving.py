"""A root daemon that other users can reach, requests to it as one of them, and small tasks.

Requests are made by hand on the socket, so that an attacker can send what the client would not.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from carma.errors import CarmaError
from carma.wire.api_types import TaskView
from tests.harness import LIMIT_S, Daemon, daemon_at_rest, until
from tests.multiuser.people import PATH, Person

SETTINGS: Mapping[str, Any] = {
    "gpus": 4,
    "memory_mib": 40_960,
    "warmup__enabled": False,
    "gate__enabled": False,
    "placement__tasks_per_gpu": 16,
}


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def resting_root_daemon(**settings: Any) -> Iterator[Daemon]:
    """A root daemon that is not started yet; other users can pass through its directory."""
    with daemon_at_rest(**{**SETTINGS, **settings}) as daemon:
        daemon.home.chmod(0o755)
        daemon.own_program = True
        yield daemon


@contextlib.contextmanager
def root_daemon(*, own_program: bool = False, **settings: Any) -> Iterator[Daemon]:
    """`own_program`: start it as a program, as users do; by fork is faster (tests/fork_server.py)."""
    with resting_root_daemon(**settings) as daemon:
        daemon.own_program = own_program
        yield daemon.start()


def end_all_tasks(daemon: Daemon) -> None:
    """What a test leaves must not hold up the next one."""
    for view in daemon.client.tasks(user="all"):
        with contextlib.suppress(CarmaError):
            daemon.client.cancel(view.id, signal=9)
    until(lambda: not daemon.client.tasks(user="all"), "all tasks have ended")


# Requests.


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("carma", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)  # waits while the daemon's queue of new connections is full
        self.sock.settimeout(self.timeout)


def ask(
    daemon: Daemon,
    method: str,
    target: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = LIMIT_S,
) -> Answer:
    """One request on its own connection, with the credentials of the caller."""
    connection = _UnixConnection(str(daemon.paths.socket), timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, f"/v1{target}", data, dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


def ask_as(person: Person, daemon: Daemon, method: str, target: str, body: object = None, **more: Any) -> Answer:
    return person.act(lambda: ask(daemon, method, target, body, **more))


# Tasks.


def spec(person: Person, *command: str, **more: Any) -> dict[str, Any]:
    """What a submission of this user holds, as the API takes it."""
    return {
        "command": list(command),
        "directory": str(person.home),
        "environment": {"PATH": PATH},
        "gpu_memory_mib": 16,
        **more,
    }


def try_submit(person: Person, daemon: Daemon, *command: str, held: bool = False, **more: Any) -> Answer:
    return ask_as(person, daemon, "POST", "/tasks", {"spec": spec(person, *command, **more), "held": held})


def submit(person: Person, daemon: Daemon, *command: str, held: bool = False, **more: Any) -> int:
    answer = try_submit(person, daemon, *command, held=held, **more)
    assert answer.status == 201, answer
    return int(answer.json["ids"][0])


def shell(person: Person, daemon: Daemon, script: str, **more: Any) -> int:
    """A task that runs a script of /bin/sh; its id."""
    return submit(person, daemon, "/bin/sh", "-c", script, **more)


def until_exists(path: Path) -> str:
    """A line of a script that waits for a file."""
    return f"while [ ! -e {path} ]; do sleep 0.02; done"


def output_of(person: Person, daemon: Daemon, script: str, **more: Any) -> str:
    """What a script prints when it runs as a task of this user."""
    task = shell(person, daemon, script, **more)
    assert ended(daemon, task).exit_code not in (126, 127), "it did not start"
    return ask_as(person, daemon, "GET", f"/tasks/{task}/logs").body.decode()


def ended(daemon: Daemon, task: int) -> TaskView:
    return daemon.wait(task)


def running(daemon: Daemon, task: int) -> TaskView:
    """A running task as root sees it; its process exists."""
    view = daemon.until_state(task, "running")
    assert view.attempts[-1].pid is not None
    return view


def pid_of(daemon: Daemon, task: int) -> int:
    pid = running(daemon, task).attempts[-1].pid
    assert pid is not None
    return pid


def runner_of(daemon: Daemon, task: int) -> int:
    """The parent of the task's first process."""
    fields = Path(f"/proc/{pid_of(daemon, task)}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def attempt_folder(daemon: Daemon, task: int, attempt: int = 1) -> Path:
    return daemon.paths.log_dir / f"{task}.{attempt}"
