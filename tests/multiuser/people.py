"""Two real users of this machine, and processes that have their credentials.

`Person.act` runs a function in a forked child that has given up root: groups, gid, uid, environment and descriptors.
The child is a fork because the interpreter may lie where other users cannot read (below root's home directory):
everything that the function needs must be imported before the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import io
import os
import pickle
import pkgutil
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import pytest

from tests.harness import LIMIT_S, until

T = TypeVar("T")
PREFIX = "carmat"  # of the users' names; the creator's pid follows, so that leftovers can be recognised
PATH = "/usr/local/bin:/usr/bin:/bin"
_LOCK = "/tmp/carma-test-users.lock"
_PR_SET_DUMPABLE = 4
_BROKEN = 99  # exit code of a command line that raised


class Person(NamedTuple):
    """A user. The home directory has mode 0711: other users can pass through, and see only what is opened to them."""

    name: str
    uid: int
    gid: int
    home: Path

    @property
    def groups(self) -> list[int]:
        return os.getgrouplist(self.name, self.gid)

    def act(self, what: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        """The function's result, or the exception that it raised, from a process with this user's credentials."""
        reading, writing = os.pipe()
        child = _fork()
        if child == 0:
            self._answer(what, writing)
        os.close(writing)
        try:
            worked, result = pickle.loads(_read_all(reading, limit_s))
        except (EOFError, TimeoutError) as error:
            raise AssertionError(f"the process of {self.name} did not answer: {error!r}") from error
        finally:
            os.close(reading)
            _end(child)
        if worked:
            return result  # type: ignore[no-any-return]
        raise result

    @contextlib.contextmanager
    def background(self, what: Callable[[], object], *kept: int) -> Iterator[int]:
        """Runs the function beside the block; its pid. It keeps these descriptors, and is killed at the end."""
        child = _fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                self.become(*kept)
                what()
            os._exit(0)
        try:
            yield child
        finally:
            _end(child)

    def _answer(self, what: Callable[[], object], writing: int) -> NoReturn:
        try:
            self.become(writing)
            answer: tuple[bool, object] = (True, what())
        except BaseException as error:
            answer = (False, error)
        try:
            data = pickle.dumps(answer)
            pickle.loads(data)
        except Exception:
            data = pickle.dumps((False, AssertionError(repr(answer[1]))))
        with contextlib.suppress(BaseException), os.fdopen(writing, "wb") as file:
            file.write(data)
        os._exit(0)

    def become(self, *kept: int) -> None:
        """Give up root for good, and everything that was opened as root."""
        signal.alarm(0)
        _close_all_but(0, 1, 2, *kept)
        os.setgroups(self.groups)
        os.setgid(self.gid)
        os.setuid(self.uid)
        os.umask(0o022)
        os.chdir(self.home)
        os.environ.clear()
        os.environ.update(HOME=str(self.home), USER=self.name, LOGNAME=self.name, PATH=PATH)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec by this user

    def own(self, path: Path, mode: int | None = None) -> Path:
        os.chown(path, self.uid, self.gid, follow_symlinks=False)
        if mode is not None:
            path.chmod(mode)
        return path

    def file(self, name: str, text: str, mode: int = 0o600) -> Path:
        """A file in the home directory."""
        path = self.home / name
        path.write_text(text)
        return self.own(path, mode)

    def folder(self, name: str, mode: int = 0o700) -> Path:
        path = self.home / name
        path.mkdir()
        return self.own(path, mode)

    def own_link(self, path: Path, target: Path) -> Path:
        path.symlink_to(target)
        return self.own(path)

    def processes(self) -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}").st_uid == self.uid:
                        found.append(int(entry))
        return found


ROOT = Person("root", 0, 0, Path("/"))


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; the child uses none
        return os.fork()


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _read_all(fd: int, limit_s: float) -> bytes:
    deadline_s = time.monotonic() + limit_s
    pieces: list[bytes] = []
    while True:
        if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise TimeoutError(f"nothing within {limit_s:g} s")
        if not (piece := os.read(fd, 1 << 16)):
            return b"".join(pieces)
        pieces.append(piece)


# Creating and removing them.


@contextlib.contextmanager
def two_people() -> Iterator[tuple[Person, Person]]:
    """Alice and Bob, with groups of their own. Skips the test where they cannot be created."""
    if os.geteuid() != 0:
        pytest.skip("only root can create users and act as them")
    if shutil.which("useradd") is None or shutil.which("userdel") is None:
        pytest.skip("useradd and userdel are not installed")
    base = Path(tempfile.mkdtemp(prefix="carma-people-", dir="/tmp"))
    base.chmod(0o755)
    names = [f"{PREFIX}{os.getpid()}{letter}" for letter in "ab"]
    try:
        with _one_at_a_time():
            _remove_leftovers()
            people = [_create(name, base / name) for name in names]
        yield people[0], people[1]
    finally:
        with _one_at_a_time():
            for name in names:
                _remove(name)
        shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """useradd fails when another one has /etc/passwd locked for too long; workers take turns."""
    with open(os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create(name: str, home: Path) -> Person:
    made = subprocess.run(
        ["useradd", "--user-group", "--create-home", "--home-dir", str(home), "--shell", "/bin/sh", name],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"useradd cannot create a user here: {made.stderr.strip()}")
    entry = pwd.getpwnam(name)
    home.chmod(0o711)
    return Person(name, entry.pw_uid, entry.pw_gid, home)


def _remove(name: str) -> None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return
    person = Person(name, entry.pw_uid, entry.pw_gid, Path(entry.pw_dir))
    until(lambda: not _kill_processes(person), f"all processes of {name} are gone")
    subprocess.run(["userdel", "--force", name], capture_output=True, check=False)


def _kill_processes(person: Person) -> list[int]:
    left = person.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _remove_leftovers() -> None:
    """Users of a test run that was killed: their creator's pid is in their name."""
    for entry in pwd.getpwall():
        creator = entry.pw_name.removeprefix(PREFIX)[:-1]
        if entry.pw_name.startswith(PREFIX) and creator.isdigit() and not os.path.exists(f"/proc/{creator}"):
            _remove(entry.pw_name)
            if entry.pw_dir.startswith("/tmp/carma-people-"):
                shutil.rmtree(Path(entry.pw_dir).parent, ignore_errors=True)


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run_cli(person: Person, carma_home: Path, *arguments: str, **environment: str) -> Ran:
    """The command line as this user, in a fork: the program itself may lie where the user cannot read."""
    import_cli()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = out.fileno(), err.fileno()

        def command() -> int:
            for source, target in zip(kept, (1, 2), strict=True):
                os.dup2(source, target)
            os.environ.update({"CARMA_HOME": str(carma_home), "COLUMNS": "500", **environment})
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
            try:
                return _main(list(arguments))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()

        code = _act_with(person, command, kept)
        texts = [_text_of(file) for file in (out, err)]
    assert code != _BROKEN, texts
    assert "internal error" not in texts[1], texts
    return Ran(code, *texts)


def _act_with(person: Person, what: Callable[[], int], kept: tuple[int, ...]) -> int:
    child = _fork()
    if child == 0:
        code = _BROKEN
        with contextlib.suppress(BaseException):
            person.become(*kept)
            code = what()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _text_of(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read()
    return text.decode("utf-8", "replace")


def _main(arguments: list[str]) -> int:
    from carma.cli import main

    try:
        return int(main(arguments) or 0)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def import_cli() -> None:
    """What the verbs load when they run."""
    import carma.cli

    modules = (module.name for module in pkgutil.walk_packages(carma.cli.__path__, "carma.cli."))
    for name in (*modules, "carma.daemon.main", "rich.console", "rich.table"):
        importlib.import_module(name)
