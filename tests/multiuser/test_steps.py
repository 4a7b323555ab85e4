"""The file in which a task counts its steps: no other user can read, write or replace it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from carma.launch.attempt_records import STEPS
from carma.step_file import LIMIT_BYTES, append, slot_of
from tests.harness import Daemon, until
from tests.multiuser.people import Person
from tests.multiuser.serving import attempt_folder, ended, pid_of, shell

COUNTS = 123  # steps
WRITABLE = Path("/tmp")  # by all users, and on the file system of the daemon's home


def waiting_task(person: Person, daemon: Daemon) -> tuple[int, Path]:
    task = shell(person, daemon, "sleep 600")
    pid_of(daemon, task)
    file = attempt_folder(daemon, task) / STEPS
    assert file.stat().st_dev == WRITABLE.stat().st_dev
    return task, file


def count(file: Path, steps: int = COUNTS) -> None:
    append(str(file), slot_of(os.getpid(), steps, time.monotonic_ns(), time.monotonic_ns()))


def attempts_at(file: Path, other: Path) -> list[tuple[str, Callable[[], object]]]:
    """Ways to read or change it, and to put something else in its place. `other`: a file on the same file system."""
    return [
        ("read", file.read_bytes),
        ("write", lambda: count(file)),
        ("truncate", lambda: os.truncate(file, 0)),
        ("chmod", lambda: file.chmod(0o666)),
        ("unlink", file.unlink),
        ("rename", lambda: file.rename(file.with_name("moved"))),
        ("replace", lambda: os.rename(other, file)),
        ("link from", lambda: os.link(file, other.with_suffix(".link"))),
        ("link beside", lambda: os.symlink(other, file.with_name("beside"))),
    ]


def successes(file: Path) -> list[str]:
    """With a file of the caller's own: on the same file system, because no file moves to another one."""
    with tempfile.TemporaryDirectory(dir=WRITABLE) as folder:
        other, done = Path(folder, "other"), list[str]()
        other.touch()
        for name, action in attempts_at(file, other):
            with contextlib.suppress(OSError):
                action()
                done.append(name)
        return done


def test_another_user_can_neither_read_nor_replace_the_count(daemon: Daemon, alice: Person, bob: Person) -> None:
    task, file = waiting_task(bob, daemon)
    found = file.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (bob.uid, 0o600)
    assert alice.act(lambda: successes(file)) == []
    bob.act(lambda: count(file))
    until(lambda: daemon.client.task(task).progress.steps == COUNTS, "the daemon reads the count of the task's user")


def test_the_user_of_a_task_can_write_its_count_and_put_nothing_in_its_place(daemon: Daemon, bob: Person) -> None:
    _, file = waiting_task(bob, daemon)
    inode = file.stat().st_ino
    done = bob.act(lambda: successes(file))
    assert {"read", "write"} <= set(done) <= {"read", "write", "truncate", "chmod", "link from"}
    assert file.stat().st_ino == inode


def test_a_count_of_any_content_disturbs_nobody_and_does_not_grow(daemon: Daemon, alice: Person, bob: Person) -> None:
    task, file = waiting_task(bob, daemon)
    other, others_file = waiting_task(alice, daemon)

    def fill() -> None:
        with file.open("wb") as garbage:
            garbage.write(b"\xff" * (8 << 20))

    bob.act(fill)
    until(lambda: file.stat().st_size <= LIMIT_BYTES, "the runner cuts it")
    alice.act(lambda: count(others_file))
    until(lambda: daemon.client.task(other).progress.steps == COUNTS, "other tasks are counted")
    assert daemon.client.task(task).progress.steps is None


def test_the_processes_of_a_task_can_count(daemon: Daemon, bob: Person) -> None:
    """The file, and the directories above it, are open to the account of the task."""
    assert ended(daemon, shell(bob, daemon, 'echo >> "$CARMA_STEPS_FILE"')).exit_code == 0
