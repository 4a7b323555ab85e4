"""Faults of the sampler: lost GPUs, a driver that goes away, MIG layouts, machines without a GPU."""

from __future__ import annotations

import pynvml
import pytest

from carma import errors
from carma.core.model.values import GpuId
from carma.errors import NoGpus
from carma.monitor.nvml import NvmlSampler
from carma.monitor.query_intervals import BackOff
from tests.scripted_nvml import MIB, Card, ScriptedNvml


def sampler_over(nvml: ScriptedNvml) -> NvmlSampler:
    return NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=lambda _: "")


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_TIMEOUT,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # a stale handle after a reset
    ],
)
def test_a_lost_gpu_is_a_fault_and_the_other_gpu_goes_on(code: int) -> None:
    lost = Card("GPU-a")
    nvml = ScriptedNvml(lost, Card("GPU-b"))
    sampler = sampler_over(nvml)
    lost.errors["*"] = code
    nvml.pass_s(1.0)
    first, second = sampler.sample(1.0)
    assert first.fault is not None
    assert str(pynvml.NVMLError(code)) in first.fault
    assert (first.memory_used_mib, first.activity.sm_active, first.processes) == (None, None, None)
    assert second.fault is None
    assert second.activity.sm_active == 0.25


def test_a_gpu_that_comes_back_after_a_reset_is_found_again() -> None:
    lost = Card("GPU-a")
    nvml = ScriptedNvml(lost, Card("GPU-b"))
    sampler = sampler_over(nvml)
    lost.errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    sampler.sample(0.0)
    nvml.pass_s(31.0)
    sampler.sample(31.0)  # NVML is opened afresh, and the card is still away
    nvml.pass_s(1.0)
    away = sampler.sample(32.0)
    assert [gpu.id for gpu in sampler.gpus()] == ["GPU-a", "GPU-b"]
    assert away[0].fault is not None
    assert away[1].activity.sm_active == 0.25
    lost.errors.clear()
    nvml.pass_s(61.0)
    sampler.sample(93.0)
    nvml.pass_s(1.0)
    assert [(sample.fault, sample.activity.sm_active) for sample in sampler.sample(94.0)] == [
        (None, 0.25),
        (None, 0.25),
    ]


def test_nvml_is_not_opened_afresh_for_every_sample_of_a_lost_gpu() -> None:
    lost = Card("GPU-a")
    nvml = ScriptedNvml(lost)
    sampler = sampler_over(nvml)
    lost.errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    for second in range(600):
        sampler.sample(float(second))
        nvml.pass_s(1.0)
    assert nvml.inits == 1 + 4  # after 30, 90, 210 and 450 s


def test_a_driver_restart_is_a_fault_until_it_answers_again() -> None:
    nvml = ScriptedNvml(Card("GPU-a", used_mib=10), Card("GPU-b"))
    sampler = sampler_over(nvml)
    nvml.pass_s(1.0)
    assert all(sample.fault is None for sample in sampler.sample(1.0))
    nvml.restart_driver()
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    for at in range(2, 8):
        nvml.pass_s(1.0)
        samples = sampler.sample(float(at))
        assert [sample.gpu for sample in samples] == ["GPU-a", "GPU-b"]
        assert all("driver does not answer" in (sample.fault or "") for sample in samples)
    nvml.init_error = None
    nvml.pass_s(60.0)
    assert all(sample.fault is None for sample in sampler.sample(70.0))
    nvml.pass_s(1.0)
    again = sampler.sample(71.0)
    assert [(sample.fault, sample.activity.sm_active) for sample in again] == [(None, 0.25), (None, 0.25)]
    assert again[0].memory_used_mib == 10


def test_opening_is_tried_less_and_less_often() -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    sampler = sampler_over(nvml)
    nvml.restart_driver()
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    for second in range(300):
        sampler.sample(float(second))
        nvml.pass_s(1.0)
    assert nvml.inits == 1 + 9  # after 1, 3, 7, 15, 31, 63, 123, 183 and 243 s


def test_an_upgraded_driver_says_what_to_do() -> None:
    nvml = ScriptedNvml(Card("GPU-a"))
    sampler = sampler_over(nvml)
    nvml.restart_driver()
    nvml.init_error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    sampler.sample(0.0)
    nvml.pass_s(1.0)
    assert "restart the machine" in (sampler.sample(1.0)[0].fault or "")


def test_no_driver_is_a_clear_error_with_a_way_out() -> None:
    nvml = ScriptedNvml()
    nvml.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    with pytest.raises(errors.CarmaError, match="NVML Shared Library Not Found") as caught:
        sampler_over(nvml)
    assert "carma up --virtual-gpus 4" in caught.value.hint


def test_a_driver_without_gpus_is_a_clear_error() -> None:
    with pytest.raises(NoGpus, match="knows of no GPU"):
        sampler_over(ScriptedNvml())


def test_a_gpu_that_is_lost_at_the_start_is_a_problem_and_not_the_end() -> None:
    nvml = ScriptedNvml(Card("GPU-a", errors={"*": pynvml.NVML_ERROR_GPU_IS_LOST}), Card("GPU-b"))
    sampler = sampler_over(nvml)
    assert [(gpu.id, gpu.index) for gpu in sampler.gpus()] == [("GPU-b", 1)]
    assert sampler.problems() == ("GPU 0 cannot be used: it does not answer: GPU is lost",)


def mig(uuid: str, used_mib: int = 0) -> Card:
    not_on_instances = (
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
    )
    return Card(
        uuid,
        name="NVIDIA H200 MIG 1g.18gb",
        total_mib=16_384,
        reserved_mib=0,
        used_mib=used_mib,
        errors=dict.fromkeys(not_on_instances, pynvml.NVML_ERROR_NOT_SUPPORTED),
    )


def test_mig_instances_are_gpus_and_their_card_is_not() -> None:
    quiet, busy = mig("MIG-1"), mig("MIG-2", used_mib=900)
    quiet.gpm, busy.gpm = (0.0, 0.0, 0.0), (60.0, 30.0, 10.0)
    busy.compute = [(12, 900 * MIB)]
    nvml = ScriptedNvml(Card("GPU-a", mig=[quiet, busy]), Card("GPU-b"))
    sampler = sampler_over(nvml)
    assert [(gpu.id, gpu.index, gpu.kind) for gpu in sampler.gpus()] == [
        ("GPU-b", 1, "card"),
        ("MIG-1", 2, "mig"),
        ("MIG-2", 3, "mig"),
    ]
    instance = sampler.gpus()[2]
    assert instance.memory_mib == 16_384
    assert (instance.capabilities.source, instance.capabilities.power) == ("gpm", False)
    nvml.pass_s(1.0)
    _, first, second = sampler.sample(1.0)
    assert (first.activity.sm_active, first.memory_used_mib, first.processes) == (0.0, 0, ())
    assert (second.activity.sm_active, second.memory_used_mib, second.power_w) == (0.6, 900, None)
    assert [process.pid for process in second.processes or ()] == [12]


def test_a_card_in_mig_mode_without_instances_is_a_problem() -> None:
    sampler = sampler_over(ScriptedNvml(Card("GPU-a", mig=[]), Card("GPU-b")))
    assert [gpu.id for gpu in sampler.gpus()] == ["GPU-b"]
    assert sampler.problems() == ("GPU 0 cannot be used: it is in MIG mode and has no instances",)


def test_a_new_mig_layout_replaces_the_old_one() -> None:
    old = mig("MIG-1")
    card = Card("GPU-a", mig=[old])
    nvml = ScriptedNvml(card)
    sampler = sampler_over(nvml)
    old.errors["*"] = pynvml.NVML_ERROR_NOT_FOUND  # its handle leads nowhere now
    card.mig = [mig("MIG-7")]
    assert sampler.sample(0.0)[0].fault is not None
    nvml.pass_s(31.0)
    sampler.sample(31.0)
    assert [gpu.id for gpu in sampler.gpus()] == ["MIG-7"]
    assert [(sample.gpu, sample.fault) for sample in sampler.sample(32.0)] == [("MIG-7", None)]


def test_close_frees_the_snapshots_and_can_be_repeated() -> None:
    nvml = ScriptedNvml(Card("GPU-a"), Card("GPU-b"))
    sampler = sampler_over(nvml)
    assert nvml.snapshots == 4
    sampler.close()
    sampler.close()
    assert nvml.snapshots == 0
    assert [sample.fault for sample in sampler.sample(1.0)] == ["the sampler is closed"] * 2


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_a_card_that_tells_its_name_but_not_its_memory_stays_on_the_list(code: int) -> None:
    odd = Card("GPU-a")
    nvml = ScriptedNvml(odd, Card("GPU-b"))
    sampler = sampler_over(nvml)
    odd.errors = {"nvmlDeviceGetMemoryInfo": code, "nvmlDeviceGetMemoryInfo_v2": code}
    for _ in range(20):
        samples = sampler.sample(nvml.now)
        assert [sample.gpu for sample in samples] == ["GPU-a", "GPU-b"]
        assert samples[0].memory_used_mib is None
        nvml.pass_s(60.0)
    assert nvml.snapshots <= 4  # opening again and again does not pile them up


def test_back_off_doubles_up_to_its_limit_and_starts_again_after_reset() -> None:
    back_off = BackOff(first_s=1.0, limit_s=4.0)
    assert [second for second in range(14) if back_off.due(float(second))] == [1, 3, 7, 11]
    back_off.reset()
    assert [second for second in range(20, 24) if back_off.due(float(second))] == [21, 23]


def test_a_memory_sample_notices_that_the_driver_has_gone_and_the_next_sample_opens_it() -> None:
    nvml = ScriptedNvml(Card("GPU-a", used_mib=10))
    sampler = sampler_over(nvml)
    nvml.restart_driver()
    for _ in range(20):
        nvml.pass_s(0.2)
        (observed,) = sampler.sample_memory([GpuId("GPU-a")], nvml.now)
        assert "driver does not answer" in (observed.fault or "")
    assert nvml.inits == 1
    assert sampler.sample(nvml.now)[0].fault is None
    assert sampler.sample_memory([GpuId("GPU-a")], nvml.now)[0].memory_used_mib == 10


def test_a_memory_sample_after_the_end_is_a_fault() -> None:
    sampler = sampler_over(ScriptedNvml(Card("GPU-a")))
    sampler.close()
    assert [sample.fault for sample in sampler.sample_memory([GpuId("GPU-a")], 1.0)] == ["the sampler is closed"]
