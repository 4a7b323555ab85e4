"""No user can read the output, the records or the files of another user through CARMA's logs."""

from __future__ import annotations

import ctypes
import http.client
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Daemon, until
from tests.multiuser.people import Person, run_cli
from tests.multiuser.serving import ask, ask_as, attempt_folder, ended, shell, submit, try_submit

RENAME_EXCHANGE = 2
AT_FDCWD = -100
RACES = 150  # requests; /etc/shadow came back after 10 of them when the daemon opened paths that a user had named


class Victim:
    """A finished task of Bob. Its output, error output, command and environment contain markers that only Bob knows."""

    def __init__(self, daemon: Daemon, bob: Person) -> None:
        self.mark = f"secret-{secrets.token_hex(8)}"
        script = f"echo out-{self.mark}; echo err-{self.mark} >&2"
        self.task = shell(bob, daemon, script, environment={"PATH": "/usr/bin:/bin", "API_KEY": f"env-{self.mark}"})
        ended(daemon, self.task)
        self.folder = attempt_folder(daemon, self.task)


@pytest.fixture(scope="session")
def victim(shared_daemon: Daemon, bob: Person) -> Victim:
    return Victim(shared_daemon, bob)


def all_that_alice_gets(daemon: Daemon, alice: Person, task: int) -> bytes:
    """Everything that the API and the command line tell her about her own task."""
    found = [ask_as(alice, daemon, "GET", f"/tasks/{task}{part}").body for part in ("", "/story", "/explain")]
    for stream in ("stdout", "stderr"):
        found.append(ask_as(alice, daemon, "GET", f"/tasks/{task}/logs?stream={stream}").body)
        found.append(ask_as(alice, daemon, "GET", f"/tasks/{task}/logs?stream={stream}&attempt=1&tail=9").body)
        flags = ("--stderr",) if stream == "stderr" else ()
        ran = run_cli(alice, daemon.home, "logs", *flags, str(task))
        found.append((ran.out + ran.err).encode())
    return b"\n".join(found)


def all_from_output_at(daemon: Daemon, alice: Person, **paths: Any) -> bytes:
    """What she gets when she sends output there, which she may not: at submission or when the task starts."""
    answer = try_submit(alice, daemon, "true", **paths)
    if answer.status != 201:
        assert 400 <= answer.status < 500, answer
        return answer.body
    (task,) = answer.json["ids"]
    assert ended(daemon, task).exit_code == 126
    return all_that_alice_gets(daemon, alice, task)


RECORDS = (
    "stdout.log",
    "stderr.log",
    "order.json",
    "started.json",
    "claim.json",
    "exit.json",
    "held.json",
    "runner.log",
)


def contents(path: Path) -> bytes:
    """Lines that are long enough to be recognised."""
    data = path.read_bytes() if path.exists() else b""
    return max(data.split(b"\n"), key=len, default=b"")[:200]


@pytest.mark.parametrize("name", RECORDS)
def test_output_sent_to_a_file_of_another_users_attempt_is_not_read_back(
    daemon: Daemon, alice: Person, victim: Victim, name: str
) -> None:
    path = str(victim.folder / name)
    told = all_from_output_at(daemon, alice, output=path, error=path)
    assert victim.mark.encode() not in told
    line = contents(victim.folder / name)
    assert not line or line not in told


@pytest.mark.parametrize("name", ["carma.db", "carma.db-wal", "carma.db-shm", "carma.db.lock"])
def test_output_sent_to_a_file_of_the_daemon_is_not_read_back(daemon: Daemon, alice: Person, name: str) -> None:
    path = daemon.home / name
    before = path.read_bytes()[:64] if path.exists() else b""
    told = all_from_output_at(daemon, alice, output=str(daemon.paths.log_dir / ".." / name), error=str(path))
    assert b"SQLite format" not in told
    assert len(before) < 5 or before not in told


Spelling = Callable[[Path, Person], dict[str, str]]
SPELLINGS: dict[str, Spelling] = {
    "error_only": lambda folder, _: {"error": str(folder / "stdout.log")},
    "dots": lambda folder, _: {"output": f"{folder.parent}/./{folder.name}/../{folder.name}/stdout.log"},
    "double_slash": lambda folder, _: {"output": f"{folder}//stdout.log"},
    "relative": lambda folder, _: {"directory": str(folder.parent), "output": f"{folder.name}/stdout.log"},
    "inside": lambda folder, _: {"directory": str(folder), "output": "stdout.log"},
    "attempt_template": lambda folder, _: {"output": f"{folder.parent}/{folder.name[:-1]}%t/stdout.log"},
    "name_template": lambda folder, _: {"output": f"{folder.parent}/%x/stdout.log", "name": folder.name},
    "name_with_slashes": lambda folder, _: {"output": f"{folder.parent}/%x", "name": f"{folder.name}/stdout.log"},
    "proc_root": lambda folder, _: {"output": f"/proc/self/root{folder}/stdout.log"},
    "link_to_file": lambda folder, alice: {"output": linked(alice, folder / "stdout.log")},
    "link_to_folder": lambda folder, alice: {"output": linked(alice, folder) + "/stdout.log"},
    "link_to_logs": lambda folder, alice: {"output": f"{linked(alice, folder.parent)}/{folder.name}/stdout.log"},
}


def linked(alice: Person, target: Path) -> str:
    return str(alice.own_link(alice.home / f"link-{secrets.token_hex(4)}", target))


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_no_spelling_of_the_path_leads_to_another_users_output(
    daemon: Daemon, alice: Person, victim: Victim, spelling: Spelling
) -> None:
    assert victim.mark.encode() not in all_from_output_at(daemon, alice, **spelling(victim.folder, alice))


def exchange_for_ever(one: str, other: str) -> None:
    libc = ctypes.CDLL(None)
    while True:
        libc.renameat2(AT_FDCWD, one.encode(), AT_FDCWD, other.encode(), RENAME_EXCHANGE)


def test_links_that_are_exchanged_during_requests_never_yield_a_file_of_root(daemon: Daemon, alice: Person) -> None:
    """The race of a check on a path and an open of the same path."""
    private = daemon.home / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    mark = secrets.token_hex(16)
    (private / "shadow").write_text(mark)
    folder = alice.folder(f"race-{mark[:6]}")
    inner, outer = alice.own_link(folder / "link", folder), alice.own_link(folder / "other", private)
    task = submit(alice, daemon, "true", output=f"{inner}/shadow", held=True)
    inner.unlink()
    alice.own_link(inner, daemon.paths.log_dir)
    ask_as(alice, daemon, "POST", f"/tasks/{task}/release")
    assert ended(daemon, task).exit_code == 126

    def read_often() -> list[bytes]:
        targets = [f"/tasks/{task}/logs{query}" for query in ("", "?stream=stderr", "?tail=5")]
        return [read(targets[number % 3]) for number in range(RACES)]

    def read(target: str) -> bytes:
        try:
            return ask(daemon, "GET", target).body
        except http.client.IncompleteRead as error:
            return error.partial

    with alice.background(lambda: exchange_for_ever(str(inner), str(outer))):
        answers = alice.act(read_often)
    assert not [answer for answer in answers if mark.encode() in answer]


@pytest.mark.parametrize("whose", ["bob", "root"])
def test_a_link_put_in_the_place_of_the_output_is_not_followed(
    daemon: Daemon, alice: Person, bob: Person, whose: str
) -> None:
    """Neither for the logs nor for the last line, which becomes the failure message."""
    mark = f"secret-{secrets.token_hex(8)}"
    secret = bob.file(f"file-{mark}", f"{mark}\n") if whose == "bob" else daemon.home / f"file-{mark}"
    if whose == "root":
        secret.write_text(f"{mark}\n")
        secret.chmod(0o600)
    out = alice.home / f"out-{mark}"
    task = shell(alice, daemon, f"rm -f {out}; ln -s {secret} {out}; exit 3", output=str(out), error=str(out))
    view = ended(daemon, task)
    assert view.exit_code == 3
    hidden = mark.encode() + b"\n"
    assert hidden not in all_that_alice_gets(daemon, alice, task).replace(str(secret).encode(), b"")
    assert mark not in str((view.outcome or {}).get("message", ""))


def test_a_reused_inode_does_not_bring_another_users_line_into_a_failure_message(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    """The task gives up its error file, Bob's next file gets its inode number, and a link leads there."""
    mark = secrets.token_hex(8)
    folder = alice.folder(f"inode-{mark}")
    common = daemon.home / f"common-{mark}"  # like /tmp; ext4 gives free numbers of a directory out again at once
    common.mkdir()
    common.chmod(0o1777)
    err, secret = common / "err", common / "secret"
    # The shell closes its error file, so that nothing but CARMA can still hold it.
    script = (
        f"exec 2>/dev/null; stat -c %i {err} > {folder}/inode; rm {err}; ln -s {secret} {err}; touch {folder}/gone; "
    )
    script += f"while [ ! -e {folder}/go ]; do sleep 0.05; done; exit 3"
    task = shell(alice, daemon, script, output="/dev/null", error=str(err))
    until((folder / "gone").exists, "the task has removed its error file")
    wanted = int((folder / "inode").read_text())

    def create_until_it_fits() -> bool:
        """Files stay, so that each new one takes another free number."""
        for number in range(2000):
            path = common / f"bob-{number}"
            path.touch(0o600)
            if path.stat().st_ino == wanted:
                path.write_text(f"ValueError: {mark}\n")
                path.rename(secret)
                return True
        return False

    bob.act(create_until_it_fits)
    (folder / "go").touch()
    view = ended(daemon, task)
    assert view.exit_code == 3
    assert mark not in str((view.outcome or {}).get("message", ""))


@pytest.mark.parametrize("query", ["", "?stream=stderr", "?attempt=1", "?tail=1", "?follow=true", "?attempt=2"])
def test_the_logs_of_another_users_task_are_refused(daemon: Daemon, alice: Person, victim: Victim, query: str) -> None:
    answer = ask_as(alice, daemon, "GET", f"/tasks/{victim.task}/logs{query}")
    assert answer.status == 403
    assert victim.mark.encode() not in answer.body


def test_following_into_the_next_attempt_does_not_follow_a_changed_link(
    daemon: Daemon, alice: Person, victim: Victim
) -> None:
    """The first attempt writes to a directory of Alice's, the second one to what her link names by then."""
    mark = secrets.token_hex(4)
    folder, link = alice.folder(f"own-{mark}"), alice.home / f"follow-{mark}"
    alice.own_link(link, folder)
    task = submit(alice, daemon, "true", output=f"{link}/stdout.log")
    ended(daemon, task)
    link.unlink()
    alice.own_link(link, victim.folder)
    assert ask_as(alice, daemon, "POST", f"/tasks/{task}/retry", {}).status == 200
    followed = ask_as(alice, daemon, "GET", f"/tasks/{task}/logs?follow=true")
    assert ended(daemon, task).exit_code == 126
    again = ask_as(alice, daemon, "GET", f"/tasks/{task}/logs?attempt=2")
    assert victim.mark.encode() not in followed.body + again.body


FileAttack = Callable[[Path, Path], object]
FILE_ATTACKS: dict[str, FileAttack] = {
    "list": lambda folder, _: os.listdir(folder),
    "open_output": lambda folder, _: (folder / "stdout.log").read_bytes(),
    "open_error_output": lambda folder, _: (folder / "stderr.log").read_bytes(),
    "append_output": lambda folder, _: (folder / "stdout.log").open("ab"),
    "truncate_output": lambda folder, _: os.truncate(folder / "stdout.log", 0),
    "remove_output": lambda folder, _: (folder / "stdout.log").unlink(),
    "change_mode": lambda folder, _: (folder / "stdout.log").chmod(0o666),
    "rename_folder": lambda folder, _: folder.rename(folder.with_name("0.1")),
    "new_file": lambda folder, _: (folder / "extra").touch(),
    "new_link": lambda folder, _: (folder / "extra").symlink_to("/etc/passwd"),
    "new_attempt": lambda folder, _: folder.with_name("999999.1").mkdir(),
    "replace_record": lambda folder, home: os.replace(home / ".profile-new", folder / "exit.json"),
    "watch_output": lambda folder, _: os.open(folder / "stdout.log", os.O_RDONLY),
}


@pytest.mark.parametrize("attack", FILE_ATTACKS.values(), ids=FILE_ATTACKS.keys())
def test_the_directory_of_another_users_attempt_is_closed(alice: Person, victim: Victim, attack: FileAttack) -> None:
    alice.file(".profile-new", "{}")
    with pytest.raises(PermissionError):
        alice.act(lambda: attack(victim.folder, alice.home))


def test_a_hard_link_to_another_users_output_gives_nothing_and_takes_nothing_away(
    daemon: Daemon, alice: Person, bob: Person, victim: Victim
) -> None:
    """Kernels without fs.protected_hardlinks let every user make the link."""
    link = alice.home / f"hard-{secrets.token_hex(4)}"
    try:
        alice.act(lambda: os.link(victim.folder / "stdout.log", link))
    except PermissionError:
        os.link(victim.folder / "stdout.log", link)  # as such a kernel would let her
    with pytest.raises(PermissionError):
        alice.act(link.read_bytes)
    assert victim.mark.encode() not in all_from_output_at(daemon, alice, output=str(link))
    assert stat.S_IMODE(link.stat().st_mode) & 0o077 == 0
    link.unlink()
    assert victim.mark.encode() in ask_as(bob, daemon, "GET", f"/tasks/{victim.task}/logs").body


def test_a_pipe_in_the_place_of_the_output_does_not_stop_the_daemon(daemon: Daemon, alice: Person, bob: Person) -> None:
    out = alice.home / f"pipe-{secrets.token_hex(4)}"
    task = shell(alice, daemon, f"rm -f {out}; mkfifo {out}; exit 3", output=str(out))
    assert ended(daemon, task).exit_code == 3
    assert ask_as(alice, daemon, "GET", f"/tasks/{task}/logs").status == 404
    assert ask_as(bob, daemon, "GET", "/server").status == 200


def test_output_in_a_directory_that_was_closed_meanwhile_is_explained(daemon: Daemon, alice: Person) -> None:
    folder = alice.folder("closed-later")
    task = shell(alice, daemon, "echo done", output=str(folder / "out"))
    assert ended(daemon, task).exit_code == 0
    os.chown(folder, 0, 0)
    folder.chmod(0o700)
    ran = run_cli(alice, daemon.home, "logs", str(task))
    assert f"cannot read the output of task {task}: {folder}/out: permission denied" in ran.err
    assert f"`carma show {task}` prints how the task ended" in ran.err


def test_a_working_directory_that_cannot_be_reached_is_not_said_to_be_missing(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    closed = bob.folder("closed", 0o700)
    ran = run_cli(alice, daemon.home, "submit", "-D", str(closed / "below"), "--", "true")
    assert f"the working directory '{closed}/below' cannot be reached: permission denied" in ran.err
