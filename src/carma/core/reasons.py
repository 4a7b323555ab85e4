"""A decision in one sentence, with the numbers: what the queue's REASON column and `carma show` print."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.decision import Ask, Part, Verdict
from carma.core.model import GpuId
from carma.core.units import show_mib
from carma.core.view import GpuView

# Which refusal speaks for the whole when they differ: the one that is likely to pass first.
_HOPE = (
    "WarmUp",
    "Reserved",
    "Utilisation",
    "Memory",
    "TasksPerGpu",
    "Exclusive",
    "Metrics",
    "Policy",
    "Drained",
    "Fault",
    "NotListed",
)


def short_sentence(
    ask: Ask, views: Sequence[GpuView], verdicts: Sequence[Verdict], chosen: Sequence[GpuId], margin_mib: int
) -> tuple[str, str]:
    """(code, sentence)."""
    index = {view.gpu.id: view.gpu.index for view in views}
    if chosen:
        names = ", ".join(str(index[gpu]) for gpu in chosen)
        return "", f"placed on GPU {names}: {_why_there(verdicts, views)}"
    if not verdicts:
        return "NoGpus", "this server has no GPU"
    codes = {verdict.refusal.code for verdict in verdicts if verdict.refusal is not None}
    free = [verdict for verdict in verdicts if verdict.refusal is None]
    code = next((name for name in _HOPE if name in codes), "Resources")
    gang = f"needs {ask.gpus} GPUs, {len(free)} could take it now; " if ask.gpus > 1 else ""
    if codes == {"Memory"} and not free:
        return code, gang + _memory_sentence(ask, views, margin_mib)
    best = next(verdict for verdict in verdicts if verdict.refusal is not None and verdict.refusal.code == code)
    assert best.refusal is not None
    return code, f"{gang}GPU {index[best.gpu]}: {best.refusal.sentence}" + _others(verdicts, best)


def _why_there(verdicts: Sequence[Verdict], views: Sequence[GpuView]) -> str:
    idle = {view.gpu.id for view in views if view.idle}
    winner = next(verdict for verdict in verdicts if verdict.chosen)
    figures = ", ".join(_figure(part) for part in winner.parts if part.name not in ("order", "turn"))
    return ("idle" if winner.gpu in idle else "shared") + (f", {figures}" if figures else "")


def _figure(part: Part) -> str:
    if part.unit == "MiB":
        return f"{part.name.removesuffix('_mib')} {show_mib(part.value)}"
    return f"{part.name} {part.value:g}{part.unit and ' ' + part.unit}"


def _memory_sentence(ask: Ask, views: Sequence[GpuView], margin_mib: int) -> str:
    rooms = [(max(0, (view.room_mib or 0) - (margin_mib if view.holders else 0)), -view.gpu.index) for view in views]
    most_mib, index = max(rooms)
    return f"needs {show_mib(ask.memory_mib)}; most free is {show_mib(most_mib)} on GPU {-index}"


def _others(verdicts: Sequence[Verdict], best: Verdict) -> str:
    counts: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.gpu != best.gpu and verdict.refusal is not None:
            counts[verdict.refusal.code] = counts.get(verdict.refusal.code, 0) + 1
    if not counts:
        return ""
    return "; others: " + ", ".join(f"{count} {code}" for code, count in counts.items())
