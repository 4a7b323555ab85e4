"""A choice among the GPUs, and how it is written out: each GPU's refusal or score, and the whole in one sentence.

A `Choice` names the chosen GPUs. The reasons of all others are computed when they are read: for the queue's REASON
column, `carma show` and `carma explain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carma.core.model.decision import RECOVERY, UNKNOWN, Ask, Decision, Objection, Part, Refusal, Verdict
from carma.core.model.units import show_mib, show_pair_mib
from carma.core.model.values import Booking, GpuId, Placement, Record
from carma.core.scheduling.policy import Ranked
from carma.core.scheduling.verdicts import Candidate

# The code that speaks for the whole where GPUs have several comes first: the one that is likely to pass soonest.
_IN_WORDS = {
    "WarmUp": "warming up",
    "Reserved": "reserved for another task",
    "Utilisation": "too busy",
    "Slowed": "with a task that is slowed down too much",
    "Slowdown": "with too much predicted slowdown",
    "Memory": "with too little room",
    "TasksPerGpu": "with as many tasks as may share it",
    "Exclusive": "not to be shared",
    "Metrics": "without the metrics to judge it by",
    "Estimating": "in use while its memory is being estimated",
    "Policy": "left out by the policy",
    "Drained": "drained",
    "Fault": "with a fault",
    "NotListed": "not in placement.gpus",
    "Mechanism": "that is no MIG instance",
}


class Choice(Record, frozen=True, kw_only=True):
    ask: Ask
    candidates: tuple[Candidate, ...]  # all GPUs, in index order
    kept: dict[GpuId, Objection]  # GPUs that passed the filters and are kept for another task
    objections: dict[GpuId, Objection]  # of the policy, to GPUs that passed all that
    ranked: tuple[Ranked, ...]

    @property
    def chosen(self) -> tuple[GpuId, ...]:
        best = self.ranked[: self.ask.gpus]
        return tuple([entry.gpu for entry in best]) if len(best) == self.ask.gpus else ()

    def objection(self, candidate: Candidate) -> Objection | None:
        """The policy's objection to that GPU, if it was asked about it."""
        return self.objections.get(candidate.view.gpu.id)

    def reason(self, candidate: Candidate) -> Objection | None:
        """Why that GPU does not take the task."""
        gpu = candidate.view.gpu.id
        return candidate.refuse(self.ask) or self.kept.get(gpu) or self.objections.get(gpu)

    def reasons(self) -> dict[GpuId, Objection]:
        """The same of all GPUs that do not: those that a filter refuses, then those that the policy does."""
        found: dict[GpuId, Objection] = {}
        for candidate in self.candidates:
            gpu = candidate.view.gpu.id
            reason = candidate.refuse(self.ask) or self.kept.get(gpu)
            if reason is not None:
                found[gpu] = reason
        return found | self.objections


def conclude(choice: Choice, policy: str, at: float, most: int | None = None) -> Decision:
    """The choice written out: every GPU with its refusal or its score, and the whole in one sentence. `most`: at most
    this many GPUs, the chosen ones first."""
    ask, chosen = choice.ask, choice.chosen
    written = choice.candidates
    if most is not None:
        written = tuple(sorted(written, key=lambda one: one.view.gpu.id not in chosen)[:most])
    parts = {entry.gpu: entry.parts for entry in choice.ranked}
    verdicts = tuple([_verdict(choice, one, parts.get(one.view.gpu.id, ()), chosen) for one in written])
    code, sentence = short_sentence(choice)
    return Decision(ask.task, at, policy, verdicts, placement_of(choice), sentence, code)


def _verdict(choice: Choice, candidate: Candidate, parts: tuple[Part, ...], chosen: Sequence[GpuId]) -> Verdict:
    reason, gpu = choice.reason(candidate), candidate.view.gpu.id
    refusal = None if reason is None else Refusal(reason.code, reason.sentence)
    return Verdict(gpu, refusal, parts, gpu in chosen)


def placement_of(choice: Choice) -> Placement | None:
    ask, chosen = choice.ask, choice.chosen
    if not chosen:
        return None
    taken = [one for one in choice.candidates if one.view.gpu.id in chosen]
    booking = Booking(memory_mib=ask.memory_mib, source=ask.source, alone=ask.alone, cap_mib=_cap_mib(ask, taken))
    return Placement(gpus=chosen, booking=booking)


def _cap_mib(ask: Ask, chosen: Sequence[Candidate]) -> int | None:
    """The memory limit of the task. A task of unknown size is stopped where it would take memory that its neighbours
    have booked, not at its arbitrary booking. So is a task that ran out of memory before: its estimate was wrong, and
    a failure under a limit shows only the next block that it requested, not how many would have followed."""
    if ask.alone or not all(candidate.caps for candidate in chosen):
        return None
    if ask.source not in (UNKNOWN, RECOVERY):
        return ask.memory_mib
    return max(ask.memory_mib, min(candidate.free_mib for candidate in chosen))


def short_sentence(choice: Choice) -> tuple[str, str]:
    """(code, sentence)."""
    ask, candidates = choice.ask, choice.candidates
    if choice.chosen:
        return "", _placed(choice)
    if not candidates:
        return "NoGpus", "this server has no GPU"
    reasons = choice.reasons()
    free = len(candidates) - len(reasons)
    codes = {reason.code for reason in reasons.values()}
    code = next((name for name in _IN_WORDS if name in codes), "Resources")
    gang = f"needs {ask.gpus} GPUs; {free} of {len(candidates)} can take it now" if ask.gpus > 1 else ""
    if not reasons:
        return code, f"needs {ask.gpus} GPUs; this server has {len(candidates)}"
    best = _best(code, candidates, reasons)
    if code == "Memory":
        needs, most = show_pair_mib(ask.memory_mib, best.free_mib)
        text = f"needs {needs}; most free is {most} on GPU {best.view.gpu.index}"
    else:
        text = f"GPU {best.view.gpu.index}: {reasons[best.view.gpu.id].sentence}"
    return code, (f"{gang}; " if gang else "") + text + _others(code, reasons, len(candidates))


def _best(code: str, candidates: Sequence[Candidate], reasons: Mapping[GpuId, Objection]) -> Candidate:
    """The GPU that speaks for the code: the roomiest where memory is short, else the first."""
    found = [one for one in candidates if one.view.gpu.id in reasons and reasons[one.view.gpu.id].code == code]
    return max(found, key=lambda one: one.free_mib) if code == "Memory" else found[0]


def _placed(choice: Choice) -> str:
    chosen = choice.chosen
    views = {one.view.gpu.id: one.view for one in choice.candidates if one.view.gpu.id in chosen}
    names = ", ".join(str(views[gpu].gpu.index) for gpu in chosen)
    winner = choice.ranked[0]
    figures = ", ".join(_figure(part) for part in winner.parts if part.name not in ("order", "turn"))
    how = "idle" if views[winner.gpu].idle else "shared"
    return f"placed on GPU {names}: {how}" + (f", {figures}" if figures else "")


def _others(code: str, reasons: Mapping[GpuId, Objection], gpus: int) -> str:
    """How many GPUs have another reason; nothing when all have the same."""
    counts: dict[str, int] = {}
    for reason in reasons.values():
        if reason.code != code:
            counts[reason.code] = counts.get(reason.code, 0) + 1
    if not counts or gpus == 1:
        return ""
    return "; others: " + ", ".join(f"{count} {_IN_WORDS.get(name, name)}" for name, count in counts.items())


def _figure(part: Part) -> str:
    if part.unit == "MiB":
        return f"{part.name.removesuffix('_mib')} {show_mib(part.value)}"
    return f"{part.name.replace('_', ' ')} {part.value:g}{part.unit and ' ' + part.unit}"
