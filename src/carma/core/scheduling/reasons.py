"""A decision in one sentence, with the numbers: what the queue's REASON column and `carma show` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from carma.core.model.units import show_mib, show_pair_mib
from carma.core.model.values import GpuId
from carma.core.scheduling.decision import Ask, Part, Refusal
from carma.core.scheduling.verdicts import Door

# Which refusal speaks for the whole when they differ: the one that is likely to pass first.
_HOPE = (
    "WarmUp",
    "Reserved",
    "Utilisation",
    "Slowdown",
    "Memory",
    "TasksPerGpu",
    "Exclusive",
    "Metrics",
    "Policy",
    "Drained",
    "Fault",
    "NotListed",
    "Mechanism",
)

_IN_WORDS = {
    "WarmUp": "warming up",
    "Reserved": "reserved for another task",
    "Utilisation": "too busy",
    "Slowdown": "where somebody would be slowed down too much",
    "Memory": "with too little room",
    "TasksPerGpu": "with as many tasks as may share it",
    "Exclusive": "not to be shared",
    "Metrics": "without the metrics to judge it by",
    "Policy": "left out by the policy",
    "Drained": "drained",
    "Fault": "with a fault",
    "NotListed": "not in placement.gpus",
    "Mechanism": "that is no MIG instance",
}


class Scored(Protocol):
    @property
    def gpu(self) -> GpuId: ...

    @property
    def parts(self) -> tuple[Part, ...]: ...


def short_sentence(
    ask: Ask,
    doors: Sequence[Door],
    refusals: Mapping[GpuId, Refusal],
    ranked: Sequence[Scored],
    chosen: Sequence[GpuId],
) -> tuple[str, str]:
    """(code, sentence)."""
    if chosen:
        return "", _placed(doors, ranked, chosen)
    if not doors:
        return "NoGpus", "this server has no GPU"
    free = len(doors) - len(refusals)
    codes = {refusal.code for refusal in refusals.values()}
    code = next((name for name in _HOPE if name in codes), "Resources")
    gang = f"needs {ask.gpus} GPUs, {free} could take it now" if ask.gpus > 1 else ""
    if not refusals:
        return code, f"needs {ask.gpus} GPUs; this server has {len(doors)}"
    best = _best(code, doors, refusals)
    if code == "Memory":
        needs, most = show_pair_mib(ask.memory_mib, best.free_mib)
        told = f"needs {needs}; most free is {most} on GPU {best.view.gpu.index}"
    else:
        told = f"GPU {best.view.gpu.index}: {refusals[best.view.gpu.id].sentence}"
    return code, (f"{gang}; " if gang else "") + told + _others(code, refusals, len(doors))


def _best(code: str, doors: Sequence[Door], refusals: Mapping[GpuId, Refusal]) -> Door:
    """The GPU that speaks for the code: the roomiest where memory is short, else the first."""
    found = [door for door in doors if door.view.gpu.id in refusals and refusals[door.view.gpu.id].code == code]
    return max(found, key=lambda door: door.free_mib) if code == "Memory" else found[0]


def _placed(doors: Sequence[Door], ranked: Sequence[Scored], chosen: Sequence[GpuId]) -> str:
    views = {door.view.gpu.id: door.view for door in doors}
    names = ", ".join(str(views[gpu].gpu.index) for gpu in chosen)
    winner = ranked[0]
    figures = ", ".join(_figure(part) for part in winner.parts if part.name not in ("order", "turn"))
    how = "idle" if views[winner.gpu].idle else "shared"
    return f"placed on GPU {names}: {how}" + (f", {figures}" if figures else "")


def _others(code: str, refusals: Mapping[GpuId, Refusal], gpus: int) -> str:
    """How many GPUs have another reason; nothing when all have the same."""
    counts: dict[str, int] = {}
    for refusal in refusals.values():
        if refusal.code != code:
            counts[refusal.code] = counts.get(refusal.code, 0) + 1
    if not counts or gpus == 1:
        return ""
    return "; others: " + ", ".join(f"{count} {_IN_WORDS.get(name, name)}" for name, count in counts.items())


def _figure(part: Part) -> str:
    if part.unit == "MiB":
        return f"{part.name.removesuffix('_mib')} {show_mib(part.value)}"
    return f"{part.name} {part.value:g}{part.unit and ' ' + part.unit}"
