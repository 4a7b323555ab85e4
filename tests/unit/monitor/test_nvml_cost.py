"""The cost of a sample, in calls of the driver; each call takes a tenth of a millisecond or more."""

from __future__ import annotations

from collections import Counter

from carma.core.model.values import GpuId
from carma.monitor.nvml import NvmlSampler
from tests.scripted_nvml import MIB, Card, ScriptedNvml

A, B = GpuId("GPU-a"), GpuId("GPU-b")
EVERY_SAMPLE = {
    "nvmlDeviceGetMemoryInfo_v2": 1,
    "nvmlGpmSampleGet": 1,
    "nvmlDeviceGetPowerUsage": 1,
    "nvmlDeviceGetComputeRunningProcesses_v3": 1,
}


def over(nvml: ScriptedNvml) -> NvmlSampler:
    return NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=lambda pid: f"process-{pid}")


def questions(nvml: ScriptedNvml) -> dict[str, int]:
    """The calls since the last call of this function."""
    asked, nvml.calls = nvml.calls, Counter()
    return dict(asked)


def test_most_samples_ask_four_questions_of_a_card_and_the_slow_ones_only_now_and_then() -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    sampler = over(nvml)
    sampler.sample(0.0)
    questions(nvml)
    for second in range(1, 61):
        nvml.pass_s(1.0)
        sampler.sample(float(second))
    asked = questions(nvml)
    slow = {
        "nvmlDeviceGetTotalEnergyConsumption": 2,  # every 30 s: 4.8 ms each on an H200
        "nvmlDeviceGetUtilizationRates": 12,  # every 5 s
        "nvmlDeviceGetGraphicsRunningProcesses_v3": 6,  # every 10 s
    }
    assert asked == {name: 60 * times for name, times in EVERY_SAMPLE.items()} | slow


def test_a_memory_sample_asks_for_memory_and_processes_of_its_gpus_only() -> None:
    nvml = ScriptedNvml(Card("GPU-a", used_mib=30, compute=[(5, 20 * MIB)]), Card("GPU-b"))
    sampler = over(nvml)
    sampler.sample(0.0)
    questions(nvml)
    (observed,) = sampler.sample_memory([A], 7.0)
    assert questions(nvml) == {"nvmlDeviceGetMemoryInfo_v2": 1, "nvmlDeviceGetComputeRunningProcesses_v3": 1}
    assert (observed.gpu, observed.at, observed.memory_used_mib) == (A, 7.0, 30)
    assert [(process.pid, process.memory_mib) for process in observed.processes or ()] == [(5, 20)]


def test_memory_samples_do_not_shorten_what_the_next_sample_averages_over() -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    sampler = over(nvml)
    for _ in range(20):
        nvml.pass_s(0.05)
        sampler.sample_memory([A], nvml.now)
    assert sampler.sample(1.0)[0].activity.sm_active == 0.25


def test_a_name_is_looked_up_once_for_as_long_as_its_process_is_there() -> None:
    looked_up: list[int] = []

    def name(pid: int) -> str:
        looked_up.append(pid)
        return f"run-{len(looked_up)}"

    card = Card("GPU-a", compute=[(5, MIB), (6, MIB)])
    nvml = ScriptedNvml(card)
    sampler = NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=name)
    for _ in range(3):
        sampler.sample(0.0)
        sampler.sample_memory([A], 0.0)
    assert looked_up == [5, 6]
    card.compute = [(6, MIB)]
    sampler.sample_memory([A], 0.0)
    card.compute = [(5, MIB), (6, MIB)]  # the kernel may have given the number to another process
    (sample,) = sampler.sample(1.0)
    assert looked_up == [5, 6, 5]
    assert [process.name for process in sample.processes or ()] == ["run-3", "run-2"]


def test_a_process_that_only_draws_is_listed_between_two_queries_of_the_graphics_list() -> None:
    card = Card("GPU-a", graphics=[(9, 4 * MIB)])
    nvml = ScriptedNvml(card)
    sampler = over(nvml)
    card.compute = [(5, MIB)]
    for observed in (sampler.sample(0.0)[0], sampler.sample_memory([A], 0.1)[0]):
        assert [(process.pid, process.memory_mib) for process in observed.processes or ()] == [(5, 1), (9, 4)]
    card.graphics = []
    nvml.pass_s(10.0)
    assert [process.pid for process in sampler.sample_memory([A], 10.0)[0].processes or ()] == [5]


def test_freed_memory_shows_at_once_for_a_process_that_also_draws() -> None:
    card = Card("GPU-a", compute=[(5, 100 * MIB)], graphics=[(5, 100 * MIB)])
    nvml = ScriptedNvml(card)
    sampler = over(nvml)
    sampler.sample(0.0)
    card.compute = [(5, 40 * MIB)]
    assert [process.memory_mib for process in sampler.sample_memory([A], 0.2)[0].processes or ()] == [40]
