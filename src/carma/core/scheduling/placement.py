"""One task, the GPUs as they are, one choice: filters refuse GPUs (verdicts.py), and the policy ranks the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import isnan

from carma.core.model.decision import Ask, Decision, Objection, Part, Refusal
from carma.core.model.settings import Rules
from carma.core.model.values import GpuId
from carma.core.scheduling.gpu_view import MAX_JOINT_GPUS, GpuView
from carma.core.scheduling.policy import Policy as Policy
from carma.core.scheduling.policy import Ranked as Ranked
from carma.core.scheduling.reasons import Choice, conclude
from carma.core.scheduling.verdicts import Candidate, candidate_of, requirement_of
from carma.core.scheduling.verdicts import refuse as refuse

NUMBER = (int, float)

KeptFor = Callable[[GpuView], Objection | None]
"""Why a GPU is kept for another task; None where it is not."""


def choose(
    ask: Ask,
    candidates: Sequence[Candidate],
    policy: Policy,
    last_gpu: GpuId | None,
    *,
    idle_first: bool,
    open_ones: Sequence[Candidate] | None = None,
    kept_for: KeptFor | None = None,
    rank_all: bool = False,
) -> Choice:
    """Filter, then rank if enough GPUs are left (`rank_all`: in any case, to show the scores).

    `open_ones`: the candidates that are open to some task, where that is known.
    """
    accepted = [one for one in (candidates if open_ones is None else open_ones) if one.open and one.takes(ask)]
    kept: dict[GpuId, Objection] = {}
    if kept_for is not None:
        kept = {one.view.gpu.id: reason for one in accepted if (reason := kept_for(one.view)) is not None}
        accepted = [one for one in accepted if one.view.gpu.id not in kept]
    objections: dict[GpuId, Objection] = {}
    ranked: list[Ranked] = []
    if accepted and (rank_all or len(accepted) >= ask.gpus):
        last = next((one.view.gpu.index for one in candidates if one.view.gpu.id == last_gpu), None)
        ranked = _ranked(ask, accepted, policy, last, objections, idle_first=idle_first)
    return Choice(ask=ask, candidates=tuple(candidates), kept=kept, objections=objections, ranked=tuple(ranked))


def _ranked(
    ask: Ask,
    accepted: Sequence[Candidate],
    policy: Policy,
    last: int | None,
    objections: dict[GpuId, Objection],
    *,
    idle_first: bool,
) -> list[Ranked]:
    """GPUs that passed every filter, by the policy; `last` is the index of the last placement's GPU."""
    before = None  # that GPU, or the nearest accepted one before it: a ring goes on from there
    if last is not None:
        before = next((one.view.gpu.id for one in reversed(accepted) if one.view.gpu.index <= last), None)
    ranked = _by_policy(ask, accepted, policy, before, objections)
    if idle_first:
        idle = {one.view.gpu.id for one in accepted if one.view.idle}
        if 0 < len(idle) < len(accepted):  # else the order stays as it is
            ranked.sort(key=lambda entry: entry.gpu not in idle)
    if 1 < ask.gpus <= MAX_JOINT_GPUS and policy.joint_objection is not None:
        return _together(ask, ranked, accepted, policy, objections)
    return ranked


def _together(
    ask: Ask,
    ranked: list[Ranked],
    accepted: Sequence[Candidate],
    policy: Policy,
    objections: dict[GpuId, Objection],
) -> list[Ranked]:
    """Leaves out GPUs that the policy objects to beside the better ones: a task goes at the pace of its slowest GPU."""
    assert policy.joint_objection is not None
    holders = {one.view.gpu.id: one.view.holders for one in accepted}
    taken: list[Ranked] = []
    for place, entry in enumerate(ranked):
        if len(taken) == ask.gpus:
            return [*taken, *ranked[place:]]
        try:
            refusal = policy.joint_objection(ask, [holders[one.gpu] for one in (*taken, entry)]) if taken else None
        except Exception as error:
            objections.update(dict.fromkeys([one.view.gpu.id for one in accepted], policy.failed(error)))
            return []
        if refusal is None:
            taken.append(entry)
        else:
            objections[entry.gpu] = refusal
    return taken


def _by_policy(
    ask: Ask,
    accepted: Sequence[Candidate],
    policy: Policy,
    last_gpu: GpuId | None,
    objections: dict[GpuId, Objection],
) -> list[Ranked]:
    """A policy of another package that raises, or answers nonsense, is a reason to wait and not a crash."""
    requirement = requirement_of(ask)
    answers = [(candidate, candidate.objection(ask, requirement)) for candidate in accepted]
    objections.update((one.view.gpu.id, objection) for one, objection in answers if objection is not None)
    accepted = [one for one, objection in answers if objection is None]
    views = [one.view for one in accepted]
    names = {view.gpu.id for view in views}
    try:
        ranked = list(islice(policy.rank(ask, views, last_gpu), len(views) + 1))
        _check(ranked, names)
    except Exception as error:
        objections.update(dict.fromkeys(names, policy.failed(error)))
        return []
    if len(ranked) < len(names):
        left_out = Refusal("Policy", f"policy {policy.name} left it out")
        objections.update(dict.fromkeys(names - {entry.gpu for entry in ranked}, left_out))
    return ranked


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


def decide(
    ask: Ask,
    views: Sequence[GpuView],
    rules: Rules,
    policy: Policy,
    last_gpu: GpuId | None,
    at: float,
    kept_for: KeptFor | None = None,
) -> Decision:
    """All of it at once, for one question."""
    candidates = [candidate_of(view, rules, policy) for view in views]
    idle_first = rules.placement.idle_first
    choice = choose(ask, candidates, policy, last_gpu, idle_first=idle_first, kept_for=kept_for, rank_all=True)
    return conclude(choice, policy.name, at)
