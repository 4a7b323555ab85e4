"""The verdict of one GPU on a task: the filters that hold whatever the policy is. Each answers with a code and numbers.

Most filters do not depend on the task. A `Candidate` holds their results for one GPU; what is left for each task is a
few comparisons, so that 10,000 queued tasks and 64 GPUs are decided in milliseconds. Sentences are rendered only when
they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import field

from carma.core.model.decision import Ask, Objection, Reason, Refusal
from carma.core.model.settings import Gate, Rules
from carma.core.model.units import show_mib, show_pair_mib
from carma.core.model.values import Demand, Gpu, Record
from carma.core.scheduling.forecast import demand_of
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy
from carma.core.scheduling.sharing_model import mechanism_of, progress_rates, shown
from carma.core.telemetry.window import METRICS, Metric, Summary, given

NO_INSTANCE = (
    "is not a MIG instance, and only those take tasks (sharing.mechanism is mig); CARMA does not change a card's "
    "layout: an admin makes instances with `nvidia-smi -mig 1` and `nvidia-smi mig -cgi <profiles> -C`"
)
MOST_OBJECTIONS = 4096  # requirements whose objections are remembered for one GPU

OverCap = tuple[Metric, float, float]  # a metric, its value, and the cap that it reaches
Requirement = tuple[
    int, bool, float | None, Demand | None, int, float, bool, Demand | None
]  # all of an `Ask` that a policy may look at


def requirement_of(ask: Ask) -> Requirement:
    """Tasks with the same requirement get the same verdict from the same GPU."""
    return (ask.memory_mib, ask.alone, ask.alone_s, ask.demand, ask.gpus, ask.at, ask.idle_only, ask.same_command)


class Candidate(Record, frozen=True, kw_only=True, eq=False):
    """One GPU's verdicts on any task. Reasons are in the order in which they are given."""

    view: GpuView
    policy: Policy
    closed: Reason | None  # whatever is asked for
    free_mib: int  # for a newcomer, after the margin
    margin_mib: int
    busy: Reason | None  # for a task that would fit: warm-up, utilisation
    caps: bool = True  # whether a newcomer is held to what it books here (sharing.caps)
    objections: dict[Requirement, Objection | None] = field(default_factory=dict)  # of the policy, as far as asked
    room_at: dict[Requirement, float | None] = field(default_factory=dict)  # when enough holders have ended, as known

    @property
    def open(self) -> bool:
        """Whether some task may get this GPU."""
        return self.closed is None and self.busy is None

    def refuse(self, ask: Ask) -> Reason | None:
        """The first reason against this GPU, in the order in which a user can do something about them."""
        if self.closed is not None:
            return self.closed
        if ask.alone and self.view.holders:
            return Reason("Exclusive", _taken, (self.view.holders,))
        if ask.idle_only and not self.view.idle:
            return Reason(
                "Estimating", "the memory of the task is being estimated; until then it needs the GPU idle".format
            )
        return Reason("Memory", _no_memory, (ask, self)) if ask.memory_mib > self.free_mib else self.busy

    def takes(self, ask: Ask) -> bool:
        """Whether `refuse` has no reason, of an open GPU."""
        if self.view.idle:
            return ask.memory_mib <= self.free_mib
        return ask.memory_mib <= self.free_mib and not ask.idle_only and not (ask.alone and self.view.holders)

    def objection(self, ask: Ask, requirement: Requirement) -> Objection | None:
        """The policy's objection to the task together with the tasks on the GPU. `requirement`: of the ask."""
        if self.policy.objection is None or not self.view.holders:
            return None
        known = self.objections
        if requirement not in known:
            if len(known) >= MOST_OBJECTIONS:
                known.clear()
            known[requirement] = self.policy.refusal(ask, self.view.holders)
        return known[requirement]


def candidate_of(
    view: GpuView, rules: Rules, policy: Policy, objections: dict[Requirement, Objection | None] | None = None
) -> Candidate:
    """`objections`: what the policy answered before for the same holders."""
    margin = rules.memory.margin_mib if view.holders else 0
    return Candidate(
        view=view,
        policy=policy,
        closed=_unusable(view, rules) or _occupied(view, rules, policy) or _unknown_memory(view),
        free_mib=max(0, (view.room_mib or 0) - margin),
        margin_mib=margin,
        busy=_warming_up(view, rules, policy) or (_too_busy(view, rules) if _gated(view, rules, policy) else None),
        caps=rules.sharing.caps,
        objections={} if objections is None else objections,
    )


def refuse(ask: Ask, view: GpuView, rules: Rules, policy: Policy) -> Refusal | None:
    """One question about one GPU, with its whole sentence."""
    reason = candidate_of(view, rules, policy).refuse(ask)
    return None if reason is None else Refusal(reason.code, reason.sentence)


def listed(gpu: Gpu, rules: Rules) -> bool:
    """Whether tasks may go there at all (placement.gpus)."""
    allowed = rules.placement.gpus
    return not allowed or gpu.id in allowed or str(gpu.index) in allowed


def of_mechanism(gpu: Gpu, rules: Rules) -> bool:
    """Whether the sharing mechanism applies to that GPU: with `mig`, only to existing MIG instances."""
    return rules.sharing.mechanism != "mig" or gpu.kind == "mig"


def takes_tasks(gpu: Gpu, rules: Rules) -> bool:
    return listed(gpu, rules) and of_mechanism(gpu, rules)


def tasks_allowed(rules: Rules) -> int:
    """Maximum number of tasks on one GPU; 1 for MIG instances, which have memory and SMs of their own."""
    return 1 if rules.sharing.mechanism == "mig" else rules.placement.tasks_per_gpu


def on_it(holders: tuple[Holder, ...]) -> str:
    """`task 3 is`, `tasks 3, 4 are`."""
    names = ", ".join(str(holder.key.task) for holder in holders)
    return f"task {names} is" if len(holders) == 1 else f"tasks {names} are"


def _taken(holders: tuple[Holder, ...]) -> str:
    return f"the task wants a GPU alone; {on_it(holders)} on it"


def _unusable(view: GpuView, rules: Rules) -> Reason | None:
    if view.fault is not None:
        return Reason("Fault", "cannot be used: {}".format, (view.fault,))
    if view.drained is not None:
        return Reason("Drained", lambda why: "is drained" + (f": {why}" if why else ""), (view.drained,))
    if not listed(view.gpu, rules):
        return Reason("NotListed", "is not in the list of GPUs that take tasks (placement.gpus)".format)
    if not of_mechanism(view.gpu, rules):
        return Reason("Mechanism", NO_INSTANCE.format)
    return None


def _occupied(view: GpuView, rules: Rules, policy: Policy) -> Reason | None:
    holders = view.holders
    if not holders:
        return None
    if True in [holder.alone for holder in holders]:
        return Reason("Exclusive", "task {} has it alone".format, (holders[0].key.task,))
    if not policy.shares:
        return Reason("Exclusive", lambda held: f"{on_it(held)} on it, and the policy does not share GPUs", (holders,))
    if len(holders) >= tasks_allowed(rules):
        return Reason("TasksPerGpu", _as_many_as_allowed, (holders, rules))
    return None if view.slowed is None else Reason("Slowed", "{}".format, (view.slowed,))


def _as_many_as_allowed(holders: tuple[Holder, ...], rules: Rules) -> str:
    if rules.sharing.mechanism == "mig":
        return f"{on_it(holders)} on it; a MIG instance takes one (sharing.mechanism is mig)"
    count = "1 task" if len(holders) == 1 else f"{len(holders)} tasks"
    return f"has {count}; the limit is {rules.placement.tasks_per_gpu}"


def _unknown_memory(view: GpuView) -> Reason | None:
    if view.room_mib is not None:
        return None
    return Reason("Metrics", "its memory is not known: {}".format, (view.blind or "the last sample does not tell it",))


def _no_memory(ask: Ask, candidate: Candidate) -> str:
    view = candidate.view
    details = [f"{show_mib(view.booked_mib)} booked"]
    if view.foreign_mib:
        details.append(f"{show_mib(view.foreign_mib)} used by foreign processes")
    if candidate.margin_mib:
        details.append(f"{show_mib(candidate.margin_mib)} margin")
    needs, has = show_pair_mib(ask.memory_mib, candidate.free_mib)
    return f"needs {needs}; has room for {has} of {show_mib(view.gpu.memory_mib)} ({', '.join(details)})"


def _warming_up(view: GpuView, rules: Rules, policy: Policy) -> Reason | None:
    """Tasks that have not settled: one whose memory is not known, or not limited, closes the GPU to all others; the
    others close it where the activity that they book leaves no room."""
    if not rules.warmup.enabled:
        return None
    for holder in view.holders:
        if holder.closes:
            return Reason("WarmUp", "task {} {}".format, (holder.key.task, holder.warming))
    unsettled = _unsettled(view, rules)
    if unsettled is None or not rules.gate.enabled or not policy.uses_gate:
        return None
    over = _over(booked_activity(view.holders, rules), rules.gate)
    return Reason("WarmUp", _booked_over_caps, (unsettled, over)) if over else None


def _unsettled(view: GpuView, rules: Rules) -> Holder | None:
    """The first task that has not settled: the window tells nothing yet about those on the GPU, so that their booked
    activity counts. None where all have settled, and on a GPU that would not tell even then."""
    newest = view.newest
    if newest is None or not rules.warmup.enabled or any(given(newest, metric) is None for metric in METRICS):
        return None
    return next((holder for holder in view.holders if holder.warming is not None), None)


def booked_activity(holders: Sequence[Holder], rules: Rules) -> dict[Metric, float]:
    """What the tasks are expected to show together: their known demands, or the usual ones of tasks of their size."""
    demands = [demand_of(holder) for holder in holders]
    booked = shown(demands, progress_rates(demands, mechanism_of(rules)))
    return {metric: getattr(booked, metric) for metric in METRICS}


def _gated(view: GpuView, rules: Rules, policy: Policy) -> bool:
    """Whether the window must allow sharing. A policy that predicts slowdowns itself does not know foreign processes,
    and could not correct a wrong prediction on a GPU that shows no activity. While a task has not settled, its booked
    activity stands in for samples that are still missing."""
    if view.foreign or view.foreign_mib > 0:
        return True
    if not policy.uses_gate:
        return view.newest is not None and any(given(view.newest, metric) is None for metric in METRICS)
    return view.blind is None or _unsettled(view, rules) is None


def _too_busy(view: GpuView, rules: Rules) -> Reason | None:
    if view.idle:
        return None
    inferred = view.newest is not None and view.newest.bound is not None
    return _at_the_gate(view.blind, view.summaries, rules, inferred)


def _at_the_gate(blind: str | None, summaries: Mapping[Metric, Summary], rules: Rules, inferred: bool) -> Reason | None:
    """Whether a GPU that is in use is too busy for another task. What is not known does not pass."""
    gate = rules.gate
    if not gate.enabled:
        return None
    if blind is not None:
        return Reason("Metrics", "its activity is not known yet: {}".format, (blind,))
    gauges: dict[Metric, float] = {}
    for metric in METRICS:
        found = summaries.get(metric)
        if found is not None and found.count >= rules.window.min_samples:
            gauges[metric] = found.by(gate.summary)
    missing = [metric for metric in METRICS if metric not in gauges]
    if missing:
        return Reason("Metrics", _no_metrics, (missing,))
    over = _over(gauges, gate)
    return Reason("Utilisation", _over_caps, (over, inferred)) if over else None


def _over(gauges: Mapping[Metric, float], gate: Gate) -> list[OverCap]:
    """The metrics that reach their caps, where that closes the GPU."""
    caps = {"sm_active": gate.sm_active, "sm_occupancy": gate.sm_occupancy, "dram_active": gate.dram_active}
    over = [(metric, gauges[metric], caps[metric]) for metric in METRICS if gauges[metric] >= caps[metric]]
    if gate.combine == "published" and not (len(over) > 1 and over[0][0] == "sm_active"):
        return []
    return over


def _no_metrics(missing: list[Metric]) -> str:
    return f"gives no {', '.join(missing)}, and what is not known does not pass the gate"


def _over_caps(over: list[OverCap], inferred: bool) -> str:
    note = "; inferred from power and utilisation, with the error of that" if inferred else ""
    return f"is too busy: {_figures(over)}{note}"


def _booked_over_caps(newest: Holder, over: list[OverCap]) -> str:
    return f"task {newest.key.task} {newest.warming}; until then its tasks book {_figures(over)}"


def _figures(over: list[OverCap]) -> str:
    return ", ".join(f"{metric} {value:.2f} (cap {cap:.2f})" for metric, value, cap in over)
