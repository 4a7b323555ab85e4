"""Draws training runs so that their footprints and batches are spread over the ranges, not concentrated by chance.

For each run a footprint and a batch are drawn first. Models are drawn until one needs that footprint with about that
batch; then the batch is set to reach the footprint. Each run has a random generator of its own, seeded with seed,
family and number, so that a longer list begins with the runs of a shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from carma.errors import Usage
from gpumemnet import Family
from gpumemnet.dataset.config import Config
from gpumemnet.dataset.draw_cnn import draw_cnn
from gpumemnet.dataset.draw_mlp import draw_mlp
from gpumemnet.dataset.draw_transformer import draw_transformer
from gpumemnet.dataset.program import Dice, Drawn
from gpumemnet.dataset.program_memory import RoughEstimate, Unfit
from gpumemnet.dataset.ranges import Cnn, Footprint, Mlp, Ranges, Transformer

ACCEPTED_DISTANCE = 0.5  # in doublings: a model that is nearer is used without further tries
UNTRAINABLE_FACTOR = 40  # as long as no drawn model can be trained, up to this multiple of `tries` is drawn
REACHED = 0.5  # in doublings: the error of a batch that is rounded to a power of two


Section = Mlp | Cnn | Transformer
DRAW: Mapping[Family, Callable[[Dice, Any, str], Drawn]] = {
    "mlp": draw_mlp, "cnn": draw_cnn, "transformer": draw_transformer,
}  # fmt: skip


class Aimed(NamedTuple):
    """A config and the footprint for which it was drawn."""

    config: Config
    wanted_mib: float
    distance: float  # from the wanted footprint and batch

    @property
    def is_reached(self) -> bool:
        """Whether the rough estimate is close to the wanted footprint. If the ranges have no model of that size, the
        nearest model is used."""
        return abs(math.log2(self.config.guess_mib / self.wanted_mib)) <= REACHED


def generate(family: Family, count: int, seed: int, ranges: Ranges) -> Iterator[Aimed]:
    for number in range(count):
        yield _one(family, seed, number, ranges)


def name(family: Family, seed: int, number: int) -> str:
    return f"{family}-{seed}-{number:06}"


def _one(family: Family, seed: int, number: int, ranges: Ranges) -> Aimed:
    dice = Dice(f"{seed}/{family}/{number}")
    section: Section = getattr(ranges, family)
    wanted_mib = wanted_footprint(dice, section.footprint)
    wanted_batch = dice.log(section.batch)
    shape = dice.word({**section.shapes})
    settings = {
        "id": name(family, seed, number),
        "family": family,
        "shape": shape,
        "batch": 1,
        "optimizer": dice.word(ranges.common.optimizers),
        "precision": dice.word(ranges.common.precisions),
    }
    best: Aimed | None = None
    for tried in range(ranges.common.tries * UNTRAINABLE_FACTOR):
        if best is not None and (tried >= ranges.common.tries or best.distance < ACCEPTED_DISTANCE):
            break
        # Converted with the type's own checks, so that every written config can be read.
        config = msgspec.convert(settings | DRAW[family](dice, section, shape), Config)
        found = _fitted(dice, ranges, config, wanted_mib, wanted_batch)
        if found is not None and (best is None or found.distance < best.distance):
            best = found
    if best is None:
        raise Usage(f"no {family} model of these ranges can be trained", "Allow smaller models, images or batches.")
    return best


def wanted_footprint(dice: Dice, footprint: Footprint) -> float:
    kind = dice.uniform((0, 1))
    if kind < footprint.log:
        low, high = footprint.span_mib
        return math.exp(dice.uniform((math.log(low), math.log(high))))
    if kind < footprint.log + footprint.low:
        return dice.uniform(footprint.low_mib)
    if kind < footprint.log + footprint.low + footprint.high:
        return dice.uniform(footprint.high_mib)
    return dice.uniform(footprint.span_mib)


def _fitted(dice: Dice, ranges: Ranges, config: Config, wanted_mib: float, wanted_batch: int) -> Aimed | None:
    """The config with the batch that is nearest to the wanted footprint and batch, within the limits; None if the
    model cannot be trained."""
    section: Section = getattr(ranges, config.family)
    low, high = section.batch
    try:
        estimate = RoughEstimate(config, ranges.common)
    except Unfit:
        return None
    least = max(low, 2) if estimate.sums.needs_two_samples else low
    most = min(high, estimate.most())
    if most < least:
        return None
    found = []
    # The wanted batch is tried too, because the weights alone may reach the footprint.
    for batch in (estimate.batch_for(wanted_mib), wanted_batch):
        written = min(most, max(least, _written(dice, ranges, min(most, max(least, batch)))))
        mib = estimate.mib(written)
        distance = 4 * abs(math.log2(mib / wanted_mib)) + abs(math.log2(written / wanted_batch)) / 2
        distance += estimate.step_s(written) / 2  # prefers the faster of two models with equal distance
        if mib <= section.footprint.high_mib[1]:
            found.append(Aimed(msgspec.structs.replace(config, batch=written, guess_mib=mib), wanted_mib, distance))
    return min(found, key=lambda one: one.distance, default=None)


def _written(dice: Dice, ranges: Ranges, batch: float) -> int:
    """The batch rounded as in typical scripts: often to a power of two."""
    match dice.word(ranges.common.batches):
        case "power":
            return int(2 ** round(math.log2(batch)))
        case "eights" if batch >= 8:
            return 8 * round(batch / 8)
    return round(batch)
