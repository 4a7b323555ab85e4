"""The sampler over a scripted NVML: its figures, the missing ones, and the ones that it must not invent."""

from __future__ import annotations

import os

import pynvml
import pytest

from carma.core.model.values import ACTIVITY_METRICS, Activity, GpuSample, ProcessUse
from carma.monitor.gpm import ENGINE_S
from carma.monitor.nvml import NvmlSampler
from carma.monitor.query_intervals import ENERGY_S
from tests.scripted_nvml import MIB, NOT_AVAILABLE, Card, ScriptedNvml


def sampler_over(nvml: ScriptedNvml) -> NvmlSampler:
    return NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=lambda pid: f"process-{pid}")


def only(samples: tuple[GpuSample, ...]) -> GpuSample:
    assert len(samples) == 1
    return samples[0]


def test_a_hopper_card_gives_everything() -> None:
    nvml = ScriptedNvml(Card("GPU-a", used_mib=5541, compute=[(408, 1644 * MIB)]))
    sampler = sampler_over(nvml)
    (gpu,) = sampler.gpus()
    assert (gpu.id, gpu.index, gpu.name, gpu.kind) == ("GPU-a", 0, "NVIDIA H200", "card")
    can = gpu.capabilities
    assert (set(can.metrics), can.source) == (set(ACTIVITY_METRICS), "gpm")
    assert (can.power, can.energy, can.processes) == (True, True, True)
    nvml.pass_s(1.0)
    assert only(sampler.sample(77.0)) == GpuSample(
        gpu=gpu.id,
        at=77.0,
        memory_used_mib=5541,
        activity=Activity(sm_active=0.25, sm_occupancy=0.125, dram_active=0.06, gr_active=0.9, tensor_active=0.03),
        gpu_util=0.97,
        memory_util=0.0,
        power_w=120.5,
        energy_j=5000.25,
        processes=(ProcessUse(pid=408, memory_mib=1644, name="process-408"),),
    )


@pytest.mark.parametrize(("engine_s", "seen"), [(ENGINE_S, [0.9, 0.9, 0.4]), (0.0, [0.9, 0.4, 0.4])])
def test_engine_activity_is_queried_at_intervals_unless_it_is_wanted_in_each_sample(
    engine_s: float, seen: list[float]
) -> None:
    card = Card("GPU-a")
    nvml = ScriptedNvml(card)
    sampler = NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=str, engine_s=engine_s)
    nvml.pass_s(1.0)
    found = [only(sampler.sample(1.0))]
    card.gpm = (50.0, 12.5, 6.0, 40.0, 3.0)
    for pause_s in (1.0, ENGINE_S):
        nvml.pass_s(pause_s)
        found.append(only(sampler.sample(2.0)))
    assert [sample.activity.gr_active for sample in found] == seen
    assert [sample.activity.sm_active for sample in found] == [0.25, 0.5, 0.5], "what is decided by is always new"


def test_memory_that_the_driver_reserves_is_not_usable() -> None:
    nvml = ScriptedNvml(Card("GPU-a", total_mib=143_771, reserved_mib=616, used_mib=0))
    sampler = sampler_over(nvml)
    assert sampler.gpus()[0].memory_mib == 143_155
    assert only(sampler.sample(0.0)).memory_used_mib == 0


def test_without_the_second_version_of_memory_the_first_is_read() -> None:
    nvml = ScriptedNvml(Card("GPU-a", total_mib=16_000, reserved_mib=500, used_mib=1000))
    nvml.without.add("nvmlDeviceGetMemoryInfo_v2")
    sampler = sampler_over(nvml)
    assert sampler.gpus()[0].memory_mib == 16_000
    assert only(sampler.sample(0.0)).memory_used_mib == 1500


def test_a_reading_right_after_the_start_has_no_activity_and_the_next_has() -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    sampler = sampler_over(nvml)
    first = only(sampler.sample(0.0))
    assert (first.activity.sm_active, first.activity.sm_occupancy, first.activity.dram_active) == (None, None, None)
    assert first.fault is None
    nvml.pass_s(0.15)
    assert only(sampler.sample(0.15)).activity.sm_active == 0.25


def test_readings_too_close_together_repeat_the_last_values_and_never_read_zero() -> None:
    card = Card("GPU-a", gpm=(80.0, 40.0, 20.0))
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    nvml.pass_s(1.0)
    assert only(sampler.sample(1.0)).activity.sm_active == 0.8
    card.gpm = (10.0, 5.0, 2.0)
    for _ in range(3):
        nvml.pass_s(0.03)
        close = only(sampler.sample(1.0))
        assert (close.activity.sm_active, close.activity.sm_occupancy, close.activity.dram_active) == (0.8, 0.4, 0.2)
    nvml.pass_s(0.03)  # 120 ms since the snapshot: the close readings did not push it forward
    assert only(sampler.sample(1.1)).activity.sm_active == 0.1


def test_a_card_without_gpm_gives_the_coarse_figure_only() -> None:
    nvml = ScriptedNvml(Card("GPU-a", name="NVIDIA A100", gpm=None))
    sampler = sampler_over(nvml)
    can = sampler.gpus()[0].capabilities
    assert (can.metrics, can.source) == ((), "nvml")
    nvml.pass_s(1.0)
    sample = only(sampler.sample(1.0))
    assert (sample.activity.sm_active, sample.activity.sm_occupancy, sample.activity.dram_active) == (None, None, None)
    assert sample.gpu_util == 0.97


def test_gpm_that_this_user_may_not_read_is_no_capability() -> None:
    nvml = ScriptedNvml(Card("GPU-a", errors={"nvmlGpmSampleGet": pynvml.NVML_ERROR_NO_PERMISSION}))
    sampler = sampler_over(nvml)
    assert sampler.gpus()[0].capabilities.source == "nvml"
    nvml.pass_s(1.0)
    assert only(sampler.sample(1.0)).activity.sm_active is None


def test_a_busy_counter_is_a_missing_figure_for_that_sample() -> None:
    card = Card("GPU-a")
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    nvml.pass_s(1.0)
    card.errors["nvmlGpmSampleGet"] = pynvml.NVML_ERROR_IN_USE
    busy = only(sampler.sample(1.0))
    assert (busy.activity.sm_active, busy.fault, busy.power_w) == (None, None, 120.5)
    card.errors.clear()
    nvml.pass_s(1.0)
    assert only(sampler.sample(2.0)).activity.sm_active == 0.25


def test_a_counter_that_is_busy_at_the_start_is_still_a_capability() -> None:
    card = Card("GPU-a", errors={"nvmlGpmSampleGet": pynvml.NVML_ERROR_IN_USE})
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    assert sampler.gpus()[0].capabilities.metrics
    card.errors.clear()
    nvml.pass_s(1.0)
    assert only(sampler.sample(1.0)).activity.sm_active is None  # the first snapshot has none before it
    nvml.pass_s(1.0)
    assert only(sampler.sample(2.0)).activity.sm_active == 0.25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 4.0e9])
def test_a_nonsense_metric_is_not_given(value: float) -> None:
    nvml = ScriptedNvml(Card("GPU-a", gpm=(value, 50.0, 100.4)))
    sampler = sampler_over(nvml)
    nvml.pass_s(1.0)
    sample = only(sampler.sample(1.0))
    assert (sample.activity.sm_active, sample.activity.sm_occupancy, sample.activity.dram_active) == (None, 0.5, 1.0)


def test_one_metric_with_an_error_of_its_own_leaves_the_others() -> None:
    nvml = ScriptedNvml(Card("GPU-a", gpm_returns=(0, pynvml.NVML_ERROR_NOT_SUPPORTED, 0)))
    sampler = sampler_over(nvml)
    nvml.pass_s(1.0)
    sample = only(sampler.sample(1.0))
    assert (sample.activity.sm_active, sample.activity.sm_occupancy, sample.activity.dram_active) == (0.25, None, 0.06)


def test_not_available_is_none_and_not_a_huge_number() -> None:
    card = Card("GPU-a", compute=[(7, NOT_AVAILABLE), (8, None), (9, 0xFFFFFFFF)])
    card.energy_mj, card.power_mw, card.gpu_util = NOT_AVAILABLE, 0xFFFFFFFF, 0xFFFFFFFF
    sample = only(sampler_over(ScriptedNvml(card)).sample(0.0))
    assert (sample.energy_j, sample.power_w, sample.gpu_util) == (None, None, None)
    assert sample.processes is not None
    assert {process.pid: process.memory_mib for process in sample.processes} == {7: None, 8: None, 9: 4096}


def test_figures_that_are_not_supported_are_undeclared_and_none() -> None:
    names = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates")
    lists = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
    card = Card("GPU-a", errors=dict.fromkeys((*names, *lists), pynvml.NVML_ERROR_NOT_SUPPORTED))
    sampler = sampler_over(ScriptedNvml(card))
    can = sampler.gpus()[0].capabilities
    assert (can.power, can.energy, can.processes) == (False, False, False)
    sample = only(sampler.sample(0.0))
    assert (sample.power_w, sample.energy_j, sample.gpu_util, sample.processes) == (None, None, None, None)
    assert sample.fault is None


def test_a_process_on_several_lists_is_counted_once() -> None:
    card = Card("GPU-a", compute=[(5, 100 * MIB), (5, 50 * MIB), (6, None)], graphics=[(5, 150 * MIB), (6, 9 * MIB)])
    sample = only(sampler_over(ScriptedNvml(card)).sample(0.0))
    assert sample.processes == (
        ProcessUse(pid=5, memory_mib=150, name="process-5"),
        ProcessUse(pid=6, memory_mib=9, name="process-6"),
    )


def test_processes_come_from_the_older_call_where_the_driver_has_no_newer_one() -> None:
    nvml = ScriptedNvml(Card("GPU-a", compute=[(5, MIB)]))
    nvml.without.add("nvmlDeviceGetComputeRunningProcesses_v3")
    sample = only(sampler_over(nvml).sample(0.0))
    assert sample.processes is not None
    assert [process.pid for process in sample.processes] == [5]


def test_energy_grows_by_power_between_two_looks_at_the_counter_and_is_then_corrected() -> None:
    card = Card("GPU-a", energy_mj=1_000_000, power_mw=100_000)
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    assert only(sampler.sample(0.0)).energy_j == 1000.0
    card.energy_mj = 5_000_000
    nvml.pass_s(5.0)
    assert only(sampler.sample(5.0)).energy_j == 1500.0
    nvml.pass_s(ENERGY_S - 5.0)
    assert only(sampler.sample(ENERGY_S)).energy_j == 5000.0


def test_energy_never_goes_back_unless_the_counter_itself_starts_again() -> None:
    card = Card("GPU-a", energy_mj=1_000_000, power_mw=100_000)
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    sampler.sample(0.0)
    nvml.pass_s(ENERGY_S - 1.0)
    by_power = only(sampler.sample(ENERGY_S - 1.0)).energy_j
    assert by_power == 1000.0 + 100.0 * (ENERGY_S - 1.0)
    card.energy_mj = 1_200_000  # less than power made of it
    nvml.pass_s(1.0)
    assert only(sampler.sample(ENERGY_S)).energy_j == by_power
    card.energy_mj = 5_000  # the driver was loaded again
    nvml.pass_s(ENERGY_S)
    assert only(sampler.sample(2 * ENERGY_S)).energy_j == 5.0


def test_an_energy_counter_that_is_busy_is_asked_again_at_the_next_sample() -> None:
    card = Card("GPU-a", energy_mj=1_000_000)
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.errors["nvmlDeviceGetTotalEnergyConsumption"] = pynvml.NVML_ERROR_IN_USE
    assert only(sampler.sample(0.0)).energy_j is None
    card.errors.clear()
    nvml.pass_s(1.0)
    assert only(sampler.sample(1.0)).energy_j == 1000.0


def test_real_process_names_come_from_the_kernel() -> None:
    nvml = ScriptedNvml(Card("GPU-a", compute=[(os.getpid(), MIB), (2**22 + 1, MIB)]))
    sample = only(NvmlSampler(nvml, monotonic=nvml.monotonic).sample(0.0))
    assert sample.processes is not None
    own, gone = sample.processes
    with open("/proc/self/comm", encoding="utf-8") as file:
        assert own.name == file.read().strip()
    assert gone.name == ""
