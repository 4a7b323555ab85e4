"""The users' MPS servers: started, found again, watched, stopped; on real processes with the real names."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carma import procfs
from carma.core.model.values import Owner
from carma.launch import mps, mps_control
from carma.launch.mps import MpsServers, UserMps
from carma.launch.mps_control import Control, MpsFailed, ProcessIdentity, server_environment
from carma.testing.launcher_contract import until
from tests.launch_orders import gone
from tests.mps_program import Program, kill, short_home

ME = Owner(os.geteuid(), os.getegid(), "me")
NOBODY = Owner(65534, 65534, "nobody")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start servers as another user")


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as folder:
        yield folder


@pytest.fixture
def program(home: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program(home / "bin")
    made.install(monkeypatch)
    return made


@pytest.fixture
def servers(home: Path, program: Program) -> MpsServers:  # noqa: ARG001
    return MpsServers(home / "mps", idle_s=0.0)


def server_of(serving: UserMps) -> int:
    (server,) = serving.servers
    return server.pid


def test_the_first_launch_starts_a_server_and_the_second_uses_it(servers: MpsServers, program: Program) -> None:
    first, second = servers.serve(ME), servers.serve(ME)
    assert first is second
    assert program.starts == 1
    assert servers.pids() == {first.daemon.pid, server_of(first)}
    assert not any(gone(pid) for pid in servers.pids())


def test_no_other_user_can_read_its_directory(servers: MpsServers) -> None:
    serving = servers.serve(ME)
    variables = serving.control.client_variables()
    for folder in (variables["CUDA_MPS_PIPE_DIRECTORY"], variables["CUDA_MPS_LOG_DIRECTORY"]):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(servers.directory).st_mode) == 0o700


def test_the_server_has_every_gpu_and_nothing_of_ours(servers: MpsServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("MY_SECRET", "x")
    text = Path(servers.serve(ME).control.directory, "environment").read_text()
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "PATH"} <= names
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "MY_SECRET"} & names


def test_the_server_program_is_found_where_users_do_not_look() -> None:
    assert "/usr/sbin" in server_environment({"PATH": "/home/me/bin"})["PATH"].split(":")
    assert server_environment({"PATH": "/home/me/bin"})["PATH"].startswith("/home/me/bin:")
    assert "/usr/sbin" in server_environment({})["PATH"].split(":")


def test_a_new_daemon_finds_a_running_server(servers: MpsServers, home: Path, program: Program) -> None:
    before = servers.serve(ME)
    later = MpsServers(home / "mps")
    assert later.pids() == servers.pids()
    assert later.serve(ME).name == before.name
    assert program.starts == 1


def test_after_a_restart_of_the_machine_no_process_counts_as_ours(servers: MpsServers, home: Path) -> None:
    name = servers.serve(ME).name
    record = home / "mps" / f"{name}.json"
    kept = json.loads(record.read_bytes())
    record.write_text(json.dumps({**kept, "boot_id": "of another start"}))
    later = MpsServers(home / "mps", idle_s=0.0)
    assert later.pids() == frozenset()
    assert not record.exists()
    later.close(())
    assert not any(gone(one["pid"]) for one in (kept["control"], *kept["servers"]))
    for one in (kept["control"], *kept["servers"]):
        kill(one["pid"])


def test_a_dead_control_daemon_is_replaced_and_its_server_goes_on(servers: MpsServers, program: Program) -> None:
    old = servers.serve(ME)
    kill(old.daemon.pid)
    servers.refresh()
    new = servers.serve(ME)
    assert new.name != old.name
    assert new.control.directory != old.control.directory
    assert program.starts == 2
    assert not gone(server_of(old))
    assert old.losses == []
    assert servers.pids() == {server_of(old), new.daemon.pid, server_of(new)}


def test_a_server_that_died_is_missed_and_the_next_launch_has_another(servers: MpsServers, program: Program) -> None:
    serving = servers.serve(ME)
    before = time.time()
    servers.refresh()
    kill(server_of(serving))
    servers.refresh()
    after = time.time()
    (loss,) = serving.losses
    assert before <= loss.alive_at <= loss.noticed_at <= after
    again = servers.serve(ME)
    assert again is serving
    assert not gone(server_of(again))
    assert program.starts == 1
    servers.refresh()
    assert len(serving.losses) == 1


def test_a_loss_counts_for_attempts_that_ran_between_its_last_sign_of_life_and_its_discovery(
    servers: MpsServers,
) -> None:
    serving = servers.serve(ME)
    serving.losses.append(mps.ServerLoss(alive_at=100.0, noticed_at=101.0))
    assert serving.lost_between(50.0, 100.5)
    assert serving.lost_between(50.0, 200.0)
    assert not serving.lost_between(50.0, 99.0)  # it was seen after this one had ended
    assert not serving.lost_between(102.0, 200.0)  # this one began after it was missed
    assert servers.get("0.99") is None


def test_a_server_that_dies_while_no_daemon_looks_is_missed_by_the_next(servers: MpsServers, home: Path) -> None:
    serving = servers.serve(ME)
    kill(server_of(serving))
    later = MpsServers(home / "mps")
    found = later.get(serving.name)
    assert found is not None
    assert found.lost_between(1.0, 2.0)


def test_a_server_that_the_control_daemon_starts_by_itself_is_found(
    servers: MpsServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "SEARCH_S", 0.0)
    serving = servers.serve(ME)
    kill(server_of(serving))
    servers.refresh()
    assert serving.servers == {}
    new = serving.control.start_server()
    servers.refresh()
    assert list(serving.servers) == [new]


def test_a_program_that_refuses_is_quoted_and_not_asked_again_at_once(servers: MpsServers, program: Program) -> None:
    program.behave("refuse")
    for _ in range(2):
        with pytest.raises(MpsFailed, match='"An instance of'):
            servers.serve(ME)
    assert program.starts == 1
    assert os.listdir(servers.directory) == []


def test_a_failed_start_is_retried_after_a_pause(
    servers: MpsServers, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "RETRY_S", 0.0)
    program.behave("refuse")
    with pytest.raises(MpsFailed):
        servers.serve(ME)
    program.behave("refuse", always=False)
    assert servers.serve(ME).servers


def test_a_program_that_hangs_is_given_up(
    servers: MpsServers, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_control, "START_LIMIT_S", 0.2)
    program.behave("hang")
    with pytest.raises(MpsFailed, match="did not return"):
        servers.serve(ME)


def test_a_control_daemon_whose_servers_end_is_a_failure(
    servers: MpsServers, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_control, "SERVER_LIMIT_S", 3.0)
    program.behave("no-servers")
    with pytest.raises(MpsFailed, match="status 1"):
        servers.serve(ME)
    servers.close(())
    assert servers.pids() == frozenset()
    assert os.listdir(servers.directory) == []


def test_without_the_program_the_reason_is_given(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps_control, "_SYSTEM_PATH", str(home))
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(MpsFailed, match="nvidia-cuda-mps-control is not installed"):
        MpsServers(home / "mps").serve(ME)


def test_a_path_that_no_socket_can_have_is_refused_in_words(home: Path, program: Program) -> None:  # noqa: ARG001
    with pytest.raises(MpsFailed, match="too long"):
        MpsServers(home / ("x" * 100)).serve(ME)


def test_a_server_that_no_attempt_needs_is_stopped(servers: MpsServers) -> None:
    serving = servers.serve(ME)
    pids = servers.pids()
    servers.stop_idle({serving.name})
    assert servers.pids() == pids

    def over() -> bool:
        servers.stop_idle(())
        return not os.listdir(servers.directory)

    until(over)
    assert all(gone(pid) for pid in pids)


def test_an_idle_server_runs_on_for_a_while(home: Path, program: Program) -> None:  # noqa: ARG001
    servers = MpsServers(home / "mps", idle_s=3600.0)
    servers.serve(ME)
    servers.stop_idle(())
    assert len(servers.pids()) == 2


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "QUIT_S", 0.1)
    monkeypatch.setattr(mps, "TERM_S", 0.1)


@pytest.mark.usefixtures("hasty")
def test_a_launch_during_a_stop_gets_a_new_server(servers: MpsServers, program: Program) -> None:
    program.behave("deaf")
    old = servers.serve(ME)
    servers.stop_idle(())
    assert old.stopping is not None
    assert servers.serve(ME).name != old.name
    servers.close((), limit_s=60.0)
    assert servers.pids() == frozenset()


@pytest.mark.usefixtures("hasty")
def test_what_does_not_quit_is_killed(servers: MpsServers, program: Program) -> None:
    program.behave("deaf")
    servers.serve(ME)
    pids = servers.pids()
    servers.close((), limit_s=60.0)
    assert all(gone(pid) for pid in pids)


def test_the_end_of_the_daemon_leaves_what_something_runs_under(servers: MpsServers) -> None:
    serving = servers.serve(ME)
    servers.close({serving.name})
    assert len(servers.pids()) == 2
    servers.close(())
    assert servers.pids() == frozenset()


def test_a_pid_file_is_not_believed(home: Path) -> None:
    control = Control(str(home), ME, "true")
    path = home / "nvidia-cuda-mps-control.pid"
    path.write_text(f"{os.getpid()}\n")  # lives, and is no control daemon
    assert control.find() is None
    for text in ("", "x", "-1", "99999999999999999999", "\0"):
        path.write_text(text)
        assert control.find() is None
    path.unlink()
    os.mkfifo(path)  # no process writes: a blocking read would never end
    assert control.find() is None


def test_only_regular_files_of_the_user_are_read_from_the_users_directory(home: Path) -> None:
    log = home / "control.log"
    log.write_text("secret\n")
    (home / "link").symlink_to(log)
    (home / "folder").symlink_to(home)
    assert mps_control.read_foreign(str(home), "control.log", ME.uid) == "secret\n"
    assert mps_control.read_foreign(str(home), "control.log", ME.uid + 1) == "", "as a hard link to another user's file"
    assert mps_control.read_foreign(str(home), "link", ME.uid) == ""
    assert mps_control.read_foreign(str(home / "folder"), "control.log", ME.uid) == ""


def test_a_process_of_another_user_does_not_count_as_its_server(servers: MpsServers) -> None:
    serving = servers.serve(ME)
    stranger = Control(serving.control.directory, Owner(ME.uid + 1, ME.gid, "other"), serving.control.program)
    assert serving.control.find() == serving.daemon
    assert stranger.find() is None
    assert stranger.children(serving.daemon) == ()


def test_identity_is_more_than_a_pid() -> None:
    me = procfs.process(os.getpid())
    assert me is not None
    assert ProcessIdentity(me.pid, me.start_ticks).alive
    assert not ProcessIdentity(me.pid, me.start_ticks - 1).alive


@as_root
def test_each_user_has_a_server_of_their_own(home: Path, program: Program) -> None:  # noqa: ARG001
    servers = MpsServers(home / "mps", open_to_users=True, idle_s=0.0)
    ours, theirs = servers.serve(ME), servers.serve(NOBODY)
    assert ours.name != theirs.name
    for pid in (theirs.daemon.pid, server_of(theirs)):
        assert mps_control.real_uid(pid) == NOBODY.uid
    status = os.stat(theirs.control.directory)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (NOBODY.uid, 0o700)
    assert stat.S_IMODE(os.stat(servers.directory).st_mode) == 0o711
    assert os.stat(home / "mps" / f"{theirs.name}.json").st_uid == 0
    servers.close(())
    assert servers.pids() == frozenset()
