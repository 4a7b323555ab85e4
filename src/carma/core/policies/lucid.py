"""Lucid's indolent packing: two tasks on a GPU at most, and only where their sharing scores add up to 2 or less.

After Hu et al., Lucid (ASPLOS 2023), in the form with which the authors of CARMA compare themselves (GitHub
ehsanyousefzadehasl/AEGIS, commit b2aecce): the least sum of scores goes first, then the least booked memory.

A score tells how a task fares beside another on average: Tiny (0) keeps 95 % of its speed, Medium (1) 85 %, Jumbo (2)
less. Both sources learn it from utilisation and memory with trees that they do not print. The two thresholds here give
47 of AEGIS's 53 scores for an A100 of 40 GB (commit ef62bdd): below 50 % utilisation (40 to 60 % do alike) a task is
Tiny; of the others, one of 16 GiB or more (14 to 17) is Medium, as only small tasks fit beside it. Lucid's own labels
for an RTX 3090 lie elsewhere: Medium from 25 %, Jumbo from 60 % (53 of 66). A task of unknown demand is Jumbo.

Left out, as in AEGIS: Lucid's order by predicted duration (the queue's order is the server's), its profiler, and that
only tasks with the same number of GPUs, and not much longer than their host, are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part, Refusal
from carma.core.model.values import Demand, GpuId
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy, Ranked
from carma.core.scheduling.sharing_model import engine_share

AT_MOST = 2  # tasks, and sum of scores
TINY_BELOW = 0.5  # of the time with any kernel
MEDIUM_MIB = 16_384
CLASSES = ("Tiny", "Medium", "Jumbo")


def score(demand: Demand | None, memory_mib: int) -> int:
    if demand is None:
        return 2
    if engine_share(demand) < TINY_BELOW:
        return 0
    return 1 if memory_mib >= MEDIUM_MIB else 2


def _held(holders: Sequence[Holder]) -> int:
    return sum(score(holder.demand, holder.counted_mib) for holder in holders)


def objection(ask: Ask, holders: Sequence[Holder]) -> Refusal | None:
    if len(holders) >= AT_MOST:
        return Refusal("TasksPerGpu", f"has {len(holders)} tasks; lucid packs {AT_MOST}")
    own, held = score(ask.demand, ask.memory_mib), _held(holders)
    if own + held <= AT_MOST:
        return None
    total = f"sharing scores would add up to {own + held} (at most {AT_MOST})"
    host = f"task {holders[0].key.task}'s {_class(held, holders[0].demand)}"
    return Refusal("Slowdown", f"{total}: {_class(own, ask.demand)} beside {host}")


def _class(score: int, demand: Demand | None) -> str:
    known = "demand not known" if demand is None else f"{engine_share(demand):.0%} utilised"
    return f"{score} ({CLASSES[score]}, {known})"


def rank(ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    own = score(ask.demand, ask.memory_mib)
    ordered = sorted(views, key=lambda view: (_held(view.holders), view.booked_mib, view.gpu.index))
    return [Ranked(view.gpu.id, (Part("score_left", float(AT_MOST - own - _held(view.holders))),)) for view in ordered]


POLICY = Policy(
    "lucid",
    rank,
    about="Two tasks on a GPU at most, by their sharing scores (Lucid's packing).",
    objection=objection,
    uses_gate=False,
)
