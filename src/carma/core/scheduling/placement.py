"""One task, the GPUs as they are, one decision. Filters refuse or pass (filters.py); the policy ranks what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import isnan

from carma.core.model.settings import Rules
from carma.core.model.values import Booking, GpuId, Placement, Record
from carma.core.scheduling.decision import Ask, Decision, Part, Refusal, Verdict
from carma.core.scheduling.gpu_view import MOST_BESIDE, GpuView
from carma.core.scheduling.policy import Policy as Policy
from carma.core.scheduling.policy import Ranked as Ranked
from carma.core.scheduling.reasons import short_sentence
from carma.core.scheduling.verdicts import Door, door_of
from carma.core.scheduling.verdicts import refuse as refuse

UNKNOWN = "unknown"  # the source of a booking that rests on nothing but memory.unknown_mib
RECOVERY = "recovery"  # of one that an attempt that ran out of memory has led to


NUMBER = (int, float)

Fenced = Callable[[GpuView], Refusal | None]


class Choice(Record, frozen=True, kw_only=True):
    """A decision before it is written out: enough to act on, and cheap."""

    ask: Ask
    doors: tuple[Door, ...]
    refusals: dict[GpuId, Refusal]
    ranked: tuple[Ranked, ...]

    @property
    def chosen(self) -> tuple[GpuId, ...]:
        best = self.ranked[: self.ask.gpus]
        return tuple(entry.gpu for entry in best) if len(best) == self.ask.gpus else ()


def choose(
    ask: Ask,
    doors: Sequence[Door],
    policy: Policy,
    last_gpu: GpuId | None,
    *,
    idle_first: bool,
    fenced: Fenced | None = None,
    rank_all: bool = False,
) -> Choice:
    """Filter, then rank if enough GPUs are left (`rank_all`: in any case, for those who want to see the scores)."""
    refusals: dict[GpuId, Refusal] = {}
    opened: list[GpuView] = []
    for door in doors:
        refusal = door.refuse(ask)
        if refusal is None and fenced is not None:
            refusal = fenced(door.view)
        if refusal is None:
            opened.append(door.view)
        else:
            refusals[door.view.gpu.id] = refusal
    ranked: list[Ranked] = []
    if opened and (rank_all or len(opened) >= ask.gpus):
        last = next((door.view.gpu.index for door in doors if door.view.gpu.id == last_gpu), None)
        ranked = rank(ask, opened, policy, last, refusals, idle_first=idle_first)
    return Choice(ask=ask, doors=tuple(doors), refusals=refusals, ranked=tuple(ranked))


def rank(
    ask: Ask,
    opened: Sequence[GpuView],
    policy: Policy,
    last: int | None,
    refusals: dict[GpuId, Refusal],
    *,
    idle_first: bool,
) -> list[Ranked]:
    """GPUs that passed every filter, in index order, by the policy; `last` is the index of the last placement's GPU.
    What the policy has against one of them goes into `refusals`."""
    before = None  # that GPU, or the nearest open one before it: a ring goes on from there
    if last is not None:
        before = next((view.gpu.id for view in reversed(opened) if view.gpu.index <= last), None)
    ranked = _rank(ask, opened, policy, before, refusals)
    if idle_first:
        idle = {view.gpu.id for view in opened if view.idle}
        if 0 < len(idle) < len(opened):  # else the order stays as it is
            ranked.sort(key=lambda entry: entry.gpu not in idle)
    if 1 < ask.gpus <= MOST_BESIDE and policy.jointly is not None:
        return _together(ask, ranked, opened, policy, refusals)
    return ranked


def _together(
    ask: Ask, ranked: list[Ranked], opened: Sequence[GpuView], policy: Policy, refusals: dict[GpuId, Refusal]
) -> list[Ranked]:
    """Without those that the policy objects to beside the better ones: a task goes at the pace of its slowest GPU."""
    assert policy.jointly is not None
    holders = {view.gpu.id: view.holders for view in opened}
    kept: list[Ranked] = []
    for place, entry in enumerate(ranked):
        if len(kept) == ask.gpus:
            return [*kept, *ranked[place:]]
        try:
            refusal = policy.jointly(ask, [holders[one.gpu] for one in (*kept, entry)]) if kept else None
        except Exception as error:
            return _failed(policy, error, opened, refusals)
        if refusal is None:
            kept.append(entry)
        else:
            refusals[entry.gpu] = refusal
    return kept


def _rank(
    ask: Ask, opened: Sequence[GpuView], policy: Policy, last_gpu: GpuId | None, refusals: dict[GpuId, Refusal]
) -> list[Ranked]:
    """A policy of another package that raises, or answers nonsense, is a reason to wait and not a crash."""
    try:
        if policy.against is not None:
            opened = [view for view in opened if not _objects(ask, view, policy, refusals)]
    except Exception as error:
        return _failed(policy, error, opened, refusals)
    names = {view.gpu.id for view in opened}
    try:
        ranked = list(islice(policy.rank(ask, opened, last_gpu), len(opened) + 1))
        _check(ranked, names)
    except Exception as error:
        return _failed(policy, error, opened, refusals)
    if len(ranked) == len(names):
        return ranked
    left_out = names - {entry.gpu for entry in ranked}
    refusals.update(dict.fromkeys(left_out, Refusal("Policy", f"policy {policy.name} left it out")))
    return ranked


def _objects(ask: Ask, view: GpuView, policy: Policy, refusals: dict[GpuId, Refusal]) -> bool:
    refusal = policy.objects(ask, view.holders)
    if refusal is not None:
        refusals[view.gpu.id] = refusal
    return refusal is not None


def opposes(policy: Policy, ask: Ask, view: GpuView) -> bool:
    """One that fails is not taken for an answer: `rank` will tell."""
    try:
        return policy.opposes(ask, view.holders)
    except Exception:
        return False


def _failed(
    policy: Policy, error: Exception, opened: Sequence[GpuView], refusals: dict[GpuId, Refusal]
) -> list[Ranked]:
    told = (str(error).splitlines() or [""])[0][:200]
    failed = Refusal("Policy", f"policy {policy.name} failed: {type(error).__name__}: {told}")
    refusals.update(dict.fromkeys((view.gpu.id for view in opened), failed))
    return []


def _check(ranked: Sequence[Ranked], names: set[GpuId]) -> None:
    for entry in ranked:
        if not isinstance(entry, Ranked) or not isinstance(entry.parts, tuple):
            raise TypeError("it must answer with Ranked entries")
        for part in entry.parts:
            if type(part) is Part and type(part.value) is float and part.value == part.value:
                continue  # nearly all: a number that is one
            if not isinstance(part, Part) or not isinstance(part.value, NUMBER) or isnan(part.value):
                raise TypeError("a score's part must be a Part with a number")
    ranked_names = {entry.gpu for entry in ranked}
    if len(ranked_names) != len(ranked) or not ranked_names <= names:
        raise ValueError("it ranked a GPU twice, or one that was refused")


def conclude(choice: Choice, policy: str, at: float) -> Decision:
    """The choice written out: every GPU with its refusal or its score, and the whole in one sentence."""
    ask, chosen = choice.ask, choice.chosen
    parts = {entry.gpu: entry.parts for entry in choice.ranked}
    verdicts = []
    for door in choice.doors:
        name = door.view.gpu.id
        refusal = choice.refusals.get(name)
        full = None if refusal is None else door.in_full(ask, refusal)
        verdicts.append(Verdict(name, full, parts.get(name, ()), name in chosen))
    code, sentence = short_sentence(ask, choice.doors, choice.refusals, choice.ranked, chosen)
    return Decision(ask.task, at, policy, tuple(verdicts), placement_of(choice), sentence, code)


def placement_of(choice: Choice) -> Placement | None:
    ask, chosen = choice.ask, choice.chosen
    if not chosen:
        return None
    doors = [door for door in choice.doors if door.view.gpu.id in chosen]
    booking = Booking(memory_mib=ask.memory_mib, source=ask.source, alone=ask.alone, cap_mib=_cap_mib(ask, doors))
    return Placement(gpus=chosen, booking=booking)


def _cap_mib(ask: Ask, doors: Sequence[Door]) -> int | None:
    """Where the task is to be stopped. One of unknown size is not stopped at a figure that nobody believes in, but
    where it would take what the tasks that are there already have booked. The same for one that memory has stopped
    before: what was said of it is known to be wrong, and a task under a limit tells only the block that it wanted
    next, not how many would have followed."""
    if ask.alone or not all(door.caps for door in doors):
        return None
    if ask.source not in (UNKNOWN, RECOVERY):
        return ask.memory_mib
    return max(ask.memory_mib, min(door.free_mib for door in doors))


def decide(
    ask: Ask,
    views: Sequence[GpuView],
    rules: Rules,
    policy: Policy,
    last_gpu: GpuId | None,
    at: float,
    fenced: Fenced | None = None,
) -> Decision:
    """All of it at once, for one question."""
    doors = [door_of(view, rules, policy) for view in views]
    choice = choose(ask, doors, policy, last_gpu, idle_first=rules.placement.idle_first, fenced=fenced, rank_all=True)
    return conclude(choice, policy.name, at)
