"""The substitute for SM activity: NVML's SM utilisation by process, if neither GPM nor DCGM answers."""

from __future__ import annotations

import pynvml
import pytest

from carma.core.model.values import NO_ACTIVITY, GpuSample
from carma.monitor.nvml import NvmlSampler
from carma.monitor.utilisation import QUIET_S
from tests.scripted_nvml import Card, ScriptedNvml

SECOND_US = 1_000_000


def sampler_over(nvml: ScriptedNvml) -> NvmlSampler:
    return NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=lambda _: "")


def next_sample(nvml: ScriptedNvml, sampler: NvmlSampler, seconds: float = 1.0) -> GpuSample:
    nvml.pass_s(seconds)
    (sample,) = sampler.sample(nvml.now)
    return sample


def old_card(*entries: tuple[int, int, int]) -> Card:
    return Card("GPU-a", name="Tesla T4", gpm=None, process_util=[(1, 1, 99), *entries])


def test_the_sum_over_the_processes_stands_for_sm_activity_and_for_nothing_else() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    can = sampler.gpus()[0].capabilities
    assert (can.source, can.metrics) == ("processes", ("sm_active",))
    card.process_util += [(7, SECOND_US, 30), (8, SECOND_US, 20)]
    sample = next_sample(nvml, sampler)
    assert sample.activity.sm_active == pytest.approx(0.5)
    assert (
        sample.activity.sm_occupancy,
        sample.activity.dram_active,
        sample.activity.gr_active,
        sample.activity.tensor_active,
    ) == (None,) * 4
    assert [process.sm_active for process in sample.processes or ()] == [None] * len(sample.processes or ())


def test_several_entries_of_a_process_are_averaged_and_the_sum_stops_at_one() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.process_util += [(7, SECOND_US, 20), (7, SECOND_US + 1, 40)]
    assert next_sample(nvml, sampler).activity.sm_active == pytest.approx(0.3)
    card.process_util += [(7, 2 * SECOND_US, 80), (8, 2 * SECOND_US, 90)]
    assert next_sample(nvml, sampler).activity.sm_active == 1.0


def test_what_the_driver_kept_from_before_the_start_is_no_reading() -> None:
    nvml = ScriptedNvml(old_card((7, SECOND_US, 80)))
    assert next_sample(nvml, sampler_over(nvml)).activity.sm_active is None


def test_without_new_entries_the_last_figure_holds_for_a_moment_and_is_then_zero() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.process_util.append((7, SECOND_US, 80))
    assert next_sample(nvml, sampler).activity.sm_active == 0.8
    assert next_sample(nvml, sampler, QUIET_S / 2).activity.sm_active == 0.8
    assert next_sample(nvml, sampler, QUIET_S / 2).activity.sm_active == 0.0


def test_an_entry_that_the_driver_repeats_expires() -> None:
    class Repeating(ScriptedNvml):
        def nvmlDeviceGetProcessUtilization(self, handle: object, since_us: int) -> list[object]:  # type: ignore[override]
            return list(super().nvmlDeviceGetProcessUtilization(handle, min(since_us, SECOND_US - 1)))

    card = old_card()
    nvml = Repeating(card)
    sampler = sampler_over(nvml)
    card.process_util.append((7, SECOND_US, 80))
    assert next_sample(nvml, sampler).activity.sm_active == 0.8
    assert next_sample(nvml, sampler, QUIET_S).activity.sm_active == 0.0


def test_entries_that_say_nothing_are_not_zero() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.process_util.append((7, SECOND_US, 0xFFFFFFFF))
    assert next_sample(nvml, sampler).activity.sm_active is None


def test_a_counter_that_is_busy_is_a_gap() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.process_util.append((7, SECOND_US, 80))
    card.errors["nvmlDeviceGetProcessUtilization"] = pynvml.NVML_ERROR_IN_USE
    busy = next_sample(nvml, sampler)
    assert (busy.activity.sm_active, busy.fault) == (None, None)
    card.errors.clear()
    assert next_sample(nvml, sampler).activity.sm_active == 0.8


def test_an_empty_answer_that_the_binding_raises_as_success_is_an_idle_gpu() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.errors["nvmlDeviceGetProcessUtilization"] = pynvml.NVML_SUCCESS
    assert next_sample(nvml, sampler, QUIET_S).activity.sm_active == 0.0


def test_if_the_driver_denies_it_only_the_coarse_figure_is_left() -> None:
    card = old_card()
    card.errors["nvmlDeviceGetProcessUtilization"] = pynvml.NVML_ERROR_NO_PERMISSION
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    assert sampler.gpus()[0].capabilities.source == "nvml"
    sample = next_sample(nvml, sampler)
    assert (sample.activity.sm_active, sample.gpu_util) == (None, 0.97)


def test_a_lost_gpu_is_a_fault_here_as_well() -> None:
    card = old_card()
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    card.errors["nvmlDeviceGetProcessUtilization"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert "GPU is lost" in (next_sample(nvml, sampler).fault or "")


def geforce(**fields: object) -> Card:
    return Card("GPU-a", name="RTX 3090", gpm=None, power_limit_mw=350_000, process_util=[(1, 1, 99)], **fields)  # type: ignore[arg-type]


def test_a_card_with_power_its_limit_and_utilisation_has_inferred_activity_and_measures_none() -> None:
    nvml = ScriptedNvml(geforce(gpu_util=60, memory_util=35))
    sampler = sampler_over(nvml)
    (gpu,) = sampler.gpus()
    can = gpu.capabilities
    assert (can.source, can.metrics, gpu.power_limit_w) == ("inferred", (), 350.0)
    sample = next_sample(nvml, sampler)
    assert (sample.activity, sample.bound) == (NO_ACTIVITY, None)  # the core infers
    assert (sample.gpu_util, sample.memory_util, sample.power_w) == (0.6, 0.35, 120.5)


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"])
def test_without_power_or_utilisation_nothing_is_inferred(function: str) -> None:
    nvml = ScriptedNvml(geforce(errors={function: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    assert sampler_over(nvml).gpus()[0].capabilities.source == "processes"


def test_a_setting_disables_the_counters_of_a_card_that_has_them() -> None:
    card = Card("GPU-a", power_limit_mw=700_000)
    measured = NvmlSampler(ScriptedNvml(card), monotonic=lambda: 0.0)
    inferred = NvmlSampler(ScriptedNvml(card), monotonic=lambda: 0.0, measured=False)
    assert [one.gpus()[0].capabilities.source for one in (measured, inferred)] == ["gpm", "inferred"]
