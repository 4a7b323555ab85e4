"""What a card draws for what it shows: a curve over SM and DRAM activity. Pure arithmetic.

With a sharpness s the curve levels off, as a card does that reaches its limit by and by:

    idle + (most - idle) * (1 - exp(-(of_sm * SM + of_dram * DRAM) ** s))

Without one it is a straight line up to the limit. `python -m lab.tools.fit_power` fits them again and says how far
they are
off; a test holds the constants here to what it finds.
"""

from __future__ import annotations

from math import exp

from carma.core.model.values import Record
from carma.core.scheduling.sharing_model import POWER_OF_DRAM, POWER_OF_SM


class Curve(Record, frozen=True, kw_only=True):
    idle_w: float
    most_w: float
    of_sm: float
    of_dram: float
    sharpness: float | None = None

    def share(self, sm_active: float, dram_active: float) -> float:
        """Of what the card can draw above idle, 0 to 1."""
        load = self.of_sm * sm_active + self.of_dram * dram_active
        return min(1.0, load) if self.sharpness is None else 1.0 - exp(-(load**self.sharpness))

    def watts(self, sm_active: float, dram_active: float) -> float:
        return self.idle_w + (self.most_w - self.idle_w) * self.share(sm_active, dram_active)

    def share_of(self, watts: float) -> float:
        """The other way round, for a task whose power was measured."""
        return min(1.0, max(0.0, (watts - self.idle_w) / (self.most_w - self.idle_w)))


# The A100s of a DGX Station, from 53 published means of tasks alone (lab/results/a100/solo.csv). 275 W is taken for
# their
# limit, since the steadiest tasks settle there (GPT-2: median 276 W), and 52 W for idle: the most frequent value of the
# first 200 s is 51.9 to 53.4 W in five of those profiles. The three others are least squares.
A100_40 = Curve(idle_w=52.0, most_w=275.0, of_sm=1.785, of_dram=0.097, sharpness=1.997)
# Weights of core/scheduling/sharing_model.py, measured on an H200 (lab/results/h200/sharing.json).
H200 = Curve(idle_w=76.0, most_w=700.0, of_sm=POWER_OF_SM, of_dram=POWER_OF_DRAM)
