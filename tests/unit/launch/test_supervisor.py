"""The start of a command: arguments, directory, umask, logs, identity, signals; and the runner's records."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from carma.core.model.outcome import Failed, Succeeded
from carma.core.model.values import Owner
from carma.launch import attempt_records as records
from carma.launch import supervisor
from carma.launch.command_process import PERMISSION, Channel, be_killable, become
from carma.launch.process import ProcessLauncher
from carma.testing.launcher_contract import key, order_of, until, until_ended, until_running
from tests.launch_orders import shell, spec_of, tidy

NOBODY = Owner(65534, 65534, "nobody")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start tasks as another user")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[ProcessLauncher]:
    yield ProcessLauncher(tmp_path / "attempts", run_as_submitter=os.geteuid() == 0)
    tidy(tmp_path / "attempts")


def own_log(launcher: ProcessLauncher, which: Literal["stdout", "stderr"], task: int = 1) -> Path:
    return Path(launcher.files.log_path(key(task), which))


def output(launcher: ProcessLauncher, task: int = 1) -> str:
    return own_log(launcher, "stdout", task).read_text()


def failure(launcher: ProcessLauncher, task: int = 1) -> Failed:
    outcome = until_ended(launcher, key(task))
    assert isinstance(outcome, Failed)
    return outcome


def test_a_command_that_does_not_exist_is_127(launcher: ProcessLauncher) -> None:
    launcher.launch(order_of(spec_of("no-such-command-anywhere")))
    outcome = failure(launcher)
    assert outcome.code == 127
    assert "no-such-command-anywhere: not found in PATH" in outcome.message


def test_a_path_that_does_not_exist_is_127(launcher: ProcessLauncher) -> None:
    launcher.launch(order_of(spec_of("./train.sh")))
    assert failure(launcher) == Failed(127, "cannot start ./train.sh: there is no such file")


def test_a_file_that_is_not_executable_is_126(launcher: ProcessLauncher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    launcher.launch(order_of(spec_of("./train.py", directory=tmp_path)))
    outcome = failure(launcher)
    assert outcome.code == 126
    assert "Permission denied" in outcome.message


def test_a_missing_working_directory_is_126(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell("exit 0", tmp_path / "gone")))
    assert failure(launcher) == Failed(
        126, f"cannot enter the working directory {tmp_path}/gone: No such file or directory"
    )


def test_nul_in_an_argument_is_refused_in_words(launcher: ProcessLauncher) -> None:
    launcher.launch(order_of(spec_of("echo", "a\0b")))
    outcome = failure(launcher)
    assert outcome.code == 126
    assert "null byte" in outcome.message


def test_nul_in_the_directory_is_refused_in_words(launcher: ProcessLauncher) -> None:
    launcher.launch(order_of(shell("exit 0", "/tmp\0/x")))
    assert "null byte" in failure(launcher).message


def test_arguments_never_go_through_a_shell(launcher: ProcessLauncher, tmp_path: Path) -> None:
    arguments = ["$(touch hit)", "; touch hit", "`touch hit`", "a b", "*", "", "'\"", "\n", "-n", "ü", "\udcff"]
    show = "import sys, os; os.write(1, b'|'.join(os.fsencode(a) for a in sys.argv[1:]))"
    launcher.launch(order_of(spec_of(sys.executable, "-X", "utf8", "-c", show, *arguments, directory=tmp_path)))
    assert until_ended(launcher, key()) == Succeeded()
    written = own_log(launcher, "stdout").read_bytes()
    assert written == b"|".join(os.fsencode(argument) for argument in arguments)
    assert not (tmp_path / "hit").exists()


def test_directory_and_umask_are_the_submitters(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell("pwd; : > made", tmp_path, umask=0o027)))
    assert until_ended(launcher, key()) == Succeeded()
    assert output(launcher) == f"{tmp_path}\n"
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o640


def test_the_command_inherits_no_files(launcher: ProcessLauncher) -> None:
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        launcher.launch(order_of(shell("ls /proc/$$/fd")))
        assert until_ended(launcher, key()) == Succeeded()
    finally:
        os.close(leak)
    assert output(launcher).split() == ["0", "1", "2"]


def test_the_command_inherits_no_ignored_or_blocked_signals(launcher: ProcessLauncher) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        launcher.launch(order_of(spec_of("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")))
        assert until_ended(launcher, key()) == Succeeded()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    _, blocked, _, ignored = output(launcher).split()
    reserved = 0b11 << 31  # 32 and 33 belong to the C library and cannot be set by programs
    assert (int(blocked, 16) & ~reserved, int(ignored, 16) & ~reserved) == (0, 0)


def test_logs_are_kept_apart_and_standard_input_is_empty(launcher: ProcessLauncher) -> None:
    launcher.launch(order_of(shell("cat; echo to-out; echo to-err >&2; exit 2")))
    assert failure(launcher) == Failed(2, "to-err")
    assert output(launcher) == "to-out\n"
    assert own_log(launcher, "stderr").read_text() == "to-err\n"


def test_an_output_file_takes_both(launcher: ProcessLauncher, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    launcher.launch(order_of(shell("echo a; echo b >&2; echo c", tmp_path, output="logs/%x-%j-%t.out", name="a/b"), 12))
    assert until_ended(launcher, key(12)) == Succeeded()
    assert not own_log(launcher, "stdout", 12).exists()
    assert (tmp_path / "logs" / "a_b-12-1.out").read_text() == "a\nb\nc\n"


def test_no_directory_is_made_for_an_output_file(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.launch(order_of(shell("exit 0", tmp_path, output="logs/%j/out")))
    assert failure(launcher) == Failed(126, f"cannot open {tmp_path}/logs/1/out for output: No such file or directory")
    assert not (tmp_path / "logs").exists()


def linked(directory: Path) -> Path:
    """A directory that every user may write to, with a link `log` to a file."""
    here = directory / "shared"
    here.mkdir()
    here.chmod(0o777)
    (here / "real").write_text("")
    (here / "real").chmod(0o666)
    (here / "log").symlink_to("real")
    return here


@as_root
def test_a_link_of_roots_in_place_of_the_output_file_is_refused(launcher: ProcessLauncher, tmp_path: Path) -> None:
    here = linked(tmp_path)
    launcher.launch(order_of(shell("echo over", here, output="log")))
    assert failure(launcher) == Failed(
        126, f"cannot open {here}/log for output: it is a symbolic link, which is not followed for root"
    )
    assert (here / "real").read_text() == ""


def test_a_users_link_is_followed_and_the_last_line_of_the_output_is_the_failure_message(
    launcher: ProcessLauncher,
) -> None:
    owner = NOBODY if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)  # where the user can go, unlike below a directory of pytest's
        here = linked(Path(place))
        launcher.launch(order_of(shell("echo over >&2; exit 3", here, output="log"), owner=owner))
        assert failure(launcher) == Failed(3, "over")
        assert (here / "real").read_text() == "over\n"


@as_root
def test_output_that_the_submitter_may_write_but_not_read_is_not_in_the_failure_message(
    launcher: ProcessLauncher,
) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        here = linked(Path(place))
        (here / "real").chmod(0o622)
        launcher.launch(order_of(shell("echo over >&2; exit 3", here, output="real"), owner=NOBODY))
        assert failure(launcher) == Failed(3)
        assert (here / "real").read_text() == "over\n"


def test_the_failure_message_is_from_the_file_that_the_attempt_opened_whatever_has_its_name_and_inode_now(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    """A new file often gets the inode number of the file that was removed just before."""
    script = "echo mine >&2; rm log; echo secret > log; : > ready; while [ ! -e go ]; do sleep 0.02; done; exit 3"
    launcher.launch(order_of(shell(script, tmp_path, output="log")))
    until((tmp_path / "ready").exists)
    (tmp_path / "go").touch()
    assert failure(launcher) == Failed(3, "mine")


def test_what_an_earlier_attempt_wrote_into_the_same_file_is_not_in_the_failure_message(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("earlier\n")
    launcher.launch(order_of(shell("exit 3", tmp_path, output="log")))
    assert failure(launcher) == Failed(3)


def test_a_pipe_in_place_of_the_output_file_is_refused_and_not_waited_for(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "log")
    launcher.launch(order_of(shell("echo over", tmp_path, output="log")))
    assert failure(launcher).code == 126


def test_the_environment_is_in_no_file_and_all_files_are_closed_to_others(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    spec = shell("echo out; while [ ! -e go ]; do sleep 0.02; done", tmp_path)
    spec.environment["SECRET"] = "correct-horse"
    launcher.launch(order_of(spec))
    until_running(launcher, key())
    files = list((tmp_path / "attempts" / str(key())).iterdir())
    assert {"claim.json", "started.json", "stdout.log"} <= {file.name for file in files}
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"correct-horse" not in file.read_bytes()
    (tmp_path / "go").touch()
    until_ended(launcher, key())


def test_the_runner_keeps_the_output_below_its_limit_and_its_end(tmp_path: Path) -> None:
    launcher = ProcessLauncher(tmp_path / "attempts", run_as_submitter=False, max_output_mib=1)
    launcher.launch(order_of(shell("yes | head -c 6000000; echo the end; yes | head -c 3000000 >&2; exit 3")))
    assert isinstance(until_ended(launcher, key()), Failed)
    for log in (own_log(launcher, "stdout"), own_log(launcher, "stderr")):
        assert log.stat().st_blocks * 512 <= 1 << 20
    assert output(launcher).endswith("y\nthe end\n")
    assert "MiB of this output were removed" in output(launcher)


def test_an_exit_record_is_written_also_when_no_process_and_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "none left")

    attempt = supervisor.SupervisedAttempt(f"{tmp_path}/", {"grace_s": 0.0})
    attempt.readers = {"stdout": (0, 0)}
    monkeypatch.setattr(attempt, "start", lambda: None)
    monkeypatch.setattr(attempt, "wait", lambda: 3 << 8)
    monkeypatch.setattr(attempt, "end_leftovers", lambda _signalled: None)
    monkeypatch.setattr(os, "fork", refused)
    assert attempt.run()
    assert (records.read(f"{tmp_path}/exit.json") or {})["code"] == 3


def test_a_released_attempt_keeps_its_exit_record_and_its_output_and_nothing_else(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    launcher.launch(order_of(shell("echo out")))
    assert until_ended(launcher, key()) == Succeeded()
    launcher.release(key())
    assert sorted(os.listdir(tmp_path / "attempts" / str(key()))) == ["exit.json", "stdout.log"]
    launcher.launch(order_of(shell("echo twice")))  # by a daemon on an older copy of the database
    assert until_ended(launcher, key()) == Succeeded()
    assert output(launcher) == "out\n"


def test_the_tails_of_output_leave_the_exit_record_when_the_attempt_is_released(
    launcher: ProcessLauncher, tmp_path: Path
) -> None:
    launcher.launch(order_of(shell("echo private >&2; exit 3", tmp_path, output="log")))
    assert failure(launcher) == Failed(3, "private")
    launcher.release(key())
    assert os.listdir(tmp_path / "attempts" / str(key())) == ["exit.json"]
    assert b"private" not in (tmp_path / "attempts" / str(key()) / "exit.json").read_bytes()


@as_root
def test_root_starts_the_command_as_the_submitter(launcher: ProcessLauncher) -> None:
    script = 'id -u; id -g; id -G; echo "$USER $LOGNAME"; echo kept > /dev/stderr'
    launcher.launch(order_of(shell(script), owner=NOBODY))
    assert until_ended(launcher, key()) == Succeeded()
    uid, gid, groups, names = output(launcher).splitlines()
    assert (uid, gid, names) == ("65534", "65534", "nobody nobody")
    assert "0" not in groups.split()
    assert own_log(launcher, "stderr").read_text() == "kept\n"


@as_root
def test_root_writes_no_log_where_the_submitter_could_not(launcher: ProcessLauncher, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    launcher.launch(order_of(shell("exit 0", output=str(tmp_path / "log")), owner=NOBODY))
    outcome = failure(launcher)
    assert outcome.code == 126
    assert not (tmp_path / "log").exists()


@as_root
def test_root_enters_no_directory_that_the_submitter_could_not(launcher: ProcessLauncher, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    launcher.launch(order_of(shell("exit 0", closed), owner=NOBODY))
    assert "Permission denied" in failure(launcher).message


def test_a_warning_signal_reaches_the_command(launcher: ProcessLauncher, tmp_path: Path) -> None:
    script = "trap 'exit 9' USR1; : > ready; while :; do sleep 0.02; done"
    launcher.launch(order_of(shell(script, tmp_path)))
    until_running(launcher, key())
    until((tmp_path / "ready").exists)
    launcher.signal(key(), signal.SIGUSR1)
    assert failure(launcher).code == 9


@pytest.mark.parametrize("permitted", [True, False])
def test_a_command_runs_only_with_the_permission_of_a_living_runner(tmp_path: Path, permitted: bool) -> None:
    command = ["/bin/sh", "-c", f": > {tmp_path}/ran; exit 7"]
    order = {"command": command, "directory": "/", "environment": {}, "umask": 0o022, "stdout": None, "stderr": None}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nothing = os.open("/dev/null", os.O_WRONLY)
    pid = os.fork()
    if pid == 0:
        ours.close()
        become(order, {"stdout": nothing, "stderr": nothing}, Channel(theirs))
    theirs.close()
    os.close(nothing)
    while "readers" not in json.loads(ours.recv(4096)):
        continue
    if permitted:
        ours.send(PERMISSION)
    ours.close()  # as by the death of the runner
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (7 if permitted else 0)
    assert (tmp_path / "ran").exists() is permitted


def test_a_full_disk_delays_the_record_and_does_not_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = os.fsync, [errno.ENOSPC, errno.EDQUOT]

    def fsync(fd: int) -> None:
        if failures:
            raise OSError(failures.pop(), "full")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert records.write_patiently(str(tmp_path / "exit.json"), {"code": 3}, 60.0)
    assert json.loads((tmp_path / "exit.json").read_text()) == {"code": 3}


def test_the_wait_for_space_is_bounded_and_a_missing_directory_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not records.write_patiently(str(tmp_path / "gone" / "exit.json"), {}, 3600.0)
    monkeypatch.setattr(records, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert not records.write_patiently(str(tmp_path / "exit.json"), {}, 0.1)


def test_the_space_of_the_exit_record_is_taken_in_advance(tmp_path: Path) -> None:
    path = str(tmp_path / "exit.json")
    records.reserve(path)
    assert os.path.getsize(path + ".tmp") >= records.RESERVED_BYTES
    records.write(path, {"code": 1})
    assert records.read(path) == {"code": 1}
    assert os.listdir(tmp_path) == ["exit.json"]


def test_a_record_is_created_once(tmp_path: Path) -> None:
    path = str(tmp_path / "claim.json")
    assert records.create_once(path, {"pid": 1})
    assert not records.create_once(path, {"pid": 2})
    assert records.read(path) == {"pid": 1}
    assert os.listdir(tmp_path) == ["claim.json"]


@pytest.mark.parametrize(("inherited", "then"), [("-500\n", "0"), ("0\n", "0\n"), ("300\n", "300\n"), ("?\n", "?\n")])
def test_what_spares_the_daemon_when_memory_runs_out_is_not_handed_down(
    tmp_path: Path, inherited: str, then: str
) -> None:
    path = tmp_path / "oom_score_adj"
    path.write_text(inherited)
    be_killable(str(path))
    assert path.read_text() == then
    be_killable(str(tmp_path / "none"))  # a kernel without it


def test_a_lease_of_the_submitter_does_not_delay_the_next_runner(tmp_path: Path) -> None:
    """The files may exist from a runner that died. An open that waits succeeds after the kernel's limit."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = []
    try:
        for name in (records.STEPS, records.LOGS["stdout"]):
            held.append(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600))
            fcntl.fcntl(held[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
        order = {"count_steps": True, "stdout": None, "stderr": "named", "max_output_bytes": 0}
        attempt = supervisor.SupervisedAttempt(f"{tmp_path}/", order)
        attempt.make_step_file()
        assert attempt.step_file is None
        with pytest.raises(BlockingIOError):
            attempt.own_logs()
    finally:
        for fd in held:
            os.close(fd)
        signal.signal(signal.SIGIO, before)
