"""Why a figure of ours is not the published one, where it is known or likely. What is not known is said to be so.

Said where makespans differ by more than NEAR, or OOMs by MANY for as many tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

from carma_lab.bench.paper.published import PUBLISHED, TASKS
from carma_lab.bench.paper.ratios import Ratio

NEAR = 0.03  # of the makespan of exclusive GPUs
MANY = 5  # OOMs
OF_ALL = (
    "Of all rows: the traces are others (t1, t2, mix and heavy here; Philly, Saturn and Venus there), each figure is "
    "of one run, there on GPUs and here by a sharing model that was fitted on an H200. The published traces are not at "
    "hand, so that none of this could be taken apart."
)
# 32 of t1's 60 tasks, 28 of t2's 60, 55 of mix's 90 and none of heavy's train on CIFAR.
_SMALL = (
    "likely the small CIFAR runs, about half of our tasks, which pack well: on heavy, which has none, it is {heavy:.2f}"
)
# docs/simulation.md, "How far the sharing model is off": eight copies of a large task do 1.72 times the work of one on
# an H200, and 1.00 times by the model.
_CROWDED = (
    "likely the sharing model, which was fitted for up to four tasks and thinks too little of more: with no gate, GPUs "
    "get that crowded"
)
_REASONS = {
    "RR, no estimate": _CROWDED,
    "Horus": _SMALL,
    "Lucid": _SMALL,
    "MAGM, no estimate, gate off": _CROWDED,
    "LUG, no estimate, gate off": _CROWDED,
}


def why(name: str, mean: Ratio, traces: Mapping[str, Ratio], tasks: int) -> str:
    theirs = PUBLISHED[name]
    told = []
    if abs(mean.makespan - theirs.makespan) > NEAR:
        heavy = traces["heavy"].makespan if "heavy" in traces else mean.makespan
        told.append(_REASONS.get(name, "not known").format(heavy=heavy))
    expected = None if theirs.ooms is None else theirs.ooms * tasks / TASKS
    if expected is not None and abs(mean.ooms - expected) >= MANY:
        told.append(f"OOMs: {mean.ooms} in {tasks} tasks, {expected:.0f} would be as many as theirs; not known")
    return "; ".join(told)
