"""A user cannot act on another user's tasks, act as an administrator, or be mistaken for another user."""

from __future__ import annotations

import array
import ctypes
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest

from carma.errors import NotAllowed
from tests.harness import Daemon
from tests.multiuser.people import PATH, ROOT, Person, run_cli
from tests.multiuser.serving import Answer, ask, ask_as, ended, running, shell, spec, submit, try_submit

CLONE_NEWUSER = 0x10000000


def view_of(daemon: Daemon, task: int) -> tuple[object, ...]:
    view = daemon.client.task(task)
    return (view.state, view.held, view.name, view.priority, view.comment, view.gpu_memory_mib, view.time_limit_s)


# (the verb's route, its body)
VERBS: dict[str, tuple[str, str, object]] = {
    "cancel": ("POST", "/cancel", {}),
    "cancel_with_kill": ("POST", "/cancel", {"signal": 9, "reason": "mine now"}),
    "hold": ("POST", "/hold", None),
    "release": ("POST", "/release", None),
    "retry": ("POST", "/retry", {"fresh": True}),
    "preempt": ("POST", "/preempt", {"hold": True}),
    "pause": ("POST", "/pause", {"reason": "mine now"}),
    "unpause": ("POST", "/unpause", None),
    "rename": ("PATCH", "", {"name": "renamed"}),
    "change_priority": ("PATCH", "", {"priority": -100}),
    "change_memory": ("PATCH", "", {"gpu_memory_mib": 1}),
    "change_time_limit": ("PATCH", "", {"time_limit_s": 1.0}),
    "change_comment": ("PATCH", "", {"comment": "read me"}),
}


@pytest.mark.parametrize("state", ["running", "held", "finished"])
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_a_verb_on_another_users_task_is_refused(
    daemon: Daemon, alice: Person, bob: Person, verb: tuple[str, str, object], state: str
) -> None:
    saves = {"signal": 10, "grace_s": 60}
    if state == "running":
        task = submit(bob, daemon, "sleep", "600", checkpoint=saves)
        running(daemon, task)
    elif state == "held":
        task = submit(bob, daemon, "true", held=True, checkpoint=saves)
        daemon.until_state(task, "queued")
    else:
        task = submit(bob, daemon, "false", checkpoint=saves)
        ended(daemon, task)
    before = view_of(daemon, task)
    method, route, body = verb
    answer = ask_as(alice, daemon, method, f"/tasks/{task}{route}", body)
    assert (answer.status, answer.json["code"]) == (403, "not_allowed")
    assert view_of(daemon, task) == before


def test_the_command_line_cannot_cancel_another_users_task(daemon: Daemon, alice: Person, bob: Person) -> None:
    task = submit(bob, daemon, "sleep", "600")
    running(daemon, task)
    assert run_cli(alice, daemon.home, "cancel", str(task)).code == NotAllowed.exit_code
    assert daemon.client.task(task).state == "running"


ADMINISTRATION: dict[str, tuple[str, object]] = {
    "drain_the_server": ("/gpus/drain", {}),
    "drain_a_gpu": ("/gpus/drain", {"gpu": "0", "reason": "mine"}),
    "resume": ("/gpus/resume", {}),
    "shutdown": ("/shutdown", {}),
    "shutdown_and_cancel": ("/shutdown", {"cancel_running": True}),
}


@pytest.mark.parametrize("route", ADMINISTRATION.values(), ids=ADMINISTRATION.keys())
def test_a_user_who_is_no_administrator_cannot(daemon: Daemon, alice: Person, route: tuple[str, object]) -> None:
    answer = ask_as(alice, daemon, "POST", route[0], route[1])
    assert (answer.status, answer.json["code"]) == (403, "not_allowed")
    assert daemon.client.server().drained is None
    assert not any(gpu.drained for gpu in daemon.client.gpus())


@pytest.mark.parametrize("priority", [1, 10_000])
def test_a_task_does_not_go_before_those_of_others_by_its_submitters_word(
    daemon: Daemon, alice: Person, priority: int
) -> None:
    assert try_submit(alice, daemon, "true", priority=priority).status == 403
    task = submit(alice, daemon, "true", held=True)
    assert ask_as(alice, daemon, "PATCH", f"/tasks/{task}", {"priority": priority}).status == 403
    assert daemon.client.task(task).priority == 0


def identity_of_submission(daemon: Daemon, answer: Answer) -> set[int]:
    """The owners of the submitted tasks; nothing if the submission was refused."""
    if answer.status != 201:
        assert 400 <= answer.status < 500, answer
        return set()
    return {daemon.client.task(task).uid for task in answer.json["ids"]}


HEADERS: tuple[dict[str, str], ...] = (
    {"X-Forwarded-User": "root"},
    {"X-Remote-User": "root", "Remote-User": "root"},
    {"Authorization": "Basic cm9vdDo="},
    {"Forwarded": "for=127.0.0.1;by=root", "X-Forwarded-For": "127.0.0.1"},
    {"Cookie": "user=root; uid=0"},
    {"X-Carma-Uid": "0", "X-Carma-User": "root", "Carma-User": "root"},
)


@pytest.mark.parametrize("headers", HEADERS, ids=[next(iter(each)) for each in HEADERS])
def test_a_header_does_not_change_who_asks(daemon: Daemon, alice: Person, headers: dict[str, str]) -> None:
    body = {"spec": spec(alice, "true"), "held": True}
    answer = alice.act(lambda: ask(daemon, "POST", "/tasks", body, headers))
    assert identity_of_submission(daemon, answer) <= {alice.uid}
    seen = alice.act(lambda: ask(daemon, "GET", "/server", headers=headers))
    assert seen.json["you_are_admin"] is False


ROOTS_IDENTITY: dict[str, object] = {"uid": 0, "gid": 0, "name": "root"}
CLAIMS: dict[str, dict[str, Any]] = {
    "owner": {"owner": ROOTS_IDENTITY},
    "uid": {"uid": 0},
    "identity": {"identity": ROOTS_IDENTITY},
    "user": {"user": "root"},
    "owner_in_spec": {"spec": {"owner": ROOTS_IDENTITY}},
    "identity_in_spec": {"spec": {"identity": ROOTS_IDENTITY}},
    "array_in_spec": {"spec": {"array": {"array": 1, "index": 0, "at_once": None}}},
    "user_in_environment": {"spec": {"environment": {"USER": "root", "LOGNAME": "root", "UID": "0", "PATH": PATH}}},
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_claim_in_the_request_does_not_change_whose_task_it_is(
    daemon: Daemon, alice: Person, claim: dict[str, Any]
) -> None:
    body = {"held": True, **claim, "spec": {**spec(alice, "id", "-u"), **claim.get("spec", {})}}
    answer = ask_as(alice, daemon, "POST", "/tasks", body)
    assert identity_of_submission(daemon, answer) <= {alice.uid}


def test_the_environment_of_a_submission_does_not_name_the_user_of_the_task(daemon: Daemon, alice: Person) -> None:
    claimed = {"USER": "root", "LOGNAME": "root", "HOME": "/root", "SHELL": "/bin/evil", "PATH": PATH}
    task = shell(alice, daemon, 'echo "$(id -u) $USER $LOGNAME $HOME"', environment=claimed)
    ended(daemon, task)
    out = ask_as(alice, daemon, "GET", f"/tasks/{task}/logs").body.decode().split()
    assert out == [str(alice.uid), alice.name, alice.name, str(alice.home)]


def test_root_of_a_user_namespace_is_not_root_for_the_daemon(daemon: Daemon, alice: Person) -> None:
    def as_root_of_a_namespace() -> tuple[int, Answer]:
        uid, gid = os.getuid(), os.getgid()
        if ctypes.CDLL(None).unshare(CLONE_NEWUSER) != 0:
            return -1, Answer(0, b"")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        os.setgid(0)
        os.setuid(0)
        return os.getuid(), ask(daemon, "POST", "/shutdown", {})

    uid, answer = alice.act(as_root_of_a_namespace)
    if uid == -1:
        pytest.skip("users may not make user namespaces here")
    assert (uid, answer.status) == (0, 403)
    assert daemon.answers()


def test_a_connection_keeps_the_identity_of_the_user_who_opened_it(daemon: Daemon, alice: Person, bob: Person) -> None:
    """Bob gets a connection of Alice's handed over: what he asks on it, Alice asks."""
    ours, theirs = socket.socketpair()

    def open_and_hand_over() -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(daemon.paths.socket))
            theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made.fileno()]))])

    # The pair is made by root and kept open in the child.
    kept = theirs.fileno()
    bob_task = submit(bob, daemon, "sleep", "600")
    child = os.fork()
    if child == 0:
        try:
            alice.become(kept)
            open_and_hand_over()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    (descriptor,) = array.array("i", ancillary[0][2])
    with socket.socket(fileno=descriptor) as handed, ours, theirs:
        handed.settimeout(60.0)
        head = ("POST", f"/v1/tasks/{bob_task}/cancel", "HTTP/1.1\r\nhost: c\r\ncontent-length: 2\r\n\r\n{}")
        handed.sendall(" ".join(head).encode())
        assert handed.recv(65536).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "name", ["\x1b[2J", "a\rb", "a\nb", "a\0b", "a\x07", "\u202egnp.exe", "\x9b31m", "a\u2028b", "x" * 201]
)
def test_a_name_that_would_change_the_terminals_of_others_is_refused(daemon: Daemon, alice: Person, name: str) -> None:
    assert try_submit(alice, daemon, "true", name=name, held=True).status == 400
    task = submit(alice, daemon, "true", held=True)
    assert ask_as(alice, daemon, "PATCH", f"/tasks/{task}", {"name": name}).status == 400


def test_an_administrators_terminal_gets_no_control_characters_of_a_task(daemon: Daemon, alice: Person) -> None:
    """Command, directory, comment, output path, cancel reason and last line may hold them; what is printed must not."""
    evil = f"\x1b[31mred\x1b]0;title\x07\x9b{secrets.token_hex(4)}"
    folder = alice.folder(f"evil-{evil}")
    place = alice.folder(f"evil-{evil}/{evil}")
    spoken = shell(alice, daemon, f"printf '{evil}\\n' >&2; exit 3", directory=str(folder), comment=evil)
    unwritten = submit(alice, daemon, "true", directory=str(folder), output=f"{place}/out", held=True)
    place.rmdir()
    ask_as(alice, daemon, "POST", f"/tasks/{unwritten}/release")
    cancelled, waiting = (submit(alice, daemon, "/bin/echo", evil, comment=evil, held=True) for _ in range(2))
    ask_as(alice, daemon, "POST", f"/tasks/{cancelled}/cancel", {"reason": evil})
    assert [ended(daemon, task).exit_code for task in (spoken, unwritten, cancelled)] == [3, 126, 130]
    commands: list[tuple[str, ...]] = [("queue", "--all"), ("history", "--all"), ("gpus",), ("report",), ("users",)]
    tasks = [str(task) for task in (spoken, unwritten, cancelled)]
    commands += [(verb, task) for verb in ("show", "explain") for task in (*tasks, str(waiting))]
    commands += [(verb, task) for verb in ("wait", "cancel", "logs") for task in tasks[1:]]
    for arguments in commands:
        ran = run_cli(ROOT, daemon.home, *arguments)
        printed = (ran.out + ran.err).replace("\n", "")
        assert printed.isprintable(), (arguments, printed)
