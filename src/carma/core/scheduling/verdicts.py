"""The preconditions: why a GPU does not take a task. They compose with every policy, and each answers with numbers.

Most of them do not depend on who asks. A `Door` holds their answers for one GPU, worked out once; what is left for each
task is a handful of comparisons, so that a long queue on many GPUs is looked at in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from carma.core.model.settings import Rules
from carma.core.model.units import show_mib, show_pair_mib
from carma.core.model.values import Gpu, Record
from carma.core.scheduling.decision import Ask, Refusal
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy
from carma.core.telemetry.window import METRICS, Metric, Summary

NO_INSTANCE = (
    "is not a MIG instance, and only those take tasks (sharing.mechanism is mig); CARMA does not change a card's "
    "layout: an admin makes instances with `nvidia-smi -mig 1` and `nvidia-smi mig -cgi <profiles> -C`"
)
NO_ROOM = Refusal("Memory", "has too little room")  # `Door.in_full` puts the numbers in, for those who read them


class Door(Record, frozen=True, kw_only=True):
    """One GPU's answers to whoever may ask. Refusals are in the order in which they are given."""

    view: GpuView
    shut: Refusal | None  # whatever is asked for
    taken: Refusal | None  # to one who wants a GPU alone
    free_mib: int  # for a newcomer, after the margin
    margin_mib: int
    busy: Refusal | None  # to those who would fit: warm-up, utilisation
    caps: bool = True  # whether a newcomer is held to what it gets here (sharing.caps)

    def refuse(self, ask: Ask) -> Refusal | None:
        """The first reason against this GPU, in the order in which a user can do something about them."""
        if self.shut is not None:
            return self.shut
        if self.taken is not None and ask.alone:
            return self.taken
        return NO_ROOM if ask.memory_mib > self.free_mib else self.busy

    def in_full(self, ask: Ask, refusal: Refusal) -> Refusal:
        return _no_memory(ask, self) if refusal is NO_ROOM else refusal


def door_of(view: GpuView, rules: Rules, policy: Policy) -> Door:
    margin = rules.memory.margin_mib if view.holders else 0
    return Door(
        view=view,
        shut=_unusable(view, rules) or _occupied(view, rules, policy) or _unknown_memory(view),
        taken=Refusal("Exclusive", f"the task wants a GPU alone; {on_it(view.holders)} on it")
        if view.holders
        else None,
        free_mib=max(0, (view.room_mib or 0) - margin),
        margin_mib=margin,
        busy=closed_to_all(view, rules) or (_too_busy(view, rules) if _gated(view, policy) else None),
        caps=rules.sharing.caps,
    )


def refuse(ask: Ask, view: GpuView, rules: Rules, policy: Policy) -> Refusal | None:
    """One question about one GPU, with its whole sentence."""
    door = door_of(view, rules, policy)
    refusal = door.refuse(ask)
    return None if refusal is None else door.in_full(ask, refusal)


def listed(gpu: Gpu, rules: Rules) -> bool:
    """Whether tasks may go there at all (placement.gpus)."""
    allowed = rules.placement.gpus
    return not allowed or gpu.id in allowed or str(gpu.index) in allowed


def of_mechanism(gpu: Gpu, rules: Rules) -> bool:
    """Whether the server's way of sharing is one for that GPU: with `mig`, only existing MIG instances are."""
    return rules.sharing.mechanism != "mig" or gpu.kind == "mig"


def takes_tasks(gpu: Gpu, rules: Rules) -> bool:
    return listed(gpu, rules) and of_mechanism(gpu, rules)


def tasks_allowed(rules: Rules) -> int:
    """On one GPU. A MIG instance has memory and SMs of its own so that nobody shares them."""
    return 1 if rules.sharing.mechanism == "mig" else rules.placement.tasks_per_gpu


def on_it(holders: tuple[Holder, ...]) -> str:
    """`task 3 is`, `tasks 3, 4 are`."""
    names = ", ".join(str(holder.key.task) for holder in holders)
    return f"task {names} is" if len(holders) == 1 else f"tasks {names} are"


def _unusable(view: GpuView, rules: Rules) -> Refusal | None:
    if view.fault is not None:
        return Refusal("Fault", f"cannot be used: {view.fault}")
    if view.drained is not None:
        return Refusal("Drained", "is drained" + (f": {view.drained}" if view.drained else ""))
    if not listed(view.gpu, rules):
        return Refusal("NotListed", "is not in the list of GPUs that take tasks (placement.gpus)")
    if not of_mechanism(view.gpu, rules):
        return Refusal("Mechanism", NO_INSTANCE)
    return None


def _occupied(view: GpuView, rules: Rules, policy: Policy) -> Refusal | None:
    if not view.holders:
        return None
    if any(holder.alone for holder in view.holders):
        return Refusal("Exclusive", f"task {view.holders[0].key.task} has it alone")
    if not policy.shares:
        return Refusal("Exclusive", f"{on_it(view.holders)} on it, and the policy does not share GPUs")
    if len(view.holders) >= tasks_allowed(rules):
        if rules.sharing.mechanism == "mig":
            why = "a MIG instance takes one (sharing.mechanism is mig)"
            return Refusal("TasksPerGpu", f"{on_it(view.holders)} on it; {why}")
        count = "1 task" if len(view.holders) == 1 else f"{len(view.holders)} tasks"
        return Refusal("TasksPerGpu", f"has {count}; the limit is {rules.placement.tasks_per_gpu}")
    return None


def _unknown_memory(view: GpuView) -> Refusal | None:
    if view.room_mib is not None:
        return None
    return Refusal("Metrics", "its memory is not known: " + (view.blind or "the last sample does not tell it"))


def _no_memory(ask: Ask, door: Door) -> Refusal:
    view = door.view
    details = [f"{show_mib(view.booked_mib)} booked"]
    if view.foreign_mib:
        details.append(f"{show_mib(view.foreign_mib)} used by foreign processes")
    if door.margin_mib:
        details.append(f"{show_mib(door.margin_mib)} margin")
    needs, has = show_pair_mib(ask.memory_mib, door.free_mib)
    held = ", ".join(details)
    return Refusal("Memory", f"needs {needs}; has room for {has} of {show_mib(view.gpu.memory_mib)} ({held})")


def closed_to_all(view: GpuView, rules: Rules) -> Refusal | None:
    """A newcomer that has not settled: reasons that hold whatever is asked for."""
    if rules.warmup.enabled:
        for holder in view.holders:
            if holder.warming is not None:
                return Refusal("WarmUp", f"task {holder.key.task} {holder.warming}")
    return None


def _gated(view: GpuView, policy: Policy) -> bool:
    """A policy that predicts slow-downs itself knows nothing of foreign processes."""
    return policy.gated or bool(view.foreign) or view.foreign_mib > 0


def _too_busy(view: GpuView, rules: Rules) -> Refusal | None:
    return None if view.idle else at_the_gate(view.blind, view.summaries, rules)


def at_the_gate(blind: str | None, summaries: Mapping[Metric, Summary], rules: Rules) -> Refusal | None:
    """Of a GPU that somebody uses: that it is too busy for another, or that nobody can tell."""
    gate = rules.gate
    if not gate.enabled:
        return None
    if blind is not None:
        return Refusal("Metrics", f"is not judged: {blind}")
    caps = {"sm_active": gate.sm_active, "sm_occupancy": gate.sm_occupancy, "dram_active": gate.dram_active}
    gauges: dict[Metric, float] = {}
    for metric in METRICS:
        found = summaries.get(metric)
        if found is not None and found.count >= rules.window.min_samples:
            gauges[metric] = found.by(gate.summary)
    missing = [metric for metric in METRICS if metric not in gauges]
    if missing:
        return Refusal("Metrics", f"gives no {', '.join(missing)}, and what is not known does not pass the gate")
    over = [metric for metric in METRICS if gauges[metric] >= caps[metric]]
    if not over or (gate.combine == "published" and not ("sm_active" in over and len(over) > 1)):
        return None
    figures = ", ".join(f"{metric} {gauges[metric]:.2f} (cap {caps[metric]:.2f})" for metric in over)
    return Refusal("Utilisation", f"is too busy: {figures}")
