"""Goodput: the GPU on which the task adds most progress in total, as long as no task is slowed down beyond a cap.

Progress is predicted by the sharing model (sharing.py) from what each task is known to keep busy when it runs alone. A
task of whom nothing is known counts as a demanding one. Where a neighbour would push anybody over the cap, the task
waits: a GPU is left alone when sharing it loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from msgspec.structs import replace

from carma.core.decision import Ask, Part, Refusal
from carma.core.model import Demand, GpuId, Record
from carma.core.policy import Policy, Ranked
from carma.core.settings import Rules
from carma.core.sharing import progress_rates
from carma.core.view import GpuView, Holder

UNKNOWN = Demand(sm_active=0.8, sm_occupancy=0.4, dram_active=0.4)


class Terms(Record, frozen=True):
    cap: float
    mechanism: Literal["mps", "timeslice"]


class Outlook(Record, frozen=True):
    """What is predicted for a GPU if the task comes to it."""

    gain: float  # progress of all, less what those there make by themselves
    own: float  # slow-down of the newcomer
    worst: float  # of anybody


def outlook(ask: Ask, holders: Sequence[Holder], terms: Terms) -> Outlook:
    demands = [holder.demand or UNKNOWN for holder in holders]
    before = progress_rates(demands, terms.mechanism)
    after = progress_rates([*demands, ask.demand or UNKNOWN], terms.mechanism)
    return Outlook(sum(after) - sum(before), 1.0 / after[-1], 1.0 / min(after))


def against(terms: Terms, ask: Ask, holders: Sequence[Holder]) -> Refusal | None:
    found = outlook(ask, holders, terms)
    if found.worst <= terms.cap:
        return None
    others = ", ".join(str(holder.key.task) for holder in holders)
    worst = f"{found.worst:.2f} times as long as alone (cap {terms.cap:g})"
    return Refusal("Slowdown", f"beside {others} somebody would take {worst}")


def rank(terms: Terms, ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    found = [(outlook(ask, view.holders, terms), view) for view in views]
    found.sort(key=lambda entry: (-entry[0].gain, entry[1].gpu.index))
    return [
        Ranked(
            view.gpu.id,
            (
                Part("gain", round(seen.gain, 4)),
                Part("own_slowdown", round(seen.own, 3)),
                Part("worst_slowdown", round(seen.worst, 3)),
            ),
        )
        for seen, view in found
    ]


def bound(rules: Rules) -> Policy:
    terms = Terms(rules.placement.slowdown_cap, "timeslice" if rules.sharing.mechanism == "timeslice" else "mps")
    return replace(POLICY, rank=partial(rank, terms), against=partial(against, terms), bind=None)


POLICY = Policy(
    "goodput",
    partial(rank, Terms(1.25, "mps")),
    about="The GPU where it adds most progress, nobody slowed down beyond a cap.",
    bind=bound,
    gated=False,
)
