"""No user can change files of another user, of root or of CARMA through a task or its output."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Daemon
from tests.multiuser.people import Person
from tests.multiuser.serving import attempt_folder, ended, shell, submit, try_submit

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
def test_the_output_that_carma_keeps_is_for_its_owner_only(daemon: Daemon, alice: Person, umask: int) -> None:
    task = shell(alice, daemon, "echo private; echo private >&2", umask=umask)
    assert ended(daemon, task).exit_code == 0
    for name in ("stdout.log", "stderr.log"):
        about = (attempt_folder(daemon, task) / name).stat()
        assert (about.st_uid, stat.S_IMODE(about.st_mode) & 0o077) == (alice.uid, 0)


def test_a_task_does_not_run_in_a_directory_that_is_closed_to_its_submitter(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    private = bob.folder(f"private-{secrets.token_hex(4)}")
    answer = try_submit(alice, daemon, "touch", "here", directory=str(private))
    if answer.status == 201:
        assert ended(daemon, answer.json["ids"][0]).exit_code == 126
    assert not list(private.iterdir())
