"""One suite for every Sampler: virtual GPUs, and NVML by a script. tests/gpu runs it against the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from msgspec.structs import asdict
from pynvml import NVML_ERROR_GPU_IS_LOST

from carma.core.model.values import NO_ACTIVITY, Gpu, GpuId, GpuSample
from carma.core.ports import Sampler
from carma.monitor.dcgm import HostEngine
from carma.monitor.dcgm_thread import DcgmFeed
from carma.monitor.nvml import NvmlSampler
from carma.vgpu import fault_injection as faults
from carma.vgpu import virtual_server as world
from carma.vgpu.sampler import VirtualSampler
from tests import scripted_dcgm
from tests.scripted_dcgm import ScriptedDcgm
from tests.scripted_nvml import MIB, Card, ScriptedNvml

AT_S = 1_700_000_000.0


class Subject(NamedTuple):
    """A sampler, and where it can be done the means to break the GPU of an index (None: it cannot)."""

    sampler: Sampler
    lose: Callable[[int], None] | None = None


def virtual(directory: Path) -> Subject:
    device = world.create(str(directory / "vgpu"), gpus=3, memory_mib=40960, speed=50.0)
    return Subject(VirtualSampler(device), lambda index: faults.inject(device, "lost", index))


def scripted_nvml(_directory: Path) -> Subject:
    """Two cards and one that is split into MIG instances; time moves with every look at the clock."""
    instances = [Card("MIG-1", total_mib=16_384, reserved_mib=0), Card("MIG-2", total_mib=16_384, reserved_mib=0)]
    nvml = ScriptedNvml(Card("GPU-a", used_mib=500, compute=[(1, 500 * MIB)]), Card("GPU-b", gpm=None))
    nvml.cards.append(Card("GPU-c", mig=instances))

    def monotonic() -> float:
        nvml.pass_s(0.2)
        return nvml.now

    def lose(index: int) -> None:
        [*nvml.cards, *instances][index].errors["*"] = NVML_ERROR_GPU_IS_LOST

    return Subject(NvmlSampler(nvml, monotonic=monotonic), lose)


def scripted_ampere(_directory: Path) -> Subject:
    """A card that DCGM reads and one that only the driver's per-process utilisation tells something of."""
    dcgm = ScriptedDcgm(scripted_dcgm.Card("GPU-a"))
    feed = DcgmFeed(HostEngine(lambda: dcgm, wall=lambda: dcgm.now), period_s=0.01, first_s=60.0)
    nvml = ScriptedNvml(Card("GPU-a", gpm=None), Card("GPU-b", gpm=None, process_util=[(5, 1, 40), (5, 2, 60)]))

    def lose(index: int) -> None:
        nvml.cards[index].errors["*"] = NVML_ERROR_GPU_IS_LOST

    return Subject(NvmlSampler(nvml, monotonic=nvml.monotonic, dcgm=feed), lose)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "virtual": virtual,
    "nvml-scripted": scripted_nvml,
    "nvml-with-dcgm": scripted_ampere,
}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    made = SUBJECTS[request.param](tmp_path)
    yield made
    made.sampler.close()


def test_gpus_are_told_apart_and_stay_the_same(subject: Subject) -> None:
    gpus = subject.sampler.gpus()
    assert gpus
    assert len({gpu.id for gpu in gpus}) == len(gpus)
    assert len({gpu.index for gpu in gpus}) == len(gpus)
    assert all(gpu.memory_mib > 0 and gpu.name for gpu in gpus)
    assert subject.sampler.gpus() == gpus


def test_there_is_one_sample_for_each_gpu_in_order_with_the_time_that_was_given(subject: Subject) -> None:
    samples = subject.sampler.sample(AT_S)
    assert [sample.gpu for sample in samples] == [gpu.id for gpu in subject.sampler.gpus()]
    assert {sample.at for sample in samples} == {AT_S}


def test_every_figure_is_in_its_range_or_absent(subject: Subject) -> None:
    for at in (AT_S, AT_S + 1, AT_S + 2):
        for gpu, sample in zip(subject.sampler.gpus(), subject.sampler.sample(at), strict=True):
            check_ranges(gpu, sample)


def check_ranges(gpu: Gpu, sample: GpuSample) -> None:
    shares = asdict(sample.activity)
    for share in (*shares.values(), sample.gpu_util):
        assert share is None or 0.0 <= share <= 1.0
    assert sample.memory_used_mib is None or sample.memory_used_mib >= 0
    assert sample.power_w is None or 0.0 <= sample.power_w < 5000.0
    for process in sample.processes or ():
        assert process.pid > 0
        assert process.attempt is None  # who it belongs to is not the sampler's to say
        assert process.memory_mib is None or process.memory_mib >= 0
    given = gpu.capabilities
    assert all(metric in given.metrics for metric, share in shares.items() if share is not None)
    assert given.power or sample.power_w is None
    assert given.energy or sample.energy_j is None
    assert given.processes or sample.processes is None


def test_every_gpu_names_the_source_of_its_activity(subject: Subject) -> None:
    for gpu in subject.sampler.gpus():
        can = gpu.capabilities
        assert can.source in ("gpm", "dcgm", "processes", "nvml", "virtual")
        assert ("sm_active" in can.metrics) == (can.source != "nvml")  # coarse utilisation never stands for SM activity
        if can.source == "processes":
            assert can.metrics == ("sm_active",)


def test_a_glance_shows_memory_and_processes_of_the_gpus_that_it_is_asked_about(subject: Subject) -> None:
    gpus = subject.sampler.gpus()
    wanted = [gpu.id for gpu in reversed(gpus)]
    glanced = subject.sampler.glance(wanted, AT_S)
    assert [sample.gpu for sample in glanced] == wanted
    for gpu, sample in zip(reversed(gpus), glanced, strict=True):
        check_ranges(gpu, sample)
        assert (sample.at, sample.fault) == (AT_S, None)
        assert sample.memory_used_mib is not None
        assert (sample.processes is not None) == gpu.capabilities.processes
        assert (sample.activity, sample.gpu_util) == (NO_ACTIVITY, None)
        assert (sample.power_w, sample.energy_j) == (None, None)
    assert subject.sampler.glance([], AT_S) == ()


def test_a_glance_sees_the_same_processes_as_a_sample(subject: Subject) -> None:
    sampled = subject.sampler.sample(AT_S)
    glanced = subject.sampler.glance([sample.gpu for sample in sampled], AT_S)
    for sample, glance in zip(sampled, glanced, strict=True):
        assert {process.pid for process in sample.processes or ()} == {
            process.pid for process in glance.processes or ()
        }


def test_a_glance_at_a_gpu_that_nobody_knows_is_a_fault(subject: Subject) -> None:
    (unknown,) = subject.sampler.glance([GpuId("GPU-of-another-machine")], AT_S)
    assert unknown.fault
    assert (unknown.gpu, unknown.memory_used_mib) == ("GPU-of-another-machine", None)


def test_energy_is_a_counter_that_never_falls(subject: Subject) -> None:
    seen = [subject.sampler.sample(AT_S + step) for step in range(4)]
    for earlier, later in pairwise(seen):
        for before, after in zip(earlier, later, strict=True):
            if before.energy_j is not None and after.energy_j is not None:
                assert after.energy_j >= before.energy_j


def test_samples_can_be_written_and_read_again(subject: Subject) -> None:
    samples = subject.sampler.sample(AT_S)
    assert msgspec.json.decode(msgspec.json.encode(samples), type=tuple[GpuSample, ...]) == samples


def test_a_lost_gpu_is_a_fault_without_figures_and_the_others_still_answer(subject: Subject) -> None:
    if subject.lose is None:
        pytest.skip("this sampler's GPUs cannot be broken on purpose")
    gpus = subject.sampler.gpus()
    subject.sampler.sample(AT_S)
    subject.lose(gpus[-1].index)
    *others, lost = subject.sampler.sample(AT_S + 1)
    assert lost.gpu == gpus[-1].id
    assert lost.fault
    assert (lost.activity, lost.memory_used_mib, lost.processes) == (NO_ACTIVITY, None, None)
    assert all(other.fault is None and other.memory_used_mib is not None for other in others)
    assert subject.sampler.gpus() == gpus
    (glanced,) = subject.sampler.glance([lost.gpu], AT_S + 1)
    assert glanced.fault
    assert (glanced.memory_used_mib, glanced.processes) == (None, None)


def test_closing_twice_does_no_harm(subject: Subject) -> None:
    subject.sampler.close()
    subject.sampler.close()
