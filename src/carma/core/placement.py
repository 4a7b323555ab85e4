"""One task, the GPUs as they are, one decision. Filters return a refusal or None; the policy ranks what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carma.core.decision import Ask, Decision, Part, Refusal, Verdict
from carma.core.model import Booking, GpuId, Placement, Record
from carma.core.reasons import short_sentence
from carma.core.settings import Rules
from carma.core.units import show_mib
from carma.core.view import GpuView
from carma.core.window import METRICS


class Ranked(Record, frozen=True):
    gpu: GpuId
    parts: tuple[Part, ...]  # the first decides; larger is better


Rank = Callable[[Ask, Sequence[GpuView], GpuId | None], Sequence[Ranked]]
"""(what is asked, GPUs that passed every filter in index order, GPU of the last placement) -> best first."""


class Policy(Record, frozen=True):
    """A placement policy: a name, whether it shares GPUs at all, and a pure ranking."""

    name: str
    rank: Rank
    shares: bool = True
    about: str = ""


def refuse(ask: Ask, view: GpuView, rules: Rules, shares: bool) -> Refusal | None:
    """The first reason against this GPU, in the order in which a user can do something about them."""
    return (
        _unusable(view, rules)
        or _taken(ask, view, rules, shares)
        or _no_memory(ask, view, rules)
        or (closed_to_all(view, rules) if view.holders else None)
        or _too_busy(view, rules)
    )


def _unusable(view: GpuView, rules: Rules) -> Refusal | None:
    if view.fault is not None:
        return Refusal("Fault", f"cannot be used: {view.fault}")
    if view.drained is not None:
        return Refusal("Drained", "is drained" + (f": {view.drained}" if view.drained else ""))
    allowed = rules.placement.gpus
    if allowed and view.gpu.id not in allowed and str(view.gpu.index) not in allowed:
        return Refusal("NotListed", "is not in the list of GPUs that take tasks (placement.gpus)")
    return None


def _taken(ask: Ask, view: GpuView, rules: Rules, shares: bool) -> Refusal | None:
    if not view.holders:
        return None
    names = ", ".join(str(holder.key.task) for holder in view.holders)
    if any(holder.alone for holder in view.holders):
        return Refusal("Exclusive", f"task {names} has it alone")
    if ask.alone:
        return Refusal("Exclusive", f"the task wants a GPU alone; task {names} is on it")
    if not shares:
        return Refusal("Exclusive", f"task {names} is on it, and the policy does not share GPUs")
    if len(view.holders) >= rules.placement.tasks_per_gpu:
        return Refusal("TasksPerGpu", f"has {len(view.holders)} tasks; the limit is {rules.placement.tasks_per_gpu}")
    return None


def _no_memory(ask: Ask, view: GpuView, rules: Rules) -> Refusal | None:
    if view.room_mib is None:
        return Refusal("Metrics", "its memory is not known: " + (view.blind or "no sample yet"))
    margin = rules.memory.margin_mib if view.holders else 0
    room = view.room_mib - margin
    if ask.memory_mib <= room:
        return None
    details = [f"{show_mib(view.booked_mib)} booked"]
    if view.foreign_mib:
        details.append(f"{show_mib(view.foreign_mib)} used by foreign processes")
    if margin:
        details.append(f"{show_mib(margin)} margin")
    held = ", ".join(details)
    return Refusal(
        "Memory",
        f"needs {show_mib(ask.memory_mib)}; has room for {show_mib(max(0, room))} of "
        f"{show_mib(view.gpu.memory_mib)} ({held})",
    )


def closed_to_all(view: GpuView, rules: Rules) -> Refusal | None:
    """Reasons that hold for every newcomer, whatever it asks for."""
    if rules.warmup.enabled:
        for holder in view.holders:
            if holder.warming is not None:
                return Refusal("WarmUp", f"task {holder.key.task} {holder.warming}")
    return None


def _too_busy(view: GpuView, rules: Rules) -> Refusal | None:
    gate = rules.gate
    if not gate.enabled or view.idle:
        return None
    if view.blind is not None:
        return Refusal("Metrics", f"is not judged: {view.blind}")
    caps = {"sm_active": gate.sm_active, "sm_occupancy": gate.sm_occupancy, "dram_active": gate.dram_active}
    missing = [metric for metric in METRICS if view.gauge(metric, gate.summary) is None]
    if missing:
        return Refusal("Metrics", f"gives no {', '.join(missing)}, and what is not known does not pass the gate")
    over = [metric for metric in METRICS if (view.gauge(metric, gate.summary) or 0.0) >= caps[metric]]
    if gate.combine == "published" and not ("sm_active" in over and len(over) > 1):
        return None
    if not over:
        return None
    figures = ", ".join(f"{metric} {view.gauge(metric, gate.summary):.2f} (cap {caps[metric]:.2f})" for metric in over)
    return Refusal("Utilisation", f"is too busy: {figures}")


def decide(
    ask: Ask,
    views: Sequence[GpuView],
    rules: Rules,
    policy: Policy,
    last_gpu: GpuId | None,
    at: float,
    fenced: Callable[[GpuView], Refusal | None] | None = None,
) -> Decision:
    """Filter, rank, choose. Pure; a policy of another package that raises is a reason to wait, not a crash."""
    refusals: dict[GpuId, Refusal] = {}
    open_views: list[GpuView] = []
    for view in views:
        refusal = refuse(ask, view, rules, policy.shares) or (fenced(view) if fenced is not None else None)
        if refusal is None:
            open_views.append(view)
        else:
            refusals[view.gpu.id] = refusal
    try:
        ranked = list(policy.rank(ask, open_views, last_gpu))
        _check_ranking(ranked, open_views)
    except Exception as error:
        refusal = Refusal("Policy", f"policy {policy.name} failed: {type(error).__name__}: {error}")
        refusals.update({view.gpu.id: refusal for view in open_views})
        ranked = []
    if rules.placement.idle_first:
        idle = {view.gpu.id for view in open_views if view.idle}
        ranked.sort(key=lambda entry: entry.gpu not in idle)
    return _conclude(ask, views, refusals, ranked, policy.name, rules.memory.margin_mib, at)


def _check_ranking(ranked: Sequence[Ranked], views: Sequence[GpuView]) -> None:
    names = [entry.gpu for entry in ranked]
    if len(set(names)) != len(names) or not set(names) <= {view.gpu.id for view in views}:
        raise ValueError("it ranked a GPU twice, or one that was refused")


def _conclude(
    ask: Ask,
    views: Sequence[GpuView],
    refusals: dict[GpuId, Refusal],
    ranked: Sequence[Ranked],
    policy: str,
    margin_mib: int,
    at: float,
) -> Decision:
    parts = {entry.gpu: entry.parts for entry in ranked}
    chosen = [entry.gpu for entry in ranked[: ask.gpus]] if len(ranked) >= ask.gpus else []
    verdicts = tuple(
        Verdict(
            view.gpu.id,
            refusals.get(view.gpu.id)
            or (None if view.gpu.id in parts else Refusal("Policy", "the policy left it out")),
            parts.get(view.gpu.id, ()),
            view.gpu.id in chosen,
        )
        for view in views
    )
    code, sentence = short_sentence(ask, views, verdicts, chosen, margin_mib)
    placement = None
    if chosen:
        booking = Booking(memory_mib=ask.memory_mib, source=ask.source, alone=ask.alone)
        placement = Placement(gpus=tuple(chosen), booking=booking)
    return Decision(ask.task, at, policy, verdicts, placement, sentence, code)
