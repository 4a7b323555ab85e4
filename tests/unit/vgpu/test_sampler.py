"""The samples of virtual GPUs: exact means since the last sample, processes, and the gaps of faults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from carma import procfs
from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import activity, engine_share
from carma.vgpu import virtual_server as world
from carma.vgpu.device import Device, allocate, join
from carma.vgpu.device_state import VirtualProcess
from carma.vgpu.sampler import VirtualSampler
from tests import virtual_faults as faults

A, B = Demand(0.6, 0.3, 0.3), Demand(0.5, 0.2, 0.2)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return world.create(str(tmp_path / "vgpu"), gpus=2, memory_mib=40960, speed=1000.0)


def load(device: Device, gpu: int, demand: Demand, memory_mib: int, wanted_s: float | None = None) -> None:
    """This process uses the GPU."""
    with device.changing() as seen:
        allocate(seen, join(seen, [gpu], demand, wanted_s, "python"), memory_mib)


def test_an_idle_gpu_shows_nothing_and_idle_power(device: Device) -> None:
    first = VirtualSampler(device).sample(5.0)[0]
    assert (first.memory_used_mib, first.activity.sm_active, first.gpu_util, first.processes) == (0, 0.0, 0.0, ())
    assert first.power_w == 55.0


def test_a_shared_gpu_shows_the_sharing_models_activity(device: Device) -> None:
    load(device, 0, A, 3000)
    with device.changing() as seen:
        parent = procfs.process(os.getppid())
        assert parent is not None
        ticks = parent.start_ticks
        seen.processes.append(VirtualProcess(pid=parent.pid, start_ticks=ticks, gpus=[0], memory_mib=2000, demand=B))
    sampler = VirtualSampler(device)
    for sample in (sampler.sample(1.0)[0], sampler.sample(2.0)[0]):  # the moment, then a mean over a span
        expected = activity([A, B])
        assert sample.activity.sm_active == pytest.approx(expected.sm_active)
        assert sample.activity.sm_occupancy == pytest.approx(expected.sm_occupancy)
        assert sample.activity.dram_active == pytest.approx(expected.dram_active)
        assert sample.memory_used_mib == 5000
        assert sample.gpu_util is not None
        assert sample.gpu_util > 0.9  # the coarse figure says "full" long before the GPU is
        assert sample.processes is not None
        assert [process.memory_mib for process in sample.processes] == [3000, 2000]
        assert sum(process.sm_active or 0.0 for process in sample.processes) == pytest.approx(expected.sm_active)


def test_a_sample_is_the_mean_since_the_one_before(device: Device) -> None:
    sampler = VirtualSampler(device)
    began_s = device.read().at_s
    first = sampler.sample(1.0)[0]
    load(device, 0, A, 100, wanted_s=3.0)  # ends after 3 ms, so no sample is taken while it runs
    while not device.read().processes[0].done:
        pass
    after = sampler.sample(2.0)[0]
    span_s = device.read().at_s - began_s
    assert after.activity.sm_active is not None
    assert after.activity.sm_active * span_s >= 0.6 * 3.0 * 0.999
    assert after.power_w is not None
    assert after.power_w > 55.0
    assert after.energy_j is not None
    assert after.energy_j > (first.energy_j or 0.0)


def test_the_first_sample_of_a_repaired_gpu_shows_the_moment(device: Device) -> None:
    load(device, 1, A, 100)
    sampler = VirtualSampler(device)
    faults.inject(device, "lost", 1)
    assert sampler.sample(1.0)[1].fault
    faults.clear(device)
    assert sampler.sample(2.0)[1].activity.sm_active == pytest.approx(0.6)


def test_vanished_metrics_and_processes_are_none_and_come_back(device: Device) -> None:
    load(device, 1, A, 100)
    sampler = VirtualSampler(device)
    faults.inject(device, "metrics", 1)
    faults.inject(device, "processes", 1)
    sample = sampler.sample(1.0)[1]
    assert (sample.activity.sm_active, sample.activity.sm_occupancy, sample.activity.dram_active, sample.gpu_util) == (
        None,
        None,
        None,
        None,
    )
    assert (sample.power_w, sample.energy_j, sample.processes, sample.fault) == (None, None, None, None)
    assert sample.memory_used_mib == 100
    assert sampler.sample(2.0)[0].activity.sm_active == 0.0  # the other GPU answers
    faults.clear(device, 1, "metrics")
    mended = sampler.sample(3.0)[1]
    assert mended.activity.sm_active == pytest.approx(0.6)
    assert mended.processes is None
    faults.clear(device)
    assert sampler.sample(4.0)[1].processes is not None


def test_a_directory_that_vanishes_is_a_fault_on_every_gpu(device: Device) -> None:
    sampler = VirtualSampler(device)
    shutil.rmtree(device.directory)
    samples = sampler.sample(1.0)
    assert len(samples) == 2
    assert all(sample.fault is not None and "does not answer" in sample.fault for sample in samples)


def test_fault_commands_say_what_is_wrong(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.main(["--dir", device.directory, "lost", "--gpu", "9"]) == 4
    assert "there is no virtual GPU 9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        faults.main(["--dir", device.directory, "lost"])


def test_any_kernel_at_all_is_as_the_sharing_model_takes_it_and_tensor_cores_are_not_modelled(device: Device) -> None:
    load(device, 0, A, 3000)
    sampler = VirtualSampler(device)
    for sample in (sampler.sample(1.0)[0], sampler.sample(2.0)[0]):
        assert sample.activity.gr_active == pytest.approx(engine_share(A))
        assert (sample.gpu_util or 0.0) > engine_share(A), "the coarse figure misleads"
        assert sample.activity.tensor_active is None
    can = sampler.gpus()[0].capabilities
    assert ("gr_active" in can.metrics, "tensor_active" in can.metrics) == (True, False)


def test_a_memory_sample_shows_who_holds_what_right_now(device: Device) -> None:
    sampler = VirtualSampler(device)
    first, second = (gpu.id for gpu in sampler.gpus())
    load(device, 1, A, 3000)
    idle, held = sampler.sample_memory([first, second], 4.0)
    assert (idle.memory_used_mib, idle.processes) == (0, ())
    assert (held.gpu, held.at, held.memory_used_mib) == (second, 4.0, 3000)
    assert [(process.pid, process.memory_mib) for process in held.processes or ()] == [(os.getpid(), 3000)]


def test_a_memory_sample_does_not_shorten_the_span_of_the_next_sample(device: Device) -> None:
    sampler = VirtualSampler(device)
    began_s = device.read().at_s
    sampler.sample(1.0)
    load(device, 0, A, 100, wanted_s=3.0)
    while not device.read().processes[0].done:
        pass
    sampler.sample_memory([sampler.gpus()[0].id], 1.5)  # after the work: a mean from here on would be 0
    after = sampler.sample(2.0)[0]
    span_s = device.read().at_s - began_s
    assert (after.activity.sm_active or 0.0) * span_s >= 0.6 * 3.0 * 0.999


def test_a_memory_sample_leaves_out_the_processes_that_a_fault_hides(device: Device) -> None:
    load(device, 0, A, 3000)
    faults.inject(device, "processes", 0)
    sampler = VirtualSampler(device)
    (observed,) = sampler.sample_memory([sampler.gpus()[0].id], 1.0)
    assert (observed.memory_used_mib, observed.processes, observed.fault) == (3000, None, None)


def test_a_world_that_is_gone_is_a_fault_at_a_memory_sample_too(device: Device) -> None:
    sampler = VirtualSampler(device)
    shutil.rmtree(device.directory)
    (observed,) = sampler.sample_memory([sampler.gpus()[0].id], 1.0)
    assert "driver does not answer" in (observed.fault or "")
