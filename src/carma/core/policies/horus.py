"""Horus: predicted GPU utilisation is added up on each GPU, to 100 % at most; the least loaded GPU takes the task.

After Yeung et al., Horus (TPDS 33(1), 2022), in the form with which the authors of CARMA compare themselves (GitHub
ehsanyousefzadehasl/AEGIS, commit b2aecce: a budget of 100 %, the least projected sum first). Utilisation is what Horus
predicts: the share of time with any kernel. A task of unknown demand counts as 100 % and so shares with no task.

Left out: the prediction from a model's graph (an estimator may provide a demand instead), the paper's own queue and its
cost function, which the comparison does not have either. Memory, warm-up and the rest are the filters' as for every
policy; the gate on what is observed is not Horus's and does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Ask, Part, Refusal
from carma.core.model.values import Demand, GpuId
from carma.core.scheduling.gpu_view import GpuView, Holder
from carma.core.scheduling.policy import Policy, Ranked
from carma.core.scheduling.sharing_model import engine_share

BUDGET = 1.0
ROUNDING = 1e-9


def utilisation(demand: Demand | None) -> float:
    return 1.0 if demand is None else engine_share(demand)


def _held(holders: Sequence[Holder]) -> float:
    return sum(utilisation(holder.demand) for holder in holders)


def objection(ask: Ask, holders: Sequence[Holder]) -> Refusal | None:
    own, held = utilisation(ask.demand), _held(holders)
    if own + held <= BUDGET + ROUNDING:
        return None
    others = ", ".join(f"{holder.key.task} ({_percent(holder.demand)})" for holder in holders)
    neighbours = f"task {others}" if len(holders) == 1 else f"tasks {others}"
    total = f"would come to {own + held:.0%} (budget {BUDGET:.0%})"
    return Refusal("Utilisation", f"predicted utilisation {total}: {_percent(ask.demand)} beside {neighbours}")


def _percent(demand: Demand | None) -> str:
    return f"{utilisation(demand):.0%}" + ("" if demand is not None else ", not known")


def rank(ask: Ask, views: Sequence[GpuView], _last_gpu: GpuId | None) -> list[Ranked]:
    own = utilisation(ask.demand)
    found = sorted((own + _held(view.holders), view.gpu.index, view.gpu.id) for view in views)
    return [Ranked(gpu, (Part("utilisation_left", round(BUDGET - total, 4)),)) for total, _, gpu in found]


POLICY = Policy(
    "horus",
    rank,
    about="The GPU with the least predicted utilisation, 100 % at most (Horus).",
    objection=objection,
    uses_gate=False,
)
