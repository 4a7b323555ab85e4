"""The modes of cards, for administrators. Read once by `carma doctor`; nothing is changed."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

from carma.core.model.values import Record
from carma.errors import NoGpus
from carma.monitor.devices import mig_instances
from carma.monitor.gpm import is_offered
from carma.monitor.gpu_faults import Code, DriverGone, GpuLost, Nvml, ask, code_of

ComputeMode = Literal["default", "exclusive_thread", "prohibited", "exclusive_process"]
_COMPUTE_MODES: dict[int, ComputeMode] = {  # nvml.h, nvmlComputeMode_t
    0: "default",
    1: "exclusive_thread",
    2: "prohibited",
    3: "exclusive_process",
}


class CardFacts(Record, frozen=True, kw_only=True):
    """One card, whether tasks can use it or not. None: unknown to the driver."""

    index: int
    name: str = ""
    compute_mode: ComputeMode | None = None
    persistence: bool | None = None
    mig: bool | None = None
    mig_pending: bool | None = None  # its value after the next reset
    instances: int = 0
    gpm: Literal["offered", "absent", "forbidden"] = "absent"
    fault: str = ""


class MachineFacts(Record, frozen=True, kw_only=True):
    driver: str = ""
    nvml: str = ""
    cuda: str = ""  # the newest version that the driver supports
    cards: tuple[CardFacts, ...] = ()


def machine_facts(nvml: Nvml) -> MachineFacts:
    """Raises NoGpus if no driver answers."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoGpus(f"the NVIDIA driver does not answer: {error}") from error
    try:
        return MachineFacts(
            driver=str(ask(nvml, "nvmlSystemGetDriverVersion") or ""),
            nvml=str(ask(nvml, "nvmlSystemGetNVMLVersion") or ""),
            cuda=_cuda(ask(nvml, "nvmlSystemGetCudaDriverVersion")),
            cards=tuple(_card(nvml, index) for index in range(ask(nvml, "nvmlDeviceGetCount") or 0)),
        )
    except (DriverGone, GpuLost) as error:
        raise NoGpus(f"the NVIDIA driver does not answer: {error}") from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _card(nvml: Nvml, index: int) -> CardFacts:
    try:
        handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index, heartbeat=True)
        if handle is None:
            return CardFacts(index=index, fault="its handle is not given to this user")
        modes = ask(nvml, "nvmlDeviceGetMigMode", handle)
        mig = None if modes is None else modes[0] == 1
        return CardFacts(
            index=index,
            name=str(ask(nvml, "nvmlDeviceGetName", handle) or ""),
            compute_mode=_COMPUTE_MODES.get(ask(nvml, "nvmlDeviceGetComputeMode", handle)),
            persistence=None if (on := ask(nvml, "nvmlDeviceGetPersistenceMode", handle)) is None else bool(on),
            mig=mig,
            mig_pending=None if modes is None else modes[1] == 1,
            instances=len(mig_instances(nvml, handle)) if mig else 0,
            gpm="absent" if mig or not is_offered(nvml, handle) else _gpm(nvml, handle),
        )
    except GpuLost as error:
        return CardFacts(index=index, fault=f"it does not answer: {error}")


def _gpm(nvml: Nvml, handle: Any) -> Literal["offered", "absent", "forbidden"]:
    """How a card offers GPM. The first snapshot shows whether this user may read it."""
    snapshot = ask(nvml, "nvmlGpmSampleAlloc")
    if snapshot is None:
        return "absent"
    try:
        nvml.nvmlGpmSampleGet(handle, snapshot)
    except nvml.NVMLError as error:
        return "forbidden" if code_of(error) == Code.NO_PERMISSION else "absent"
    finally:
        ask(nvml, "nvmlGpmSampleFree", snapshot)
    return "offered"


def _cuda(version: Any) -> str:
    """13000 means 13.0."""
    return "" if version is None else f"{int(version) // 1000}.{int(version) % 1000 // 10}"
