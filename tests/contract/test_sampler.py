"""Virtual GPUs, and NVML and DCGM by a script, keep the contract of samplers. tests/gpu has the real NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pynvml import NVML_ERROR_GPU_IS_LOST

from carma.monitor.dcgm import DcgmThread, HostEngine
from carma.monitor.nvml import NvmlSampler
from carma.testing.sampler_contract import SamplerContract, SamplerSubject
from carma.vgpu import virtual_server as world
from carma.vgpu.sampler import VirtualSampler
from tests import scripted_dcgm
from tests import virtual_faults as faults
from tests.scripted_dcgm import ScriptedDcgm
from tests.scripted_nvml import MIB, Card, ScriptedNvml


def virtual(directory: Path) -> SamplerSubject:
    device = world.create(str(directory / "vgpu"), gpus=3, memory_mib=40960, speed=50.0)
    return SamplerSubject(VirtualSampler(device), lambda index: faults.inject(device, "lost", index))


def scripted_nvml(_directory: Path) -> SamplerSubject:
    """Two cards and one that is split into MIG instances; time moves with every look at the clock."""
    instances = [Card("MIG-1", total_mib=16_384, reserved_mib=0), Card("MIG-2", total_mib=16_384, reserved_mib=0)]
    nvml = ScriptedNvml(Card("GPU-a", used_mib=500, compute=[(1, 500 * MIB)]), Card("GPU-b", gpm=None))
    nvml.cards.append(Card("GPU-c", mig=instances))

    def monotonic() -> float:
        nvml.pass_s(0.2)
        return nvml.now

    def lose(index: int) -> None:
        [*nvml.cards, *instances][index].errors["*"] = NVML_ERROR_GPU_IS_LOST

    return SamplerSubject(NvmlSampler(nvml, monotonic=monotonic), lose)


def scripted_ampere(_directory: Path) -> SamplerSubject:
    """A card that DCGM reads and one that only the driver's per-process utilisation tells something of."""
    dcgm = ScriptedDcgm(scripted_dcgm.Card("GPU-a"))
    feed = DcgmThread(HostEngine(lambda: dcgm, wall=lambda: dcgm.now), period_s=0.01, first_s=60.0)
    nvml = ScriptedNvml(Card("GPU-a", gpm=None), Card("GPU-b", gpm=None, process_util=[(5, 1, 40), (5, 2, 60)]))

    def lose(index: int) -> None:
        nvml.cards[index].errors["*"] = NVML_ERROR_GPU_IS_LOST

    return SamplerSubject(NvmlSampler(nvml, monotonic=nvml.monotonic, dcgm=feed), lose)


def virtual_without_counters(directory: Path) -> SamplerSubject:
    device = world.create(str(directory / "vgpu"), gpus=2, memory_mib=40960, speed=50.0)
    return SamplerSubject(VirtualSampler(device, measured=False), lambda index: faults.inject(device, "lost", index))


def scripted_geforce(_directory: Path) -> SamplerSubject:
    """A card without counters of SM activity, and one whose counters a setting disables."""
    nvml = ScriptedNvml(Card("GPU-a", gpm=None, power_limit_mw=350_000), Card("GPU-b", power_limit_mw=700_000))

    def lose(index: int) -> None:
        nvml.cards[index].errors["*"] = NVML_ERROR_GPU_IS_LOST

    return SamplerSubject(NvmlSampler(nvml, monotonic=nvml.monotonic, measured=False), lose)


SUBJECTS: dict[str, Callable[[Path], SamplerSubject]] = {
    "virtual": virtual,
    "nvml-scripted": scripted_nvml,
    "nvml-with-dcgm": scripted_ampere,
    "virtual-without-counters": virtual_without_counters,
    "nvml-without-counters": scripted_geforce,
}


class TestSamplers(SamplerContract):
    @pytest.fixture(params=SUBJECTS)
    def subject(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SamplerSubject]:
        made = SUBJECTS[request.param](tmp_path)
        yield made
        made.sampler.close()
