"""Pids across pid namespaces: the kernel's NSpid lines, and processes that stay foreign."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from carma.monitor.nvml import NvmlSampler
from carma.monitor.process_listing import has_card_open, pids_of, same_pid, translation
from tests.scripted_nvml import MIB, Card, ScriptedNvml

# A child in a pid namespace of its own, which waits for its input to end. Needs leave to make namespaces.
NAMESPACED = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "cat")


def process(proc: Path, name: str | int, *nspid: int, card: str | None = None) -> None:
    """A process of a fake /proc: its pids from the outermost namespace on, and its open files."""
    (proc / str(name) / "fd").mkdir(parents=True)
    pids = "\t".join(str(pid) for pid in nspid)
    (proc / str(name) / "status").write_text(f"Name:\tpython\nTgid:\t{nspid[0]}\nNSpid:\t{pids}\nThreads:\t1\n")
    if card is not None:
        (proc / str(name) / "fd" / "7").symlink_to(card)


@pytest.fixture
def inside(tmp_path: Path) -> tuple[Path, Path]:
    """A container: its /proc and the host's. This process has pid 20 here and 4020 there."""
    ours, host = tmp_path / "proc", tmp_path / "host"
    process(ours, "self", 20)
    process(ours, 31, 31, card="/dev/nvidia0")
    process(ours, 4032, 4032, card="/dev/null")
    process(host, "self", 4020, 20)
    process(host, 31, 31)
    process(host, 4031, 4031, 31)
    process(host, 4032, 4032, 32)
    process(host, 4033, 4033, 33, 1)  # in a container within ours
    process(host, 5000, 5000)  # not in ours
    return ours, host


def test_the_kernel_tells_the_pids_of_a_process() -> None:
    assert pids_of(os.getpid())[0] == os.getpid()
    assert pids_of("self")[0] == os.getpid()
    assert pids_of(2**22 + 1) == ()


def test_a_process_in_a_namespace_within_ours_is_known_by_our_pid_first() -> None:
    try:
        child = subprocess.Popen(NAMESPACED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(b"ready\n")
        child.stdin.flush()
        if child.stdout.readline() != b"ready\n":
            pytest.skip("this user may not make a namespace")
        listed = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        if not listed.exists():
            pytest.skip("this kernel does not list a process's children")
        (inner,) = listed.read_text().split()
        assert pids_of(int(inner)) == (int(inner), 1)
    finally:
        child.communicate()


def test_without_the_hosts_proc_pids_are_taken_as_they_are(inside: tuple[Path, Path]) -> None:
    ours, _ = inside
    assert translation({}, ours) is same_pid
    assert translation({"HOST_PROC": str(ours)}, ours) is same_pid
    assert translation({"HOST_PROC": "/nowhere"}, ours) is same_pid


def test_on_the_host_itself_there_is_nothing_to_translate(inside: tuple[Path, Path]) -> None:
    _, host = inside
    assert translation({"HOST_PROC": str(host)}, host) is same_pid


def test_a_hosts_pid_becomes_ours(inside: tuple[Path, Path]) -> None:
    ours, host = inside
    own_pid = translation({"HOST_PROC": str(host)}, ours)
    assert (own_pid(4031), own_pid(4033)) == (31, 33)
    assert own_pid(4032) == 32  # though a process of ours has that number: it has no card open


def test_a_pid_that_the_driver_gave_in_our_namespace_stays(inside: tuple[Path, Path]) -> None:
    ours, host = inside
    assert translation({"HOST_PROC": str(host)}, ours)(31) == 31


def test_a_process_that_is_not_in_our_namespace_gets_no_pid_of_ours(inside: tuple[Path, Path]) -> None:
    ours, host = inside
    own_pid = translation({"HOST_PROC": str(host)}, ours)
    assert own_pid(5000) < 0
    assert own_pid(77777) < 0  # ended in between


def test_only_a_card_counts_as_a_card(inside: tuple[Path, Path]) -> None:
    ours, _ = inside
    assert has_card_open(31, ours)
    assert not has_card_open(4032, ours)
    assert not has_card_open(99, ours)


def test_the_sampler_shows_our_pids_and_the_names_that_go_with_them() -> None:
    nvml = ScriptedNvml(Card("GPU-a", compute=[(4031, MIB), (4033, 2 * MIB)]))
    sampler = NvmlSampler(
        nvml, monotonic=nvml.monotonic, process_name=lambda pid: f"process-{pid}", own_pid=lambda pid: pid - 4000
    )
    (sample,) = sampler.sample(0.0)
    seen = [(process.pid, process.memory_mib, process.name) for process in sample.processes or ()]
    assert seen == [(31, 1, "process-31"), (33, 2, "process-33")]
