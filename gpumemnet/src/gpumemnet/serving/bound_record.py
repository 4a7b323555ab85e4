"""How often the bound of the models that come with CARMA held on networks that people use.

A bound is made to hold on runs of the data set, whose networks were drawn by chance. That it holds less often on others
is said in the answer, for those families where it was seen to. The counts are those of
`lab/results/gpumemnet/zoo.json`,
for both kinds of models; a test holds them against it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumemnet.serving.features import Family
from gpumemnet.serving.model import Model
from gpumemnet.serving.model_facts import SHIPPED

LEVEL = 0.99  # at which it was tried
HELD: Mapping[Family, tuple[int, int]] = {"mlp": (4, 4), "cnn": (71, 71), "transformer": (49, 55)}  # of so many


def beware(model: Model) -> tuple[str, ...]:
    """Of models that somebody else has learned nothing is known."""
    held, runs = HELD[model.facts.family]
    if model.file.parent != SHIPPED or not model.facts.bounds or held >= LEVEL * runs:
        return ()
    kept = f"of {runs} {model.facts.family}s that people use {held} kept to it ({100 * held / runs:.0f} %)"
    return (f"the bound is made for runs like those of the data set; {kept}, where {100 * LEVEL:g} % was promised",)
