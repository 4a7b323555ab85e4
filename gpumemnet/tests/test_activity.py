"""The activity of a run, with a scripted driver: GPM, power, and figures that the driver does not provide."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from carma.trial.inside.carma_measure.gpu_counters import GPM_METRICS, GpuCounters
from gpumemnet.dataset.torch_interpreter import INSIDE

MODULE = "gpumemnet.dataset.inside.activity"


class Nvml:
    """Metrics by their number; energy rises by 3 J a reading, power is 250 W."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_SM_OCCUPANCY = 3
    NVML_GPM_METRIC_GRAPHICS_UTIL = 1
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5

    def __init__(self, has_gpm: bool = True) -> None:
        self.has_gpm = has_gpm
        self.energy_mj = 0
        self.values: dict[int, float] = {2: 80.0, 3: 25.5, 1: 100.4, 10: float("nan"), 5: 12.0}
        self.snaps: list[object] = []

    def nvmlInit(self) -> None:
        return

    def nvmlDeviceGetHandleByIndex(self, _index: int) -> str:
        return "card"

    def nvmlGpmQueryDeviceSupport(self, _card: object) -> Any:
        return SimpleNamespace(isSupportedDevice=True)

    def nvmlGpmSampleAlloc(self) -> object:
        return object()

    def nvmlGpmSampleGet(self, _card: object, sample: object) -> None:
        if not self.has_gpm:
            raise RuntimeError("not supported")
        self.snaps.append(sample)

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(99)])

    def nvmlGpmMetricsGet(self, question: Any) -> Any:
        assert [question.sample1, question.sample2] == self.snaps
        assert question.version == 1
        for metric in question.metrics[: question.numMetrics]:
            metric.value = self.values[metric.metricId]
            metric.nvmlReturn = 3 if metric.metricId == 5 else 0
        return question

    def nvmlDeviceGetTotalEnergyConsumption(self, _card: object) -> int:
        self.energy_mj += 3000
        return self.energy_mj

    def nvmlDeviceGetFieldValues(self, _card: object, _fields: list[int]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=250_000))]


class Training:
    """`steps` counts; the clock moves by `step_s` a step."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s, self.steps = 0.0, step_s, 0

    def step(self) -> float:
        self.now_s += self.step_s
        self.steps += 1
        return 1.0


@pytest.fixture
def nvml() -> Nvml:
    return Nvml()


@pytest.fixture
def activity(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported as by the collector, with its neighbours on the module path. A window of the clock lasts some time."""
    monkeypatch.syspath_prepend(str(INSIDE))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "training_run", SimpleNamespace(gpu_counters=lambda: GpuCounters()))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


def measured(activity: ModuleType, monkeypatch: pytest.MonkeyPatch, step_s: float, window_s: float, device: str) -> Any:
    training = Training(step_s)
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: training.now_s))
    meter = SimpleNamespace(sync=lambda: None, segments=lambda: 0)
    run = SimpleNamespace(training=training, meter=meter, device=device)
    probe = activity.Probe(device)
    if probe.gpu is not None:
        probe.gpu._monotonic = lambda: training.now_s
    return activity.measure(run, probe, window_s)


def test_activity_power_and_step_time_are_measured(activity: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(activity, monkeypatch, step_s=0.05, window_s=0.6, device="cuda")
    assert figures["step_ms"] == pytest.approx(50)
    assert figures["window_steps"] in (12, 13)  # sums of 0.05 are not exact
    assert (figures["sm_active"], figures["sm_occupancy"], figures["gr_active"]) == (0.8, 0.255, 1.0)
    assert figures["power_w"] == round(3 / figures["window_s"], 1)


def test_a_metric_that_is_not_a_number_or_has_an_error_is_none(
    activity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = measured(activity, monkeypatch, step_s=0.1, window_s=0.6, device="cuda")
    assert (figures["dram_active"], figures["tensor_active"]) == (None, None)


def test_long_steps_are_measured_twice_unless_they_exceed_the_longest_window(
    activity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured(activity, monkeypatch, step_s=1.0, window_s=0.6, device="cuda")["window_steps"] == 2
    assert measured(activity, monkeypatch, step_s=60.0, window_s=0.6, device="cpu")["window_steps"] == 1


def test_a_gpu_without_gpm_has_only_step_time_and_power(
    activity: ModuleType, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.has_gpm = False
    figures = measured(activity, monkeypatch, step_s=0.1, window_s=0.6, device="cuda")
    assert all(figures[name] is None for name in GPM_METRICS)
    assert figures["power_w"] is not None


def test_without_a_gpu_there_is_only_step_time(activity: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(activity, monkeypatch, step_s=0.1, window_s=0.6, device="cpu")
    absent = {name for name, value in figures.items() if value is None}
    assert absent == {*GPM_METRICS, "power_w", "power_polled_w"}
    assert set(figures) == set(activity.FIGURES)


def test_the_window_begins_when_a_step_allocates_no_more_memory(
    activity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that rested allocates its memory again in the first steps, which take longer."""
    training = Training(step_s=0.1)
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: training.now_s))
    activity.warm_up(training.step, lambda: min(training.steps, 3))
    assert training.steps == 4
    activity.warm_up(training.step, lambda: 7)
    assert training.steps == 5


def test_warming_up_has_a_least_and_a_longest_time(activity: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(step_s=0.25)
    monkeypatch.setattr(activity, "WARM_S", 1.0)
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: training.now_s))
    activity.warm_up(training.step, lambda: 7)
    assert training.now_s == 1.0
    activity.warm_up(training.step, lambda: training.steps)
    assert training.now_s - 1.0 == activity.MAX_WINDOW_S + 0.25
