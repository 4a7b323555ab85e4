"""Attempts under MPS: their environment, their records, and the end of their server."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from carma.cgroups import Cgroups
from carma.core.model.outcome import Disrupted, Failed, OutOfMemory, Succeeded
from carma.core.model.settings import Sharing
from carma.core.model.values import Booking, Confinement, Gpu, GpuId, Guard, Placement, TaskSpec
from carma.core.ports import LaunchOrder
from carma.launch import attempt_records as records
from carma.launch.attempt_cgroups import AttemptCgroups, CgroupLimits, NvmlLimiter
from carma.launch.confinement import GpuConfiner
from carma.launch.confinement_records import CONTROL_GONE, SERVER_GONE
from carma.launch.mps import MpsServers
from carma.launch.process import ProcessLauncher
from carma.testing.launcher_contract import key, look, order_of, until, until_ended, until_running
from tests.launch_orders import gone, shell, tidy, until_file
from tests.mps_program import Program, kill, short_home

CARD = Gpu(id=GpuId("GPU-0a"), index=0, name="H200", memory_mib=143_155)


class Place:
    """The directories of a server. Each launcher is the one of another run of the daemon."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.folder, self.program = folder, program
        self.attempts = folder / "attempts"
        self.device = folder / "dev" / "nvidia0"
        self.device.parent.mkdir()
        self.device.touch()

    def launcher(self, **sharing: object) -> ProcessLauncher:
        servers = MpsServers(self.folder / "mps", idle_s=0.0)
        return ProcessLauncher(
            self.attempts,
            run_as_submitter=False,
            confiner=GpuConfiner(Sharing(**sharing), servers),  # type: ignore[arg-type]
            servers=servers,
            device_files=str(self.device.parent / "nvidia"),
        )

    def client(self, script: str = "sleep 600") -> TaskSpec:
        """Has a GPU's device file open, as a CUDA program has."""
        return self.task(f"exec 5< {shlex.quote(str(self.device))}; : > up; {script}")

    def task(self, script: str, **more: object) -> TaskSpec:
        return shell(script, self.folder, grace_s=0.2, **more)

    def until_up(self) -> None:
        until((self.folder / "up").exists)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with short_home() as folder:
        program = Program(folder / "bin")
        program.install(monkeypatch)
        yield Place(folder, program)
        tidy(folder / "attempts")


@pytest.fixture
def launcher(place: Place) -> ProcessLauncher:
    return place.launcher()


def on_card(spec: TaskSpec, task: int = 1, cap_mib: int | None = None) -> LaunchOrder:
    booking = Booking(memory_mib=4000, source="declared", cap_mib=cap_mib)
    placement = Placement(gpus=(CARD.id,), booking=booking)
    return msgspec.structs.replace(order_of(spec, task), placement=placement, gpus=(CARD,))


def server_pid(launcher: ProcessLauncher, which: str) -> int:
    for pid in launcher.sharing_pids():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if os.fsencode(f"nvidia-cuda-mps-{which}") in {os.path.basename(word) for word in words}:
            return pid
    raise AssertionError(f"there is no {which}")


def test_a_task_runs_under_its_users_server_whatever_its_environment_says(
    place: Place, launcher: ProcessLauncher
) -> None:
    own = {
        "PATH": "/usr/bin:/bin",
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mine",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=99G",
        "CUDA_MPS_CLIENT_PRIORITY": "0",
    }
    spec = place.task("env | grep ^CUDA_MPS | sort", environment=own, threads_percent=40)
    launcher.launch(on_card(spec, cap_mib=4096))
    assert until_ended(launcher, key()) == Succeeded()
    pipes = place.folder / "mps" / f"{os.geteuid()}.1"
    assert Path(launcher.files.log_path(key(), "stdout")).read_text().splitlines() == [
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40",
        f"CUDA_MPS_LOG_DIRECTORY={pipes}/log",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
        f"CUDA_MPS_PIPE_DIRECTORY={pipes}",
    ]


def test_the_work_of_its_clients_is_ended_before_they_are_killed(
    place: Place, launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own processes only, and once: a SIGTERM ends none, a repeated SIGKILL does not ask again."""
    launcher.launch(on_card(place.client("trap '' TERM; sleep 600 & wait; wait")))
    place.until_up()
    pids = sorted(launcher.pids([key()]))
    place.program.has_clients(*pids, os.getpid(), 1)
    launcher.signal(key(), signal.SIGTERM)
    assert place.program.terminated == []
    server = server_pid(launcher, "server")
    launcher.signal(key(), signal.SIGKILL)
    monkeypatch.setattr(launcher._confinements, "terminate_clients", pytest.fail)
    launcher.signal(key(), signal.SIGKILL)
    until_ended(launcher, key())
    asked = [int(line.split()[1]) for line in place.program.terminated]
    assert asked
    assert set(asked) <= set(pids)
    assert len(asked) == len(set(asked))
    assert {line.split()[0] for line in place.program.terminated} == {str(server)}


def test_a_control_program_that_does_not_answer_does_not_keep_a_task_alive(
    place: Place, launcher: ProcessLauncher
) -> None:
    launcher.launch(on_card(place.client()))
    place.until_up()
    place.program.behave("hang")
    launcher.signal(key(), signal.SIGKILL)
    assert "SIGKILL" in str(until_ended(launcher, key()))
    assert place.program.terminated == []


def test_the_confinement_is_recorded_for_the_next_daemon(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.task(until_file(place.folder / "go")), cap_mib=4096))
    until_running(launcher, key())
    confinement = look(launcher, key()).confinement
    assert confinement is not None
    assert confinement.mechanism == "mps"
    assert confinement.guards[0] == Guard(rung="mps", limit_mib=4096, how="MPS's memory limit, for each process")
    later = place.launcher()
    assert look(later, key()).confinement == confinement
    assert later.sharing_pids() == launcher.sharing_pids()
    (place.folder / "go").touch()
    until_ended(later, key())
    assert look(later, key()).confinement == confinement


def test_what_never_started_has_no_confinement(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(shell("exit 0", place.folder / "nowhere")))
    assert isinstance(until_ended(launcher, key()), Failed)
    assert look(launcher, key()).confinement is None


def test_demanded_mps_that_is_not_available_is_a_failure_to_start(place: Place) -> None:
    (place.folder / "bin" / "refuse").touch()
    launcher = place.launcher(mechanism="mps")
    launcher.launch(on_card(place.task(": > ran")))
    outcome = until_ended(launcher, key())
    assert isinstance(outcome, Failed)
    assert outcome.code == 126
    assert "sharing.mechanism = mps" in outcome.message
    assert "already running" in outcome.message
    assert not (place.folder / "ran").exists()
    launcher.launch(on_card(place.task(": > ran", mechanism="timeslice"), 2))
    assert until_ended(launcher, key(2)) == Succeeded()


def test_auto_runs_without_mps_and_notes_it(place: Place) -> None:
    (place.folder / "bin" / "refuse").touch()
    launcher = place.launcher()
    launcher.launch(on_card(place.task("exit 0")))
    assert until_ended(launcher, key()) == Succeeded()
    confinement = look(launcher, key()).confinement
    assert confinement is not None
    assert confinement.mechanism == "timeslice"
    assert "already running" in confinement.note


def test_a_server_that_dies_is_trouble_for_its_clients_alone(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.client(), 1))
    launcher.launch(on_card(place.task("sleep 600"), 2))  # has not come to CUDA yet
    launcher.launch(on_card(plain(place), 3))
    for number in (1, 2, 3):
        until_running(launcher, key(number))
    place.until_up()
    until((place.folder / "plain").exists)
    assert [one.trouble for one in launcher.poll([key(1), key(2), key(3)])] == [None] * 3
    kill(server_pid(launcher, "server"))
    found = launcher.poll([key(1), key(2), key(3)])
    assert [one.trouble for one in found] == [SERVER_GONE, None, None]
    assert [one.outcome for one in found] == [None] * 3
    again = launcher.poll([key(1), key(2), key(3)])
    assert [one.trouble for one in again] == [one.trouble for one in found]


def plain(place: Place) -> TaskSpec:
    script = f"exec 5< {shlex.quote(str(place.device))}; : > plain; sleep 600"
    return place.task(script, mechanism="timeslice")


def test_the_trouble_is_known_to_the_next_daemon(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.client()))
    until_running(launcher, key())
    place.until_up()
    kill(server_pid(launcher, "server"))
    assert look(launcher, key()).trouble is not None
    assert look(place.launcher(), key()).trouble is not None


def test_a_server_that_died_while_no_daemon_looked_is_trouble_too(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.client()))
    until_running(launcher, key())
    place.until_up()
    kill(server_pid(launcher, "server"))
    assert look(place.launcher(), key()).trouble is not None


def test_the_end_of_a_control_daemon_is_trouble_for_attempts_that_have_not_connected(
    place: Place, launcher: ProcessLauncher
) -> None:
    """They would find no MPS and run without it and without its limit, with no error."""
    launcher.launch(on_card(place.client(), 1))
    launcher.launch(on_card(place.task("sleep 600"), 2))
    launcher.launch(on_card(plain(place), 3))
    for number in (1, 2, 3):
        until_running(launcher, key(number))
    place.until_up()
    kill(server_pid(launcher, "control"))
    for life in (launcher, place.launcher()):
        found = life.poll([key(1), key(2), key(3)])
        assert [one.trouble for one in found] == [None, CONTROL_GONE, None], "the client's server lives"
    kill(until_running(launcher, key(2)))
    assert isinstance(until_ended(launcher, key(2)), Disrupted), "it had lost its MPS"


def test_a_client_that_started_without_any_mps_process_is_in_trouble(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.client(), 1))
    until_running(launcher, key())
    place.until_up()
    for which in ("control", "server"):
        kill(server_pid(launcher, which))
    launcher.poll([])  # so much for the loss
    launcher._confinements._judged[key()] = 1  # as for one that started after it
    assert look(launcher, key()).trouble == CONTROL_GONE


def test_the_end_of_a_control_daemon_is_no_trouble_for_clients_of_a_living_server(
    place: Place, launcher: ProcessLauncher
) -> None:
    launcher.launch(on_card(place.client()))
    until_running(launcher, key())
    place.until_up()
    kill(server_pid(launcher, "control"))
    assert look(launcher, key()).trouble is None
    assert look(place.launcher(), key()).trouble is None
    kill(server_pid(launcher, "server"))  # it can still be missed
    assert look(launcher, key()).trouble is not None


def test_a_client_that_fails_with_its_server_was_disrupted(place: Place, launcher: ProcessLauncher) -> None:
    """It ends at once by an error that does not mention MPS, before the next poll."""
    launcher.launch(on_card(place.client(until_file(place.folder / "go", code=1))))
    until_running(launcher, key())
    place.until_up()
    pid = server_pid(launcher, "server")
    kill(pid)
    (place.folder / "go").touch()
    until((place.attempts / str(key()) / records.EXIT).exists)
    assert until_ended(launcher, key()) == Disrupted("its MPS server ended")


def test_a_task_that_fails_while_its_server_lives_failed_by_itself(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.client(until_file(place.folder / "go", code=3))))
    until_running(launcher, key())
    (place.folder / "go").touch()
    until((place.attempts / str(key()) / records.EXIT).exists)
    assert until_ended(launcher, key()) == Failed(3)
    kill(server_pid(launcher, "server"))
    launcher.poll([])
    assert look(launcher, key()).outcome == Failed(3)


def test_mps_errors_and_out_of_memory_are_distinguished(place: Place, launcher: ProcessLauncher) -> None:
    failed = "the remote procedural call between the MPS server and the MPS client failed"
    launcher.launch(on_card(place.task(f"echo 'RuntimeError: CUDA error: {failed}' >&2; exit 1"), 1))
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    launcher.launch(on_card(place.task(f"echo '{oom}' >&2; exit 1"), 2))
    assert until_ended(launcher, key(1)) == Disrupted(f"MPS failed it: RuntimeError: CUDA error: {failed}")
    assert isinstance(until_ended(launcher, key(2)), OutOfMemory)


def test_the_server_runs_while_a_task_needs_it_and_stops_afterwards(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(place.client()))
    until_running(launcher, key())
    pids = launcher.sharing_pids()
    launcher.maintain()
    launcher.close()
    later = place.launcher()  # after a restart the launcher learns it from the poll
    look(later, key())
    later.maintain()
    assert later.sharing_pids() == pids
    later.signal(key(), signal.SIGKILL)
    until_ended(later, key())
    later.close()
    assert later.sharing_pids() == frozenset()
    assert all(gone(pid) for pid in pids)


def test_a_refused_order_needs_no_server(place: Place, launcher: ProcessLauncher) -> None:
    launcher.launch(on_card(shell("exit 0", place.folder / "nowhere")))
    until_ended(launcher, key())
    launcher.close()
    assert launcher.sharing_pids() == frozenset()


def test_without_a_confiner_tasks_are_plain_processes(place: Place) -> None:
    launcher = ProcessLauncher(place.attempts, run_as_submitter=False)
    launcher.launch(on_card(place.task("exit 0")))
    assert until_ended(launcher, key()) == Succeeded()
    confinement = look(launcher, key()).confinement
    assert isinstance(confinement, Confinement)
    assert confinement.mechanism == "timeslice"
    assert launcher.sharing_pids() == frozenset()


def groups_in(place: Place) -> AttemptCgroups:
    return AttemptCgroups(Cgroups(2, {"": str(place.folder / "cgroup")}, frozenset()), place.attempts)


def test_the_runner_joins_its_cgroup_before_it_starts_anything(place: Place) -> None:
    """Uses ordinary files: the content of `cgroup.procs` is checked, nothing is limited."""
    groups = groups_in(place)
    (directory,) = groups.create(key()).directories
    Path(directory, "cgroup.procs").touch()
    confiner = GpuConfiner(Sharing(), None, CgroupLimits(_Driver(), groups))
    launcher = ProcessLauncher(place.attempts, run_as_submitter=False, confiner=confiner, groups=groups)
    launcher.launch(on_card(place.task(f"cat {directory}/cgroup.procs; echo"), cap_mib=4096))
    assert until_ended(launcher, key()) == Succeeded()
    assert Path(launcher.files.log_path(key(), "stdout")).read_text() == "0\n"
    found = look(launcher, key()).confinement
    assert found is not None
    assert "cgroup" in {guard.rung for guard in found.guards}


def test_a_cgroup_that_cannot_be_joined_is_a_failure_to_start(place: Place) -> None:
    groups = groups_in(place)
    (directory,) = groups.create(key()).directories
    Path(directory, "cgroup.procs").mkdir()
    confiner = GpuConfiner(Sharing(), None, CgroupLimits(_Driver(), groups))
    launcher = ProcessLauncher(place.attempts, run_as_submitter=False, confiner=confiner, groups=groups)
    launcher.launch(on_card(place.task(": > ran"), cap_mib=4096))
    outcome = until_ended(launcher, key())
    assert isinstance(outcome, Failed)
    assert "cgroup.procs" in outcome.message
    assert not (place.folder / "ran").exists()


def test_the_cgroups_of_ended_attempts_go_and_the_others_stay(place: Place) -> None:
    groups = groups_in(place)
    confiner = GpuConfiner(Sharing(), None, CgroupLimits(_Driver(), groups))
    launcher = ProcessLauncher(place.attempts, run_as_submitter=False, confiner=confiner, groups=groups)
    (own,) = groups.create(key()).directories
    Path(own, "cgroup.procs").touch()
    groups.create(key(7))
    (place.folder / "cgroup" / "other").mkdir()
    launcher.launch(on_card(place.task("sleep 600"), cap_mib=4096))
    until_running(launcher, key())
    launcher.maintain()
    assert groups.existing() == [key()]
    assert (place.folder / "cgroup" / "other").exists()


class _Driver(NvmlLimiter):
    def __init__(self) -> None:
        self.limits: dict[str, int] = {}

    def missing(self) -> str | None:
        return None

    def set_limit(self, gpu: GpuId, cgroup: str, limit_bytes: int) -> None:  # noqa: ARG002
        self.limits[cgroup] = limit_bytes

    def limit(self, gpu: GpuId, cgroup: str) -> int:  # noqa: ARG002
        return self.limits[cgroup]
