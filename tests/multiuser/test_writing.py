"""No user can change files of another user, of root or of CARMA through a task or its output."""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Daemon, until
from tests.multiuser.people import Person
from tests.multiuser.serving import (
    ask_as,
    attempt_folder,
    ended,
    pid_of,
    runner_of,
    running,
    shell,
    submit,
    try_submit,
    until_exists,
)

RECORDS = ("claim.json", "started.json", "exit.json", "exit.json.tmp", "told.json", "held.json", "stop", "runner.log")


class Places:
    """Files that Alice may not write to."""

    def __init__(self, daemon: Daemon, bob: Person) -> None:
        self.bob = bob.file(f"bob-{secrets.token_hex(4)}", "bob's\n", 0o644)
        self.root = daemon.home / f"root-{secrets.token_hex(4)}"
        self.root.write_text("root's\n")
        task = shell(bob, daemon, "echo output")
        ended(daemon, task)
        self.output = attempt_folder(daemon, task) / "stdout.log"
        self.record = attempt_folder(daemon, task) / "exit.json"
        self.database = daemon.paths.database
        self.lock = daemon.home / "carma.db.lock"
        self.new = daemon.paths.log_dir / "new"
        self.socket = daemon.paths.socket


Target = Callable[[Places], Path]
TARGETS: dict[str, Target] = {
    "a_file_of_bob": lambda places: places.bob,
    "a_file_of_root": lambda places: places.root,
    "the_output_of_bob": lambda places: places.output,
    "a_record": lambda places: places.record,
    "the_database": lambda places: places.database,
    "the_lock": lambda places: places.lock,
    "a_new_file_among_the_logs": lambda places: places.new,
    "the_socket": lambda places: places.socket,
}


@pytest.fixture(scope="module")
def places(shared_daemon: Daemon, bob: Person) -> Places:
    return Places(shared_daemon, bob)


def state_of(path: Path) -> tuple[object, ...] | None:
    """What a write would change. The database is written by the daemon meanwhile: of it only the owner and the mode."""
    if not path.exists():
        return None
    about = path.stat()
    plain = stat.S_ISREG(about.st_mode) and path.suffix != ".db"
    return (about.st_ino, about.st_uid, about.st_mode, path.read_bytes() if plain else b"")


@pytest.mark.parametrize("through", ["path", "link", "folder_link"])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_output_is_never_written_to(
    daemon: Daemon, alice: Person, places: Places, target: Target, through: str
) -> None:
    path = target(places)
    before = state_of(path)
    output = str(path)
    if through == "link":
        output = str(alice.own_link(alice.home / f"link-{secrets.token_hex(4)}", path))
    elif through == "folder_link":
        output = f"{alice.own_link(alice.home / f'link-{secrets.token_hex(4)}', path.parent)}/{path.name}"
    answer = try_submit(alice, daemon, "echo", "overwritten", output=output)
    if answer.status == 201:
        assert ended(daemon, answer.json["ids"][0]).exit_code == 126
    assert state_of(path) == before


def test_a_task_cannot_change_the_records_of_its_own_attempt(daemon: Daemon, alice: Person) -> None:
    """A task that could would choose its own outcome, or the process that is signalled in its name."""
    forged = '{"code": 0, "ended_at": 1, "pid": 1, "start_ticks": 1, "signal": 15}'
    lines = [f"for name in {' '.join(RECORDS)}; do"]
    lines += [f"echo '{forged}' > $LOGS/$CARMA_TASK_ID.$CARMA_ATTEMPT/$name && exit 50", "done 2> /dev/null"]
    lines += ["rm -rf $LOGS/$CARMA_TASK_ID.$CARMA_ATTEMPT 2> /dev/null", "exit 7"]
    environment = {"PATH": "/usr/bin:/bin", "LOGS": str(daemon.paths.log_dir)}
    task = shell(alice, daemon, "\n".join(lines), environment=environment)
    view = ended(daemon, task)
    assert view.exit_code == 7
    assert attempt_folder(daemon, task).is_dir()


def test_a_task_cannot_replace_its_own_output_by_a_link(daemon: Daemon, alice: Person, places: Places) -> None:
    script = "cd $LOGS/$CARMA_TASK_ID.$CARMA_ATTEMPT && ln -sf $TARGET stdout.log && exit 50; rm -f stdout.log; exit 7"
    environment = {"PATH": "/usr/bin:/bin", "LOGS": str(daemon.paths.log_dir), "TARGET": str(places.bob)}
    task = shell(alice, daemon, script, environment=environment)
    assert ended(daemon, task).exit_code == 7
    found = attempt_folder(daemon, task) / "stdout.log"
    assert not found.is_symlink()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_an_output_file_belongs_to_its_submitter_with_the_submitters_umask(
    daemon: Daemon, alice: Person, umask: int
) -> None:
    out = alice.home / f"out-{secrets.token_hex(4)}"
    task = submit(alice, daemon, "true", output=str(out), umask=umask)
    assert ended(daemon, task).exit_code == 0
    about = out.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (alice.uid, alice.gid, 0o666 & ~umask)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_the_output_that_carma_keeps_is_for_its_owner_only_and_after_the_end_for_the_daemon_only(
    daemon: Daemon, alice: Person, umask: int
) -> None:
    go = alice.home / f"go-{secrets.token_hex(4)}"
    task = shell(alice, daemon, f"echo private; echo private >&2; {until_exists(go)}", umask=umask)
    running(daemon, task)
    logs = [attempt_folder(daemon, task) / name for name in ("stdout.log", "stderr.log")]
    for log in logs:
        assert (log.stat().st_uid, stat.S_IMODE(log.stat().st_mode) & 0o077) == (alice.uid, 0)
    go.touch()
    assert ended(daemon, task).exit_code == 0
    for log in logs:
        assert (log.stat().st_uid, stat.S_IMODE(log.stat().st_mode)) == (0, 0o400)
    assert ask_as(alice, daemon, "GET", f"/tasks/{task}/logs").body == b"private\n"


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(1 << 20))


AFTER_THE_END: dict[str, Callable[[Path, Path], object]] = {
    "append": lambda log, _: append(log),
    "read": lambda log, _: log.read_bytes(),
    "touch": lambda log, _: os.utime(log, (2**31, 2**31)),  # so that it would never be old enough to be removed
    "link": lambda log, new: os.link(log, new),
    "open_to_all": lambda log, _: log.chmod(0o666),
}


@pytest.mark.parametrize("change", AFTER_THE_END.values(), ids=AFTER_THE_END.keys())
def test_the_submitter_has_no_access_to_the_kept_output_of_an_ended_attempt(
    daemon: Daemon, alice: Person, change: Callable[[Path, Path], object]
) -> None:
    task = shell(alice, daemon, "echo output; chmod 666 /dev/stdout; exit 3")
    ended(daemon, task)
    log, new = attempt_folder(daemon, task) / "stdout.log", alice.home / secrets.token_hex(4)
    with pytest.raises(PermissionError):
        alice.act(lambda: change(log, new) and None)
    assert log.read_text() == "output\n"


def test_the_submitter_has_no_access_to_the_kept_output_after_the_runner_was_killed(
    daemon: Daemon, alice: Person
) -> None:
    task = shell(alice, daemon, "echo output; sleep 1000")
    pids = runner_of(daemon, task), pid_of(daemon, task)
    log = attempt_folder(daemon, task) / "stdout.log"
    until(lambda: log.read_text() == "output\n", "it has written its output")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert (ended(daemon, task).outcome or {})["kind"] == "lost"
    until(lambda: stat.S_IMODE(log.stat().st_mode) == 0o400, "the output is sealed")
    with pytest.raises(PermissionError):
        alice.act(lambda: append(log))
    assert log.stat().st_uid == 0


def opened_before(go: Path, mapped: bool) -> Callable[[Path], Callable[[], None]]:
    """Opens the file now, and writes 4 MiB to it once `go` exists."""

    def attack(log: Path) -> Callable[[], None]:
        def work() -> None:
            fd = os.open(log, os.O_RDWR if mapped else os.O_RDWR | os.O_APPEND)
            memory = mmap.mmap(fd, 0) if mapped else None
            if memory is not None:
                os.close(fd)
            go.with_suffix(".opened").touch()
            until(go.exists, "the attempt has ended")
            if memory is not None:
                memory[:4] = b"ABCD"
            else:
                os.write(fd, bytes(4 << 20))
            go.with_suffix(".written").touch()

        return work

    return attack


@pytest.mark.parametrize("mapped", [False, True], ids=["descriptor", "mapping"])
def test_a_file_that_was_opened_before_the_end_changes_nothing_that_is_kept(
    daemon: Daemon, alice: Person, mapped: bool
) -> None:
    go, end = (alice.home / f"{name}-{secrets.token_hex(4)}" for name in ("go", "end"))
    task = shell(alice, daemon, f"echo output; {until_exists(end)}; exit 3")
    log = attempt_folder(daemon, task) / "stdout.log"
    running(daemon, task)
    until(lambda: log.read_text() == "output\n", "it has written its output")
    with alice.background(opened_before(go, mapped)(log)):
        until(go.with_suffix(".opened").exists, "alice has opened her output")
        end.touch()
        ended(daemon, task)
        go.touch()
        until(go.with_suffix(".written").exists, "alice has written to it")
        assert log.read_text() == "output\n"
        assert log.stat().st_blocks * 512 <= 1 << 20


def test_a_second_name_of_the_output_is_not_what_is_kept(daemon: Daemon, alice: Person) -> None:
    """It would take space after the output was removed, which no quota of the submitter counts."""
    end, name = (alice.home / f"{name}-{secrets.token_hex(4)}" for name in ("end", "name"))
    task = shell(alice, daemon, f"echo output; {until_exists(end)}; exit 3")
    running(daemon, task)
    log = attempt_folder(daemon, task) / "stdout.log"
    alice.act(lambda: os.link(log, name))
    end.touch()
    ended(daemon, task)
    assert (log.stat().st_nlink, log.stat().st_uid, log.read_text()) == (1, 0, "output\n")
    assert name.stat().st_uid == alice.uid


def test_a_task_does_not_run_in_a_directory_that_is_closed_to_its_submitter(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    private = bob.folder(f"private-{secrets.token_hex(4)}")
    answer = try_submit(alice, daemon, "touch", "here", directory=str(private))
    if answer.status == 201:
        assert ended(daemon, answer.json["ids"][0]).exit_code == 126
    assert not list(private.iterdir())
