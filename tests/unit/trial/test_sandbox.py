"""The box around a trial run: what it keeps in and out, and what ends it. Real namespaces, real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from carma.trial.box.mounts import mount_points, nearest_below
from carma.trial.box.special_directories import INSIDE, KEEP, OUT
from carma.trial.box.usage import PASSED_SCANS, UsageMeter
from carma.trial.sandbox import SandboxLimits
from tests.boxes import (
    PATIENCE_S,
    VARIANTS,
    SandboxVariant,
    folder_for_all,
    marker,
    own,
    processes_with,
    variant_or_skip,
    wait_until,
)
from tests.harness import python_path

folder = pytest.fixture(folder_for_all)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[SandboxVariant]:
    made = variant_or_skip(request.param)
    yield made
    made.sandbox.close()


def test_what_is_deleted_written_and_renamed_stays_as_it_was_outside(variant: SandboxVariant, folder: Path) -> None:
    work = folder / "work"
    for name in ("deleted", "changed", "renamed", "outputs/checkpoint"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("before")
        own(work / name, variant.owner)
    own(work / "outputs", variant.owner)
    ended = variant.run(
        "set -e; rm deleted; echo after > changed; mv renamed elsewhere; chmod 600 changed; "
        "rm -rf outputs; mkdir outputs; echo new > outputs/checkpoint; ln -s x link; cat outputs/checkpoint",
        folder,
    )
    assert (ended.status.ended, ended.status.code) == ("exit", 0), ended.status
    assert ended.status.stdout == "new\n"
    assert sorted(path.name for path in work.iterdir()) == ["changed", "deleted", "outputs", "renamed"]
    assert {(work / name).read_text() for name in ("deleted", "changed", "renamed")} == {"before"}
    assert (work / "outputs" / "checkpoint").read_text() == "before"
    assert (work / "changed").stat().st_mode & 0o777 == 0o644


def test_temporary_files_and_the_home_directory_are_copies_too(variant: SandboxVariant, folder: Path) -> None:
    name = f"carma-{marker()}"
    ended = variant.run(f"echo x > /tmp/{name} && echo x > /var/tmp/{name} && cat /tmp/{name}", folder)
    assert ended.status.stdout == "x\n", ended.status
    assert not Path("/tmp", name).exists()
    assert not Path("/var/tmp", name).exists()


def test_the_command_is_its_owner_and_can_gain_nothing(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run("id -u; id -g; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status", folder)
    uid, gid, *status = ended.status.stdout.split("\n")[:-1]
    assert (int(uid), int(gid)) == (variant.owner.uid, variant.owner.gid)
    figures = dict(line.split(":\t") for line in status)
    assert figures["NoNewPrivs"] == "1"
    allowed = 0b11011 if variant.owner.uid == 0 else 0  # over files, all of them copies
    assert int(figures["CapEff"], 16) & ~allowed == 0


def test_not_even_root_changes_the_machine(folder: Path) -> None:
    variant = variant_or_skip("self")
    ended = variant.run(
        "for file in /proc/sys/kernel/domainname /sys/kernel/mm/transparent_hugepage/enabled; do "
        "(echo x > $file) 2>/dev/null && echo wrote $file; done; "
        "mknod device b 8 0 2>/dev/null && echo made; mount -t tmpfs none /mnt 2>/dev/null && echo mounted; echo end",
        folder,
    )
    assert ended.status.stdout == "end\n"


def test_devices_are_a_handful_and_no_gpu(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run(
        "ls /dev; echo x > /dev/null && head -c 4 /dev/zero | wc -c; echo y > /dev/shm/y && cat /dev/shm/y", folder
    )
    expected = {
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    }
    lines = ended.status.stdout.split()
    assert lines[-2:] == ["4", "y"], ended.status
    assert set(lines[:-2]) <= expected


def test_it_sees_no_processes_but_its_own(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run("for d in /proc/[0-9]*; do echo ${d#/proc/}; done", folder)
    assert set(ended.status.stdout.split()) == {"1", "2"}


def test_a_listening_socket_of_the_host_is_out_of_reach_and_loopback_works(
    variant: SandboxVariant, folder: Path
) -> None:
    if not Path("/bin/bash").exists():
        pytest.skip("bash opens the connection")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&1 && echo connected; cat /proc/net/route | wc -l"
        ended = variant.run("", folder, command=("/bin/bash", "-c", script))
    assert "refused" in ended.status.stdout, ended.status  # and not "unreachable": the interface is up
    assert "connected" not in ended.status.stdout
    assert ended.status.stdout.split()[-1] in ("0", "1")  # at most the heading: no way out


def test_a_socket_file_of_the_host_leads_nowhere(folder: Path) -> None:
    variant = variant_or_skip("self")
    path = folder / "work" / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        script = f"import socket; s = socket.socket(socket.AF_UNIX); print(s.connect_ex({str(path)!r}))"
        ended = variant.run("", folder, command=(sys.executable, "-c", script))
        with socket.socket(socket.AF_UNIX) as client:
            assert client.connect_ex(str(path)) == 0
    assert ended.status.code == 0, ended.status
    assert int(ended.status.stdout) != 0


def test_run_holds_nothing_of_the_host(variant: SandboxVariant, folder: Path) -> None:
    assert variant.run("ls /run", folder).status.stdout == "carma\n"


def test_what_goes_inside_can_be_read_wherever_it_lies(variant: SandboxVariant, folder: Path) -> None:
    hidden = folder / "inside"
    hidden.mkdir(mode=0o700)
    (hidden / "part.py").write_text("ours")
    (hidden / "part.py").chmod(0o600)
    if variant.name == "ordinary":  # who has no rights but the own
        own(hidden / "part.py", variant.owner)
        own(hidden, variant.owner)
    ended = variant.run(f"cat {INSIDE}/part.py", folder)
    assert ended.status.stdout == "ours"


def test_what_is_kept_is_there_the_next_time(variant: SandboxVariant, folder: Path) -> None:
    keep = folder / "keep"
    keep.mkdir(mode=0o700)
    own(keep, variant.owner)
    assert variant.run(f"echo built > {KEEP}/shim", folder, keep=keep).status.code == 0
    assert (keep / "shim").stat().st_uid == variant.owner.uid
    assert variant.run(f"cat {KEEP}/shim", folder, keep=keep).status.stdout == "built\n"


def test_the_awaited_file_ends_the_run_and_comes_out(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run(
        f"echo 2 > {OUT}/steps; echo events > {OUT}/events.bin; "
        f"""echo '{{"format": 1, "stop": "steps"}}' > {OUT}/part; mv {OUT}/part {OUT}/report.json; sleep {marker()}""",
        folder,
    )
    assert ended.status.ended == "awaited"
    assert ended.files == {"report.json": b'{"format": 1, "stop": "steps"}\n', "events.bin": b"events\n"}
    assert ended.status.notes == {"steps": "2"}


def test_a_lesser_report_does_not_end_the_run(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run(f"""echo '{{"stop": "end"}}' > {OUT}/report.json; sleep 0.3; exit 3""", folder)
    assert (ended.status.ended, ended.status.code) == ("exit", 3)
    assert ended.files == {"report.json": b'{"stop": "end"}\n'}


@pytest.mark.parametrize("trick", ["ln -s /etc/passwd {}", "mkfifo {}", "mkdir {}", "head -c 2000 /dev/zero > {}"])
def test_only_plain_files_of_a_bounded_size_come_out(variant: SandboxVariant, folder: Path, trick: str) -> None:
    ended = variant.run(trick.format(f"{OUT}/report.json"), folder)
    assert (ended.status.ended, ended.status.code) == ("exit", 0), ended.status
    assert ended.files == {}
    assert ended.status.files["report.json"] == (-2 if "head" in trick else -1)


def test_the_last_of_much_output_is_kept(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run("yes | head -c 30000000; echo last; echo why >&2", folder)
    assert (ended.status.ended, ended.status.code) == ("exit", 0)
    assert ended.status.stdout.endswith("y\nlast\n")
    assert 1_000 < len(ended.status.stdout) <= 16 * 1024
    assert ended.status.stderr == "why\n"


def test_what_it_left_running_ends_with_it(variant: SandboxVariant, folder: Path) -> None:
    word = marker()
    ended = variant.run(f"setsid sleep {word} >/dev/null 2>&1 & exit 0", folder)
    assert (ended.status.ended, ended.status.code) == ("exit", 0)
    wait_until(lambda: not processes_with(word), "a process outlived its box")


def test_the_time_limit_ends_it(variant: SandboxVariant, folder: Path) -> None:
    word = marker()
    ended = variant.run(f"trap '' TERM INT; sleep {word}", folder, limits=SandboxLimits(seconds=1))
    assert ended.status.ended == "time"
    wait_until(lambda: not processes_with(word), "a process outlived its limit")


def test_the_memory_limit_ends_it(variant: SandboxVariant, folder: Path) -> None:
    limits = SandboxLimits(seconds=PATIENCE_S, memory_mib=64, scratch_mib=32)
    assert variant.run("x=xxxxxxxx; while :; do x=$x$x; done", folder, limits=limits).status.ended == "memory"


def test_files_that_it_writes_count_as_memory(variant: SandboxVariant, folder: Path) -> None:
    limits = SandboxLimits(seconds=PATIENCE_S, memory_mib=64, scratch_mib=48)
    script = "head -c 40000000 /dev/zero > /dev/shm/a; head -c 40000000 /dev/zero > b; sleep 600"
    assert variant.run(script, folder, limits=limits).status.ended == "memory"


def test_a_full_scratch_space_is_an_error_of_the_program(variant: SandboxVariant, folder: Path) -> None:
    limits = SandboxLimits(seconds=PATIENCE_S, memory_mib=512, scratch_mib=16)
    ended = variant.run("head -c 40000000 /dev/zero > big", folder, limits=limits)
    assert ended.status.code != 0
    assert "No space left" in ended.status.stderr


def test_the_number_of_processes_is_limited(variant: SandboxVariant, folder: Path) -> None:
    word = marker()
    limits = SandboxLimits(seconds=PATIENCE_S, processes=20)
    script = f"i=0; while [ $i -lt 100 ]; do sleep {word} & i=$((i+1)); done; wait"
    assert variant.run(script, folder, limits=limits).status.ended == "processes"
    wait_until(lambda: not processes_with(word), "a process outlived its box")


def test_a_command_that_is_not_there(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run("", folder, command=("no-such-program",))
    assert (ended.status.ended, ended.status.why) == ("not_started", "no-such-program was not found in PATH")


def test_a_directory_that_is_not_there(variant: SandboxVariant, folder: Path) -> None:
    (folder / "work").rmdir()
    ended = variant.run("true", folder)
    assert ended.status.ended == "not_started"
    assert str(folder / "work") in ended.status.why


def test_the_signal_that_ended_the_command_is_reported(variant: SandboxVariant, folder: Path) -> None:
    ended = variant.run("kill -SEGV $$", folder)
    assert (ended.status.ended, ended.status.code) == ("exit", -signal.SIGSEGV)


def test_closing_ends_what_runs_and_starts_nothing_more(variant: SandboxVariant, folder: Path) -> None:
    word = marker()
    endings = []
    runner = threading.Thread(target=lambda: endings.append(variant.run(f"sleep {word}", folder).status.ended))
    runner.start()
    wait_until(lambda: bool(processes_with(word)), "it never started")
    variant.sandbox.close()
    runner.join(PATIENCE_S)
    assert endings == ["abandoned"]
    wait_until(lambda: not processes_with(word), "a process outlived the sandbox")
    assert variant.run("true", folder).status.ended == "abandoned"


def test_a_daemon_that_is_killed_leaves_nothing(folder: Path) -> None:
    variant_or_skip("self")
    word = marker()
    program = f"""
from pathlib import Path
from tests.boxes import SandboxVariant
SandboxVariant('self').run('sleep {word}', Path({str(folder)!r}))
"""
    root = str(Path(__file__).parents[3])
    daemon = subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, "PYTHONPATH": python_path(root)}
    )
    try:
        wait_until(lambda: bool(processes_with(word)), "it never started")
    finally:
        daemon.kill()
        daemon.wait()
    wait_until(lambda: not processes_with(word), "a process outlived the daemon")


def test_mount_points_are_read_with_their_odd_names() -> None:
    text = (
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 27 0:25 / /mnt/a\\040b rw,nosuid shared:1 - tmpfs none rw\n"
        "31 27 0:25 / /net rw - autofs none rw\n"
        "32 30 0:26 / /mnt/a\\040b/c rw - nfs4 host:/x rw\n"
        "33 27 0:27 / /mnt/a\\040b rw - tmpfs again rw\n"
    )
    assert mount_points(text) == ["/", "/mnt/a b", "/mnt/a b/c"]


def test_only_the_nearest_mounts_below_a_folder() -> None:
    points = ["/", "/home", "/home/alice", "/homestead", "/srv/x"]
    assert nearest_below("/", points) == ["/home", "/homestead", "/srv/x"]
    assert nearest_below("/home", points) == ["/home/alice"]
    assert nearest_below("/home/alice", points) == []


def test_shared_memory_that_may_be_of_other_programs_is_named_when_the_limit_is_reached() -> None:
    meter = UsageMeter([])
    figures = {"meminfo": b"Shmem: 204800 kB"}
    meter._read = lambda name: figures.get(name, b"")  # type: ignore[method-assign]
    meter._passed_scans, meter._next_descriptors, meter._shmem_before = PASSED_SCANS, inf, 100 << 20
    assert meter.exceeded(1 << 22, 150 << 20) == ""
    meter._next_exact = 0.0
    assert meter.exceeded(1 << 22, 50 << 20) == "memory"
    assert meter.unattributed_bytes == 100 << 20
