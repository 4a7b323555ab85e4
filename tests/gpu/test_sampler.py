"""The samplers' contract against this machine's own NVML, and a process with a CUDA context as the driver shows it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carma.core.model.values import GpuSample
from carma.errors import NoGpus
from carma.monitor.nvml import open_nvml
from carma.testing.sampler_contract import SamplerContract, SamplerSubject

LIMIT_S = 180.0
HELD_MIB = 512
HOLDER = Path(__file__).with_name("cuda_holder.py")


@pytest.fixture
def subject() -> Iterator[SamplerSubject]:
    try:
        sampler = open_nvml()
    except NoGpus as error:
        pytest.skip(str(error))
    yield SamplerSubject(sampler)
    sampler.close()


class TestRealGpus(SamplerContract):
    """The contract, with the fixture `subject` of this module."""


@pytest.fixture
def holder(subject: SamplerSubject) -> Iterator[subprocess.Popen[str]]:
    """A process that holds memory on a GPU and writes to it all the time, through the CUDA driver alone."""
    if not any(gpu.capabilities.processes for gpu in subject.sampler.gpus()):
        pytest.skip("this driver does not list processes")
    command = [sys.executable, str(HOLDER), str(HELD_MIB)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("holding"):
        process.kill()
        process.communicate()
        pytest.skip(f"CUDA cannot be used here: {line.strip()}")
    yield process
    process.kill()
    process.communicate()


def eventually(look: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < until
        time.sleep(0.2)


def held_mib(samples: tuple[GpuSample, ...], pid: int) -> int:
    return sum(use.memory_mib or 0 for sample in samples for use in sample.processes or () if use.pid == pid)


def test_a_process_is_seen_with_its_memory_and_gone_after_its_end(
    subject: SamplerSubject, holder: subprocess.Popen[str]
) -> None:
    gpus = [gpu.id for gpu in subject.sampler.gpus()]
    eventually(lambda: held_mib(subject.sampler.sample_memory(gpus, time.time()), holder.pid) >= HELD_MIB)
    eventually(lambda: held_mib(subject.sampler.sample(time.time()), holder.pid) >= HELD_MIB)
    holder.kill()
    holder.wait()
    eventually(lambda: held_mib(subject.sampler.sample_memory(gpus, time.time()), holder.pid) == 0)


def test_work_shows_in_the_activity_of_its_gpu(subject: SamplerSubject, holder: subprocess.Popen[str]) -> None:
    def busy() -> bool:
        found = [sample for sample in subject.sampler.sample(time.time()) if held_mib((sample,), holder.pid)]
        return any((sample.activity.sm_active or 0.0) > 0.0 for sample in found)

    if not any("sm_active" in gpu.capabilities.metrics for gpu in subject.sampler.gpus()):
        pytest.skip("this driver gives no SM activity")
    eventually(busy)
