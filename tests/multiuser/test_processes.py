"""A task's process is its submitter's and nothing more; others cannot reach it, its runner or the daemon."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Daemon, until
from tests.multiuser.people import PATH, Person
from tests.multiuser.serving import (
    ask_as,
    attempt_folder,
    ended,
    output_of,
    pid_of,
    resting_root_daemon,
    root_daemon,
    runner_of,
    running,
    shell,
    submit,
)

PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206


# What a task is.


def test_a_task_has_exactly_its_submitters_user_and_groups(alice: Person) -> None:
    """Root's own groups, which may open devices and sockets, are not inherited."""
    with resting_root_daemon() as daemon:
        daemon.popen_options = {"extra_groups": [0, 1, 2, 6, 44]}
        daemon.start()
        lines = output_of(alice, daemon, "grep -E '^(Uid|Gid|Groups|CapPrm|CapEff|CapAmb|CapInh):' /proc/self/status")
    found = {line.split(":")[0]: line.split()[1:] for line in lines.splitlines()}
    assert found["Uid"] == [str(alice.uid)] * 4
    assert found["Gid"] == [str(alice.gid)] * 4
    assert [int(group) for group in found["Groups"]] == alice.groups
    assert {int(found[name][0], 16) for name in ("CapPrm", "CapEff", "CapAmb", "CapInh")} == {0}


def test_a_task_inherits_no_open_file_of_the_daemon(alice: Person) -> None:
    """Neither the daemon's own files nor those that were open when root started it."""
    with resting_root_daemon() as daemon, tempfile.TemporaryFile() as secret:
        daemon.popen_options = {"pass_fds": [secret.fileno()]}
        daemon.start()
        listed = output_of(alice, daemon, "for fd in /proc/$$/fd/*; do readlink $fd; done")
    names = listed.split("\n")
    assert len([name for name in names if name]) <= 4, listed  # 0, 1, 2 and the directory that is listed
    assert not [
        name for name in names if "carma.db" in name or "socket:" in name or "memfd" in name or "(deleted)" in name
    ]


def test_a_task_gets_nothing_of_the_daemons_environment(alice: Person) -> None:
    mark = f"mark{secrets.token_hex(8)}"
    with resting_root_daemon() as daemon:
        daemon.environ |= {"ROOTS_TOKEN": mark, "NOTIFY_SOCKET": f"@{mark}", "LD_LIBRARY_PATH": f"/nonexistent/{mark}"}
        daemon.start()
        told = output_of(alice, daemon, "env; tr '\\0' '\\n' < /proc/self/environ; cat /proc/$PPID/environ 2>&1")
    assert "CARMA_TASK_ID" in told
    assert mark not in told


def test_a_task_runs_with_the_umask_of_its_submission(daemon: Daemon, alice: Person) -> None:
    assert output_of(alice, daemon, "umask", umask=0o027).strip() == "0027"


def test_a_task_is_not_spared_when_memory_runs_out(alice: Person) -> None:
    """A daemon under systemd is (OOMScoreAdjust); its tasks neither are nor can make themselves so."""
    with root_daemon(own_program=True) as daemon:
        assert daemon.process is not None
        try:
            Path(f"/proc/{daemon.process.pid}/oom_score_adj").write_text("-500")
        except OSError as error:
            pytest.skip(f"oom_score_adj cannot be lowered here: {error}")
        script = "cat /proc/self/oom_score_adj; echo -500 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
        assert output_of(alice, daemon, script).split() == ["0", "0"]


def test_a_task_has_no_terminal_and_a_session_of_its_own(daemon: Daemon, alice: Person) -> None:
    fields = output_of(alice, daemon, "cat /proc/$$/stat; exec 3< /dev/tty && echo terminal").rpartition(")")[2].split()
    session, terminal = int(fields[3]), int(fields[4])
    assert daemon.process is not None
    assert session != os.getsid(daemon.process.pid)
    assert terminal == 0
    assert "terminal" not in fields


# Others' processes.


def kill(number: int) -> Callable[[int], object]:
    return lambda pid: os.kill(pid, number)


def trace(request: int) -> Callable[[int], object]:
    def attack(pid: int) -> object:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        libc.ptrace.restype = ctypes.c_long
        if libc.ptrace(request, pid, None, None) < 0:
            raise OSError(ctypes.get_errno(), "ptrace")
        return None

    return attack


PROCESS_ATTACKS: dict[str, Callable[[int], object]] = {
    "kill": kill(signal.SIGKILL),
    "stop": kill(signal.SIGSTOP),
    "hang_up": kill(signal.SIGHUP),
    "attach": trace(PTRACE_ATTACH),
    "seize": trace(PTRACE_SEIZE),
    "read_environment": lambda pid: Path(f"/proc/{pid}/environ").read_bytes(),
    "read_memory": lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
    "write_memory": lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDWR),
    "list_files": lambda pid: os.listdir(f"/proc/{pid}/fd"),
    "open_a_file": lambda pid: os.open(f"/proc/{pid}/fd/1", os.O_RDONLY),
    "enter_its_directory": lambda pid: os.chdir(f"/proc/{pid}/cwd"),
    "enter_its_root": lambda pid: os.listdir(f"/proc/{pid}/root"),
    "read_its_stack": lambda pid: Path(f"/proc/{pid}/stack").read_bytes(),
    "read_its_maps": lambda pid: Path(f"/proc/{pid}/maps").read_bytes(),
    "spare_it_from_oom": lambda pid: Path(f"/proc/{pid}/oom_score_adj").write_text("1000"),
}
PROCESSES: dict[str, Callable[[Daemon, int], int]] = {
    "task": pid_of,
    "runner": runner_of,
    "daemon": lambda daemon, _: daemon.client.server().pid,
}


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
@pytest.mark.parametrize("attack", PROCESS_ATTACKS.values(), ids=PROCESS_ATTACKS.keys())
def test_another_users_process_cannot_be_reached(
    daemon: Daemon,
    alice: Person,
    bob: Person,
    attack: Callable[[int], object],
    process: Callable[[Daemon, int], int],
) -> None:
    task = submit(bob, daemon, "sleep", "600")
    running(daemon, task)
    pid = process(daemon, task)
    with pytest.raises(OSError) as met:
        alice.act(lambda: attack(pid))
    assert met.value.errno in (errno.EPERM, errno.EACCES)
    assert daemon.client.task(task).state == "running"


def test_a_user_cannot_kill_or_read_the_runner_of_the_own_task(daemon: Daemon, alice: Person) -> None:
    """It is the one that writes down how the task ended."""
    task = submit(alice, daemon, "sleep", "600")
    runner = runner_of(daemon, task)
    for attack in PROCESS_ATTACKS.values():
        with pytest.raises(OSError) as met:
            alice.act(lambda attack=attack: attack(runner))  # type: ignore[misc]
        assert met.value.errno in (errno.EPERM, errno.EACCES)
    assert daemon.client.task(task).state == "running"


def test_a_task_that_kills_everything_it_can_affects_no_other_user(daemon: Daemon, alice: Person, bob: Person) -> None:
    other = submit(bob, daemon, "sleep", "600")
    pid = pid_of(daemon, other)
    task = shell(alice, daemon, "kill -9 -1; exit 7")
    view = ended(daemon, task)
    assert (view.outcome or {})["kind"] == "failed"  # the runner has seen how it ended
    assert daemon.answers()
    assert pid_of(daemon, other) == pid


# Being taken for a part of another user's task.


def test_nothing_that_a_process_says_makes_it_a_part_of_another_users_task(
    daemon: Daemon, alice: Person, bob: Person
) -> None:
    """When runner and command are killed, what has the attempt's token in its environment is ended. Bob's process
    carries all that can be known of Alice's attempt, and lives on; Alice's own is ended."""
    noted = alice.home / f"pid-{secrets.token_hex(4)}"
    task = shell(alice, daemon, f"sleep 600 & echo $! > {noted}; wait")
    until(lambda: noted.exists() and noted.read_text().endswith("\n"), "the task has a child")
    pid, runner, left = pid_of(daemon, task), runner_of(daemon, task), int(noted.read_text())
    known = {"CARMA_TASK_ID": str(task), "CARMA_ATTEMPT": "1", "CARMA_LAUNCH": f"{task}.1", "PATH": PATH}
    with bob.background(lambda: os.execve("/bin/sleep", ["sleep", "600"], known)) as forger:
        until(lambda: b"CARMA_LAUNCH" in Path(f"/proc/{forger}/environ").read_bytes(), "the forger runs")
        for victim in (runner, pid):
            os.kill(victim, signal.SIGKILL)
        view = ended(daemon, task)
        assert (view.outcome or {})["kind"] == "lost"
        assert Path(f"/proc/{forger}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    until(lambda: not Path(f"/proc/{left}").exists(), "what the task left is ended")


def test_the_token_of_a_submission_is_not_the_token_of_its_task(daemon: Daemon, alice: Person) -> None:
    forged = {"PATH": PATH, "CARMA_LAUNCH": "forged", "CARMA_TASK_ID": "1", "CARMA_ATTEMPT": "9"}
    task = shell(alice, daemon, 'echo "$CARMA_LAUNCH $CARMA_TASK_ID $CARMA_ATTEMPT"', environment=forged)
    ended(daemon, task)
    token, known_task, attempt = ask_as(alice, daemon, "GET", f"/tasks/{task}/logs").body.decode().split()
    assert (known_task, attempt) == (str(task), "1")
    assert token != "forged"


def test_the_token_of_another_users_task_cannot_be_read(daemon: Daemon, alice: Person, bob: Person) -> None:
    task = shell(bob, daemon, "sleep 600")
    pid = pid_of(daemon, task)
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (token,) = [entry.split(b"=")[1] for entry in entries if entry.startswith(b"CARMA_LAUNCH=")]
    folder, processes = attempt_folder(daemon, task), (pid, runner_of(daemon, task), daemon.client.server().pid)

    def search() -> list[bytes]:
        found = []
        places = [
            f"/proc/{each}/{name}" for each in processes for name in ("environ", "cmdline", "status", "stat", "maps")
        ]
        for name in ("order.json", "started.json", "claim.json", "exit.json", "runner.log", "stdout.log"):
            places.append(str(folder / name))
        for place in places:
            with contextlib.suppress(OSError):
                found.append(Path(place).read_bytes())
        return found

    assert token not in b"".join(alice.act(search))
