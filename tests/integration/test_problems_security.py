"""Problems 23 to 26 of the published system: clients could act as any user, run commands as the server and stop it.

Each test is named after its problem; its first line says what happened there, the rest what happens here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.daemon.auth import Authenticator, Peer, UserNames
from carma.errors import NotAllowed, NotRunnable
from carma.wire.api_types import TaskView
from tests.harness import LIMIT_S, SOMEBODY, Daemon, daemon_at_rest, request, somebody_else

REPOSITORY = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_at_rest(gpus=2, memory_mib=40_960, warmup__enabled=False, gate__enabled=False) as resting:
        resting.home.chmod(0o755)
        yield resting.start()


def ask(daemon: Daemon, raw: bytes) -> bytes:
    """What the socket answers to these bytes and an end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(str(daemon.paths.socket))
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
        return answer


def post(body: bytes, target: str = "/v1/tasks") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nhost: carma\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                found.add(match[1])
    return found


def test_problem_23_there_is_no_network_port_and_no_identity_by_name(daemon: Daemon) -> None:
    """There was no authentication, the port may have been open to the network, and the client chose its user name.

    Here there is a Unix socket and nothing else, open to the daemon's own user unless that is root, and a request
    that names a user is refused.
    """
    assert daemon.process is not None
    own = sockets_of(daemon.process.pid)
    assert own
    for family in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        table = Path(f"/proc/{daemon.process.pid}/net/{family}")
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        assert not own & {row.split()[9] for row in rows}, family
    mode = stat.S_IMODE(daemon.paths.socket.stat().st_mode)
    assert mode == (0o666 if os.geteuid() == 0 else 0o600)

    claims = {"spec": {"command": ["true"], "directory": "/"}, "owner": {"uid": 0, "gid": 0, "name": "root"}}
    answer = ask(daemon, post(json.dumps(claims).encode()))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"owner" in answer
    view = daemon.wait(daemon.submit("true"))
    assert view.uid == os.geteuid()


def test_problem_23_a_daemon_that_is_not_root_serves_its_own_user_only() -> None:
    """Every client that could reach the port was served, and its jobs ran under the server's account.

    CARMA's daemon refuses a user whose tasks it cannot run under that user's account.
    """
    authenticator = Authenticator(own_uid=1001, names=UserNames({1001: "alice", 1002: "bob", 0: "root"}.__getitem__))
    assert authenticator.identify(Peer(pid=1, uid=1001, gid=1001)).name == "alice"
    with pytest.raises(NotAllowed, match=r"alice.*bob"):
        authenticator.identify(Peer(pid=1, uid=1002, gid=1002))


@needs_root
def test_problem_23_a_task_runs_as_the_user_that_the_kernel_reports(daemon: Daemon) -> None:
    """All jobs of all users ran under one account, with logs written where the client said.

    CARMA runs a task with its submitter's rights, also when it opens its own log, and it belongs only to the submitter.
    A log that the submitter may not write is refused at submission; one that is closed to the submitter later, at the
    start.
    """
    private = daemon.home / "private"
    private.mkdir(mode=0o700)
    with somebody_else(daemon) as client:
        who = client.submit(request("id", "-u", directory="/")).ids[0]
        stealing = request("true", directory="/", output=str(private / "log"))
        with pytest.raises(NotRunnable, match="you may not create files in"):
            client.submit(stealing)
        private.chmod(0o777)
        steals = client.submit(replace(stealing, held=True)).ids[0]
        private.chmod(0o700)
        client.release(steals)
        reads = client.submit(request("cat", str(daemon.paths.database), directory="/")).ids[0]
        views: dict[int, TaskView] = {task: client.wait(task, LIMIT_S) for task in (who, steals, reads)}
        assert b"".join(client.logs(who)) == f"{SOMEBODY}\n".encode()
    assert {view.uid for view in views.values()} == {SOMEBODY}
    assert "cannot open" in (views[steals].outcome or {})["message"]
    assert not (private / "log").exists()
    assert views[reads].exit_code == 1


def test_problem_24_nothing_goes_through_a_shell(daemon: Daemon) -> None:
    """Path, directory and command were passed to shells unquoted: clients could run any command as the server's user.

    Here they are words and stay words, from the command line, from a task file and from the socket.
    """
    trap = daemon.home / "trap"
    evil = f"$(touch {trap}) `touch {trap}`; touch {trap} && touch {trap} > {trap} \n touch {trap} '\""
    place = daemon.home / f"$(touch {trap.name}); `touch {trap.name}` '\" & #"
    place.mkdir()
    sent = request("printf", "%s", evil, directory=str(place), name=evil.replace("\n", " "), comment=evil)
    direct = daemon.client.submit(sent).ids[0]
    named = daemon.submit("true", output=f"{place.name}/out")

    rad = place / "task; touch trap.rad"
    rad.write_text("\n".join(["# x", "", f"printf %s '$(touch {trap})' `touch` ; &&", "", "", "", "", "1", "100"]))
    by_file = subprocess.run(
        [sys.executable, "-m", "carma", "submit", "--parsable", str(rad)],
        env=daemon.environ,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    read = int(by_file.stdout)
    assert [daemon.wait(task).exit_code for task in (direct, named, read)] == [0, 0, 0]
    assert b"".join(daemon.client.logs(direct)).decode() == evil
    assert b"".join(daemon.client.logs(read)).decode() == f"$(touch {trap})`touch`;&&"
    assert daemon.client.task(direct).directory == str(place)
    assert not list(daemon.home.rglob("trap"))


def test_problem_25_a_malformed_message_affects_only_its_sender(daemon: Daemon) -> None:
    """One message without plus signs, or with one in a path, ended the listener.

    Here every such message is refused or dropped, and the next request is answered.
    """
    good = json.dumps({"spec": {"command": ["true"], "directory": "/a+b"}}).encode()
    messages = {
        "the published protocol": b"alice+/home/alice+/home/alice/task.rad",
        "no plus sign": b"hello\r\n\r\n",
        "zeros": bytes(4096),
        "noise": bytes(range(256)) * 64,
        "half a head": b"POST /v1/tasks HTTP/1.1\r\nhost:",
        "half a body": post(good)[:-5],
        "a head without an end": b"GET /v1/server HTTP/1.1\r\n" + b"x: y\r\n" * 40_000,
        "no JSON": post(b"alice+/home/alice+task.rad"),
        "not UTF-8": post(b'{"spec": "\xff\xfe"}'),
        "deep JSON": post(b"[" * 100_000),
        "wrong types": post(b'{"spec": {"command": 7, "directory": []}}'),
        "a length that is none": post(good).replace(b"content-length: ", b"content-length: -"),
        "another method": b"BREW /v1/tasks HTTP/1.1\r\nconnection: close\r\n\r\n",
        "no such route": b"GET /v1/nothing+there HTTP/1.1\r\nconnection: close\r\n\r\n",
        "an id that is none": b"GET /v1/tasks/1+1 HTTP/1.1\r\nconnection: close\r\n\r\n",
    }
    for what, raw in messages.items():
        answer = ask(daemon, raw)
        assert not answer or re.match(rb"HTTP/1\.1 4\d\d ", answer), (what, answer[:200])
        assert daemon.client.server().queued == 0, what
    place = daemon.home / "a+b"
    place.mkdir()
    assert daemon.wait(daemon.client.submit(request("true", directory=str(place))).ids[0]).exit_code == 0
    assert "Traceback" not in daemon.log, daemon.log


def test_problem_26_there_is_one_licence() -> None:
    """The licence file was Apache-2.0, and the README allowed non-commercial academic use only.

    Here file, package and README say the same, and nothing takes it back.
    """
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert metadata.metadata("carma-gpu")["License-Expression"] == "Apache-2.0"
    readme = (REPOSITORY / "README.md").read_text()
    assert re.search(r"Apache(-| License,? Version |,? )2\.0", readme), "the README names the licence"
    assert not re.search(r"non-?commercial|academic use|research (use|purposes) only", readme, re.IGNORECASE)
