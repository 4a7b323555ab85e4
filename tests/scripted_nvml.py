"""A scripted NVML: the module that NvmlSampler uses, without a driver.

Constants, structures and the error class are pynvml's own, so that what the sampler passes and catches is real.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 1 << 20
NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF


GPM_METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
)


@dataclass
class Card:
    """One scripted card or MIG instance. `errors` maps a function's name, or "*", to the error that it answers with."""

    uuid: str
    name: str = "NVIDIA H200"
    total_mib: int = 143_771
    reserved_mib: int = 604
    used_mib: int = 0
    gpm: tuple[float, ...] | None = (25.0, 12.5, 6.0, 90.0, 3.0)  # percent, in the order of GPM_METRICS; the rest: 0
    gpm_returns: tuple[int, ...] = ()  # the same order; the rest: 0
    process_util: list[tuple[int, int, int]] = field(default_factory=list)  # pid, microseconds, percent
    gpu_util: int = 97
    memory_util: int = 0
    power_mw: int = 120_500
    power_limit_mw: int | None = None  # None: not supported
    energy_mj: int = 5_000_250
    compute: list[tuple[int, int | None]] = field(default_factory=list)  # pid, bytes
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    mig: list[Card] | None = None  # None: MIG mode is off
    errors: dict[str, int] = field(default_factory=dict)


@dataclass
class Snapshot:
    """A GPM snapshot: whose it is and when it was taken; None until then."""

    card: Card | None = None
    at: float | None = None


def _entries(given: list[tuple[int, int | None]]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in given]


class ScriptedNvml:
    """`now` is the time that both sides see; `pass_s` moves it. Handles die when NVML is shut down, as real ones do."""

    def __init__(self, *cards: Card) -> None:
        self.cards = list(cards)
        self.now = 1000.0
        self.init_error: int | None = None
        self.without: set[str] = set()  # functions that this driver does not have
        self.inits = 0
        self.snapshots = 0  # allocated and not freed
        self.calls: Counter[str] = Counter()  # questions to a card, by name
        self._generation: int | None = None  # None: not initialised
        self._open = 0  # as the real one, it counts who opened it
        self._generations = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and name != "nvmlMemory_v2":
            raise AttributeError(name)  # an unscripted call must not reach the real library
        return getattr(pynvml, name)

    def monotonic(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds

    def restart_driver(self) -> None:
        """The driver goes away under us; NVML has to be initialised again."""
        self._generation, self._open = None, 0

    def nvmlInit(self) -> None:
        self.inits += 1
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self._open += 1
        if self._generation is None:
            self._generation = next(self._generations)

    def nvmlShutdown(self) -> None:
        self._need()
        self._open -= 1
        if self._open == 0:
            self._generation = None

    def nvmlSystemGetDriverVersion(self) -> str:
        self._need()
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        self._need()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._need()
        return self._handle("nvmlDeviceGetHandleByIndex", self.cards[index])

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._card("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._card("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        on = int(self._card("nvmlDeviceGetMigMode", handle).mig is not None)
        return [on, on]

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        instances = self._card("nvmlDeviceGetMigDeviceHandleByIndex", handle).mig or []
        if index >= len(instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._handle("nvmlDeviceGetMigDeviceHandleByIndex", instances[index])

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int:
        wanted = self._card("nvmlDeviceGetGpuInstanceId", handle)
        return next(card.mig.index(wanted) for card in self.cards if card.mig and wanted in card.mig)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        name = "nvmlDeviceGetMemoryInfo" if version is None else "nvmlDeviceGetMemoryInfo_v2"
        card = self._card(name, handle)
        if version is None:
            return SimpleNamespace(total=card.total_mib * MIB, used=(card.used_mib + card.reserved_mib) * MIB)
        return SimpleNamespace(total=card.total_mib * MIB, reserved=card.reserved_mib * MIB, used=card.used_mib * MIB)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        card = self._card("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=card.gpu_util, memory=card.memory_util)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._card("nvmlDeviceGetPowerUsage", handle).power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        limit_mw = self._card("nvmlDeviceGetEnforcedPowerLimit", handle).power_limit_mw
        if limit_mw is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return limit_mw

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return self._card("nvmlDeviceGetTotalEnergyConsumption", handle).energy_mj

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> list[SimpleNamespace]:
        return _entries(self._card("nvmlDeviceGetComputeRunningProcesses_v3", handle).compute)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Any) -> list[SimpleNamespace]:
        return _entries(self._card("nvmlDeviceGetComputeRunningProcesses_v2", handle).compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> list[SimpleNamespace]:
        return _entries(self._card("nvmlDeviceGetGraphicsRunningProcesses_v3", handle).graphics)

    def nvmlDeviceGetProcessUtilization(self, handle: Any, since_us: int) -> list[SimpleNamespace]:
        """Newer entries only. For none of them the driver says "not found"; no script at all: it is not supported."""
        card = self._card("nvmlDeviceGetProcessUtilization", handle)
        if not card.process_util:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        newer = [entry for entry in card.process_util if entry[1] > since_us]
        if not newer:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=percent) for pid, at_us, percent in newer]

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._card("nvmlGpmQueryDeviceSupport", handle).gpm is not None))

    def nvmlGpmSampleAlloc(self) -> Snapshot:
        self._need()
        self.snapshots += 1
        return Snapshot()

    def nvmlGpmSampleFree(self, _snapshot: Snapshot) -> None:
        self.snapshots -= 1

    def nvmlGpmSampleGet(self, handle: Any, snapshot: Snapshot) -> Snapshot:
        card = self._card("nvmlGpmSampleGet", handle)
        if card.mig is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        snapshot.card, snapshot.at = card, self.now
        return snapshot

    def nvmlGpmMigSampleGet(self, handle: Any, instance: int, snapshot: Snapshot) -> Snapshot:
        card = self._card("nvmlGpmMigSampleGet", handle)
        assert card.mig is not None
        snapshot.card, snapshot.at = card.mig[instance], self.now
        return snapshot

    def nvmlGpmMetricsGet(self, question: Any) -> Any:
        """Zeros without an error for snapshots that are too close: the trap of the real one."""
        older, newer = question.sample1, question.sample2
        assert older.card is newer.card
        assert older.at is not None
        assert newer.at is not None
        close = newer.at - older.at < 0.1 - 1e-9
        values = {} if close else dict(zip(GPM_METRICS, newer.card.gpm or (), strict=False))
        returns = dict(zip(GPM_METRICS, newer.card.gpm_returns, strict=False))
        for place in range(question.numMetrics):
            metric = question.metrics[place]
            assert metric.metricId in GPM_METRICS
            metric.value, metric.nvmlReturn = values.get(metric.metricId, 0.0), returns.get(metric.metricId, 0)
        for metric in question.metrics[question.numMetrics :]:
            metric.value = 77.0  # nothing is promised of what was not asked for
        return question

    class c_nvmlGpmMetricsGet_t:
        """The same structure as pynvml's, with snapshots of our own instead of opaque pointers."""

        def __init__(self) -> None:
            self.version = self.numMetrics = 0
            self.sample1: Snapshot | None = None
            self.sample2: Snapshot | None = None
            self.metrics = [SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(8)]

    def _need(self) -> None:
        if self._generation is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _handle(self, function: str, card: Card) -> Any:
        self._refuse(function, card)
        return (self._generation, card)

    def _card(self, function: str, handle: Any) -> Card:
        self._need()
        generation, card = handle
        if generation != self._generation:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._refuse(function, card)
        assert isinstance(card, Card)
        return card

    def _refuse(self, function: str, card: Card) -> None:
        self.calls[function] += 1
        if function in self.without:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        code = card.errors.get(function, card.errors.get("*"))
        if code is not None:
            raise pynvml.NVMLError(code)
