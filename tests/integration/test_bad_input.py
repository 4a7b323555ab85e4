"""Bad input: a clear error, and nothing lost. A real daemon, the real command line, real files.

After each of them the daemon still serves and what it had acknowledged is still there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.core.model.events import StopRequested
from carma.core.model.outcome import TimedOut
from carma.core.model.values import Estimate, NoEstimate, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.daemon.auth import Identity, require_owner
from carma.daemon.runtime import SteadyClock
from carma.errors import NotAllowed, NotRunnable, StoreError, TooLarge, Usage
from carma.estimate.combination import first_answer
from carma.testing.builders import ALICE, BOB, World
from carma.wire.api_types import SubmitRequest, UpdateRequest
from tests.harness import LIMIT_S, Daemon, daemon_at_rest, python_path, request, serving, somebody_else, until

MIB = 1 << 20
GOOD_RAD = ("# comment", "", "true", "summary", "data", "8", "", "1", "1000", "1", "1", "1")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_at_rest(gpus=2, memory_mib=8192, warmup__enabled=False, gate__enabled=False) as resting:
        resting.home.chmod(0o755)
        yield resting.start()


@pytest.fixture(autouse=True)
def _still_serves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the shared daemon: nothing that was refused waits, and the next task runs."""
    yield
    if "daemon" in request.fixturenames:
        shared: Daemon = request.getfixturevalue("daemon")
        assert shared.client.tasks(user="all") == []
        assert shared.wait(shared.submit("true")).exit_code == 0


def carma(daemon: Daemon, *words: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command line."""
    return subprocess.run(
        [sys.executable, "-m", "carma", *words],
        env=daemon.environ,
        cwd=directory or daemon.home,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def refused(daemon: Daemon, code: int, *words: str) -> str:
    """What is said on stderr: an explanation, never a traceback, and nothing on stdout."""
    done = carma(daemon, *words)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("carma: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_task_that_can_never_fit_is_rejected_with_the_largest_gpu_named(daemon: Daemon) -> None:
    said = refused(daemon, 1, "submit", "--gpu-mem", "9GiB", "--", "true")
    assert "9.0 GiB" in said
    assert "largest GPU here is GPU 0 with 8.0 GiB" in said
    assert "3 GPUs; this server has 2" in refused(daemon, 1, "submit", "--gpus", "3", "--", "true")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"\n \n\n", "is empty"),
        ("\n".join(GOOD_RAD[:6]).encode(), "too short: line 6"),
        (b"\x7fELF\x02\x01\x01\0\0\0\xff\xfe" * 50, "is binary"),
        ("\n".join((*GOOD_RAD[:7], "two")).encode(), "line 7 (number of GPUs, counted from 0): 'two'"),
        ("\n".join((*GOOD_RAD[:8], "40GB")).encode(), "line 8 (measured memory in MiB, counted from 0): '40GB'"),
        ("\n".join((*GOOD_RAD[:7], "nan")).encode(), "line 7"),
        ("\n".join((*GOOD_RAD[:2], "python 'train.py", *GOOD_RAD[3:])).encode(), "line 2 (command"),
    ],
    ids=["empty", "blank", "short", "binary", "word for GPUs", "unit in memory", "nan", "open quote"],
)
def test_a_rad_file_that_is_wrong_is_named_with_its_line(daemon: Daemon, content: bytes, complaint: str) -> None:
    (daemon.home / "bad.rad").write_bytes(content)
    said = refused(daemon, 2, "submit", "bad.rad")
    assert "bad.rad" in said
    assert complaint in said


def test_a_working_directory_or_a_command_that_is_missing(daemon: Daemon) -> None:
    assert "'/no/such/place' does not exist" in refused(daemon, 1, "submit", "--chdir", "/no/such/place", "--", "true")
    assert "no-such-program" in refused(daemon, 1, "submit", "--", "no-such-program", "--flag")
    assert "/no/such/program" in refused(daemon, 1, "submit", "--", "/no/such/program")
    (daemon.home / "plain.txt").write_text("no program")
    (daemon.home / "plain.txt").chmod(0o644)
    assert "not executable" in refused(daemon, 1, "submit", "--", "./plain.txt")
    with pytest.raises(NotRunnable, match="/no/such/place does not exist"):
        daemon.client.submit(request("true", directory="/no/such/place"))


def test_a_directory_that_vanishes_before_the_start_is_a_failure_with_its_name(daemon: Daemon) -> None:
    place = daemon.home / "vanishes"
    place.mkdir()
    daemon.client.drain()
    task = daemon.client.submit(request("true", directory=str(place))).ids[0]
    place.rmdir()
    daemon.client.resume()
    view = daemon.wait(task)
    assert (view.outcome or {})["kind"] == "failed"
    assert str(place) in (view.outcome or {})["message"]
    assert len(view.attempts) == 1


def test_nul_and_control_characters_are_refused_wherever_they_stand(daemon: Daemon) -> None:
    here = str(daemon.home)
    wrong: list[tuple[tuple[str, ...], str, dict[str, object]]] = [
        (("true", "a\0b"), here, {}),
        (("tr\0ue",), here, {}),
        (("true",), here + "\0/x", {}),
        (("true",), here, {"name": "a\0b"}),
        (("true",), here, {"name": "two\nlines"}),
        (("true",), here, {"output": "log\0"}),
        (("true",), here, {"comment": "\0"}),
        (("",), here, {}),
        ((), here, {}),
        (("true",), "not/absolute", {}),
    ]
    for command, directory, spec in wrong:
        with pytest.raises(Usage):
            daemon.client.submit(request(*command, directory=directory, **spec))


def test_shell_metacharacters_are_ordinary_characters(daemon: Daemon) -> None:
    odd = "$(touch x) `touch x` ; touch x | touch x & > x * ? ~ ! # \" ' \\ ü 😀"
    place = daemon.home / odd
    place.mkdir()
    words = ("submit", "--parsable", "--name", odd, "--output", odd, "--", "printf", "%s", odd)
    done = carma(daemon, *words, directory=place)
    assert done.returncode == 0, done.stderr
    view = daemon.wait(int(done.stdout))
    assert (view.exit_code, view.name, view.directory) == (0, odd, str(place))
    assert (place / odd).read_text() == odd
    assert [entry.name for entry in place.iterdir()] == [odd]


def test_a_submission_of_100_mb_is_refused_and_not_held_in_memory(daemon: Daemon) -> None:
    assert daemon.process is not None
    before = most_memory_mib(daemon.process.pid)
    large = {"BLOB": "x" * (100 * MIB)}
    spec = TaskSpec(command=("true",), directory=str(daemon.home), environment=large)
    with pytest.raises(TooLarge, match="larger than 8 MiB"):
        daemon.client.submit(SubmitRequest(spec=spec))
    head = b"POST /v1/tasks HTTP/1.1\r\nhost: carma\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as connection:  # without saying how much it will be
        connection.settimeout(LIMIT_S)
        connection.connect(str(daemon.paths.socket))
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
            for _ in range(100):
                connection.sendall(b"100000\r\n" + b"x" * MIB + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1024).startswith(b"HTTP/1.1 413 ")
    assert most_memory_mib(daemon.process.pid) - before < 60
    with pytest.raises(TooLarge):
        daemon.submit("true", "x" * 200_000)


def most_memory_mib(pid: int) -> int:
    """The most that the process ever held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def test_an_unknown_id_is_not_found_by_every_verb(daemon: Daemon) -> None:
    verbs = ("show", "logs", "explain", "wait", "cancel", "hold", "release", "retry")
    for words in (*((verb, "987654") for verb in verbs), ("update", "987654", "--name", "x")):
        assert "987654" in refused(daemon, 4, *words)
    assert "987654" in refused(daemon, 4, "submit", "-d", "afterok:987654", "--", "true")


def test_only_the_owner_and_administrators_may_see_a_task() -> None:
    world = World(1)
    task = world.task(world.submit(100, owner=ALICE))
    require_owner(Identity(uid=ALICE.uid, gid=ALICE.gid, name="alice"), task, "cancel")
    require_owner(Identity(uid=0, gid=0, name="root", admin=True), task, "cancel")
    with pytest.raises(NotAllowed, match=r"task 1 .*alice.*bob"):
        require_owner(Identity(uid=BOB.uid, gid=BOB.gid, name="bob"), task, "cancel")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_task_cannot_be_read_or_changed_through_the_socket(daemon: Daemon) -> None:
    task = daemon.submit("sh", "-c", "while ! [ -e theirs ]; do sleep 0.02; done; echo secret", comment="private words")
    daemon.until_state(task, "running")
    with somebody_else(daemon) as client:
        for act in (
            lambda: client.cancel(task),
            lambda: client.hold(task),
            lambda: client.release(task),
            lambda: client.retry(task),
            lambda: client.update(task, UpdateRequest(name="mine")),
            lambda: client.logs(task),
            lambda: client.drain(),
            lambda: client.shutdown(),
        ):
            with pytest.raises(NotAllowed):
                act()
        seen = client.task(task)
        assert (seen.state, seen.user) == ("running", "root")
        assert "secret" not in str(seen)
        assert "private words" not in str(seen)
    (daemon.home / "theirs").touch()
    assert daemon.wait(task).exit_code == 0


def test_a_full_disk_refuses_what_it_cannot_keep_and_loses_nothing() -> None:
    with serving(gpus=1) as daemon:
        assert daemon.process is not None
        kept = daemon.submit("true")
        assert daemon.wait(kept).exit_code == 0
        daemon.client.drain()
        waiting = daemon.submit("true")
        until(lambda: daemon.client.task(waiting).state == "queued", "it waits")
        pid, files = daemon.process.pid, daemon.home.glob("carma.db*")
        full = max(file.stat().st_size for file in files)
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (full, hard))
        with pytest.raises(StoreError) as caught:  # there may be a little room left below the limit
            _ = [daemon.submit("true", comment="x" * 2_000) for _ in range(1_000)]
        assert "carma.db" in str(caught.value)
        assert "space" in caught.value.hint
        accepted = {view.id for view in daemon.client.tasks()}
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert waiting in accepted
        daemon.client.resume()
        after = daemon.submit("true")
        assert {daemon.wait(task).exit_code for task in (*accepted, after)} == {0}
        daemon.kill()
        daemon.start()
        assert {view.id for view in daemon.client.history()} == {kept, *accepted, after}


@pytest.mark.parametrize("kind", ["corrupt", "damaged", "newer", "foreign"])
def test_a_database_that_cannot_be_used_stops_the_start_and_is_left_as_it_is(kind: str) -> None:
    with daemon_at_rest(gpus=1) as daemon:
        file = daemon.paths.database
        if kind in ("damaged", "newer"):
            make_database(daemon)
        spoil(file, kind)
        before = file.read_bytes()
        assert daemon.spawn().wait(LIMIT_S) == 1
        said = {"corrupt": "not a database", "damaged": "damaged", "newer": "format 99", "foreign": "another program"}
        assert str(file) in daemon.log
        assert said[kind] in daemon.log
        assert "file is unchanged" in daemon.log
        assert "Traceback" not in daemon.log
        assert file.read_bytes() == before
        assert not daemon.paths.socket.exists()


def make_database(daemon: Daemon) -> None:
    """One that a daemon has used."""
    daemon.start()
    for _ in range(3):
        daemon.wait(daemon.submit("true"))
    assert daemon.stop() == 0
    (daemon.home / "test-daemon.log").unlink()


def spoil(file: Path, kind: str) -> None:
    if kind == "corrupt":
        file.write_bytes(b"this is not a database " * 500)
    elif kind == "damaged":
        content = bytearray(file.read_bytes())
        content[4096 * 2 : 4096 * 4] = b"\xa5" * 4096 * 2
        file.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(file)) as other:
            change = "CREATE TABLE recipes (name TEXT)" if kind == "foreign" else "PRAGMA user_version = 99"
            other.execute(change)
            other.execute("PRAGMA journal_mode = DELETE")


def test_two_daemons_on_one_home_are_one_daemon_and_one_error() -> None:
    with serving(gpus=1) as first:
        second = Daemon(first.home, gpus=1)
        pid = first.client.server().pid
        done = carma(second, "up")
        assert done.returncode == 1
        assert "already served" in done.stderr
        assert str(pid) in done.stderr
        assert first.client.server().pid == pid
        assert first.wait(first.submit("true")).exit_code == 0


@pytest.mark.parametrize("left_by", ["a killed daemon", "another program"])
def test_a_stale_socket_is_replaced(left_by: str) -> None:
    with daemon_at_rest(gpus=1) as daemon:
        if left_by == "a killed daemon":
            daemon.start()
            daemon.kill()
        else:
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(daemon.paths.socket))
        assert daemon.paths.socket.is_socket()
        daemon.start()
        assert daemon.wait(daemon.submit("true")).exit_code == 0


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_ends_no_task_and_delays_none(jump_s: float) -> None:
    wall_at, steady_s = 1_000.0, 0.0
    clock = SteadyClock(wall=lambda: wall_at, monotonic=lambda: steady_s)
    world = World(1)
    task = world.submit(1_000, time_limit_s=60.0)
    world.now = clock.now()
    world.settle()
    world.start(task)
    wall_at, steady_s = wall_at + jump_s, 59.0
    world.now = clock.now()
    world.sample()
    assert not any(isinstance(event, StopRequested) for event in world.settle())
    steady_s = 61.0
    world.now = clock.now()
    ended = [event for event in world.settle() if isinstance(event, StopRequested)]
    assert [event.ending for event in ended] == [TimedOut(60.0)]


def test_a_policy_that_raises_is_a_reason_to_wait_and_not_a_crash(tmp_path: Path) -> None:
    """The policy comes from another package: an entry point, found by its name."""
    (tmp_path / "moody.py").write_text(
        "import os\n"
        "from carma.core.scheduling.placement import Policy\n"
        "from carma.core.policies.magm import rank\n"
        "def moody(ask, views, last):\n"
        "    return rank(ask, views, last) if os.path.exists(os.environ['MOOD']) else 1 // 0\n"
        "POLICY = Policy('moody', moody)\n"
    )
    about = tmp_path / "moody-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[carma.policies]\nmoody = moody:POLICY\n")
    with daemon_at_rest(gpus=1, placement__policy="moody") as daemon:
        daemon.environ |= {"PYTHONPATH": python_path(tmp_path), "MOOD": str(tmp_path / "good")}
        daemon.start()
        task = daemon.submit("true")
        reason = "policy moody failed: ZeroDivisionError"
        until(lambda: reason in daemon.client.task(task).reason, "it waits, and says why")
        assert daemon.client.task(task).reason_code == "Policy"
        (tmp_path / "good").touch()
        assert daemon.wait(task).exit_code == 0


def test_an_estimator_that_raises_is_a_refusal_with_its_name() -> None:
    class Broken:
        name = "broken"
        quick = False

        def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
            raise KeyError(request.task)

    spec = TaskSpec(command=("true",), directory="/")
    asked = EstimateRequest(task=TaskId(1), owner=ALICE, spec=spec, gpus=())
    estimate, refusals = first_answer([Broken()], asked)
    assert estimate is None
    assert refusals == (NoEstimate(source="broken", reason="it raised KeyError: 1"),)
