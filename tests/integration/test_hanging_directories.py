"""A real daemon while the directory of a user does not answer, or no process can be started."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from carma.client import Client
from carma.errors import Busy, CarmaError
from carma.procfs import processes
from carma.wire.api_types import SubmitAnswer, SubmitRequest
from tests.hanging_fs import HangingMount, hanging_mount
from tests.harness import Daemon, request, serving, until
from tests.launch_orders import gone

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, and clients of several users")

ALICE, BOB = 54321, 54322
MANY = 70  # more than the 64 file checks that all users together once had
PIDS = Path("/sys/fs/cgroup/pids")  # cgroup v1
UNIFIED = Path("/sys/fs/cgroup")


@pytest.fixture
def remote() -> Iterator[Path]:
    """A mount point that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="carma-") as made:
        os.chmod(made, 0o755)
        (Path(made) / "remote").mkdir()
        yield Path(made) / "remote"


@contextlib.contextmanager
def serving_users() -> Iterator[Daemon]:
    with serving(gpus=2) as daemon:
        daemon.home.chmod(0o755)
        yield daemon


def connect(daemon: Daemon, uid: int) -> Client:
    """A client whose connection the kernel attributes to this user."""
    client = Client(daemon.paths.socket)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        client.server()  # connects
    finally:
        os.seteuid(0)
        os.setegid(0)
    return client


@contextlib.contextmanager
def submitting(daemon: Daemon, uid: int, directory: Path, count: int) -> Iterator[list[Future[SubmitAnswer]]]:
    """Submits this number of tasks from the directory at the same time, each on its own connection."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        clients = [stack.enter_context(contextlib.closing(connect(daemon, uid))) for _ in range(count)]
        yield [pool.submit(client.submit, request("true", directory=str(directory))) for client in clients]


def outcomes(asked: list[Future[SubmitAnswer]]) -> list[str]:
    """The error codes of those that have ended; "" for an accepted submission."""
    errors = [future.exception() for future in asked if future.done()]
    return [error.code if isinstance(error, CarmaError) else "" for error in errors]


def ended(daemon: Daemon, task: int) -> str:
    outcome = daemon.wait(task).outcome
    assert outcome is not None
    return str(outcome["kind"])


def until_accepted(client: Client, directory: Path) -> None:
    def accepted() -> bool:
        try:
            return bool(client.submit(request("true", directory=str(directory))).ids)
        except Busy:
            return False

    until(accepted, "the submission is accepted")


def test_the_hanging_directory_of_one_user_affects_no_other_user(remote: Path) -> None:
    with serving_users() as daemon, hanging_mount(remote) as mount:
        mount.hang()
        with submitting(daemon, ALICE, remote, MANY) as asked, contextlib.closing(connect(daemon, BOB)) as bob:
            until(lambda: Busy.code in outcomes(asked), "the user with the hanging directory gets 503")
            task = bob.submit(request("sleep", "1000", directory="/")).ids[0]
            daemon.until_state(task, "running")
            bob.cancel(task)
            assert ended(daemon, task) == "cancelled"
            assert ended(daemon, daemon.submit("true")) == "succeeded"
            mount.resume()
        assert set(outcomes(asked)) <= {"", Busy.code, "not_runnable"}
        with contextlib.closing(connect(daemon, ALICE)) as alice:
            until_accepted(alice, remote)


@contextlib.contextmanager
def hanging_submission(daemon: Daemon, mount: HangingMount) -> Iterator[None]:
    mount.hang()
    with submitting(daemon, ALICE, mount.path, 1) as asked:
        mount.until_held()
        yield
        mount.resume()
    assert len(outcomes(asked)) == 1


def test_a_killed_daemon_releases_its_lock_while_a_file_check_hangs(remote: Path) -> None:
    with serving_users() as daemon, hanging_mount(remote) as mount, hanging_submission(daemon, mount):
        daemon.kill()
        daemon.start()
        assert ended(daemon, daemon.submit("true")) == "succeeded"


def test_a_daemon_stops_while_a_file_check_hangs(remote: Path) -> None:
    with serving_users() as daemon, hanging_mount(remote) as mount, hanging_submission(daemon, mount):
        assert daemon.stop() == 0
        daemon.start()


def test_the_probes_of_a_killed_daemon_end() -> None:
    with serving_users() as daemon, contextlib.closing(connect(daemon, ALICE)) as alice:
        assert daemon.process is not None
        alice.submit(request("true", directory="/", begin_at=2e9))
        (probe,) = (pid for pid, one in processes().items() if one.parent == daemon.process.pid)
        daemon.kill()
        until(lambda: gone(probe), "the probe has ended")


# No process can be started.


@pytest.fixture
def pids_cgroup() -> Iterator[Path]:
    """An empty cgroup with a limit of its number of processes and threads."""
    base = PIDS if PIDS.is_dir() else UNIFIED
    made = base / f"carma-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be created: {error}")
    try:
        if not (made / "pids.max").exists():
            pytest.skip("no pids controller in this cgroup")
        yield made
    finally:
        until(lambda: not (made / "cgroup.procs").read_text().split(), "the cgroup is empty")
        made.rmdir()


def test_submissions_work_again_after_a_lack_of_processes(pids_cgroup: Path) -> None:
    with serving_users() as daemon, contextlib.closing(connect(daemon, ALICE)) as alice:
        assert daemon.process is not None
        (pids_cgroup / "cgroup.procs").write_text(str(daemon.process.pid))
        (pids_cgroup / "pids.max").write_text("1")
        for _ in range(MANY):
            with pytest.raises(Busy, match="cannot start a process"):
                alice.submit(request("true", directory="/"))
        (pids_cgroup / "pids.max").write_text("max")
        assert alice.submit(request("true", directory="/", begin_at=2e9)).ids
        daemon.stop()


def submit_held(daemon: Daemon, directory: Path) -> int:
    spec = request("true", directory=str(directory), gpu_memory_mib=8_000).spec
    return daemon.client.submit(SubmitRequest(spec=spec, held=True)).ids[0]


def test_a_task_whose_directory_stops_answering_before_its_start_releases_its_gpu(remote: Path) -> None:
    with serving(gpus=1, launch__start_timeout_s=2.0) as daemon, hanging_mount(remote) as mount:
        stuck = submit_held(daemon, remote)
        mount.hang()
        daemon.client.release(stuck)
        mount.until_held()
        waits = daemon.submit("true", gpu_memory_mib=8_000)
        view = daemon.wait(stuck)
        assert (view.outcome or {})["kind"] == "launch_failed"
        assert str(remote) in (view.outcome or {})["reason"]
        assert ended(daemon, waits) == "succeeded"


def test_a_task_that_is_stuck_before_its_start_can_be_cancelled_also_after_a_restart(remote: Path) -> None:
    with serving(gpus=1) as daemon, hanging_mount(remote) as mount:
        stuck = submit_held(daemon, remote)
        mount.hang()
        daemon.client.release(stuck)
        mount.until_held()
        daemon.kill()
        daemon.start()
        daemon.client.cancel(stuck, signal=9)
        assert ended(daemon, stuck) == "cancelled"
