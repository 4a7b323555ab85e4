"""The memory limit counts every kind of memory, with and without a cgroup, and does not count what is shared twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from carma.trial.sandbox import SandboxLimits, SandboxResult
from tests.boxes import PATIENCE_S, SandboxVariant, one_at_a_time
from tests.sandbox.programs import MEMORY, Python

LIMITS = SandboxLimits(seconds=PATIENCE_S, memory_mib=96, scratch_mib=80)


@pytest.fixture(autouse=True)
def one_program_at_a_time() -> Iterator[None]:
    """The shared memory of another program would count for one that passes descriptors on."""
    with one_at_a_time("memory"):
        yield


def skip_without_io_uring(ended: SandboxResult) -> None:
    if "no io_uring" in ended.status.stderr:
        pytest.skip("this machine does not allow io_uring")


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_beyond_the_limit_ends_the_run(variant: SandboxVariant, folder: Path, python: Python, kind: str) -> None:
    ended = variant.run("", folder, command=python.holding(kind, 256), limits=LIMITS)
    skip_without_io_uring(ended)
    if "No space left" in ended.status.stderr:  # /dev/shm has the size of the limit
        assert kind in ("shm file", "deleted file")
    else:
        assert ended.status.ended == "memory", ended.status


@pytest.mark.parametrize("kernel_limits", ["no-cgroup"], indirect=True)  # in a cgroup the kernel counts
@pytest.mark.parametrize("kind", MEMORY)
def test_memory_within_the_limit_is_not_counted_twice(
    variant: SandboxVariant, folder: Path, python: Python, kind: str
) -> None:
    limits = SandboxLimits(seconds=PATIENCE_S, memory_mib=384, scratch_mib=320)
    held = python.holding(kind, 192)
    script = held[-1].replace("time.sleep(1000)", "time.sleep(0.5)")
    ended = variant.run("", folder, command=(*held[:-1], script), limits=limits)
    skip_without_io_uring(ended)
    assert (ended.status.ended, ended.status.code) == ("exit", 0), ended.status
    assert "held" in ended.status.stdout
