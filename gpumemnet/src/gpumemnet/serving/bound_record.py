"""How often the bound of the shipped models held for networks that people use.

Bounds are fitted on runs of the data set, whose networks are random. If a bound holds less often for networks that
people use, the answer says so. The counts are those of `lab/results/gpumemnet/zoo.json`, for both kinds of models; a
test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumemnet.serving.features import Family
from gpumemnet.serving.model import Model
from gpumemnet.serving.model_facts import SHIPPED

LEVEL = 0.99  # the level that was tested
HELD: Mapping[Family, tuple[int, int]] = {
    "mlp": (4, 4),
    "cnn": (71, 71),
    "transformer": (49, 55),
}  # held, of all


def beware(model: Model) -> tuple[str, ...]:
    """Nothing is known of models that were trained elsewhere."""
    held, runs = HELD[model.facts.family]
    if model.file.parent != SHIPPED or not model.facts.bounds or held >= LEVEL * runs:
        return ()
    kept = f"of {runs} {model.facts.family}s that people use {held} kept to it ({100 * held / runs:.0f} %)"
    return (f"the bound is made for runs like those of the data set; {kept}, where {100 * LEVEL:g} % was promised",)
