"""Activity of a GPU that has no counters of SM activity, inferred from power and engine utilisation.

NVML gives both on every card. While any kernel runs, the power is p / u of the range above idle (p: share of the range
between idle and the power limit, u: share of time with any kernel). A wide kernel needs more power than a narrow one,
so each metric is taken to be

    u * min(1, factor * (p / u) ** exponent)

It is never more than u, because no SM is active without a kernel. The bound adds `caution` times the square root of
the figure; nine in ten readings stay below it.

The constants are fitted on runs alone on an H200, with GPM's engine activity for NVML's utilisation; the caution also
holds for tasks that share the card (lab/results/simulation/inferred.json, by `python -m lab.tools.fit_inferred`).
Judged on an A100, on which nothing was fitted, the bounds hold for 87 to 100 %.

DRAM activity is at most NVML's memory utilisation where that is given: the share of time with any access to memory.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from carma.core.model.values import Activity, ActivitySource, Gpu, GpuSample, Record
from carma.core.telemetry.window import METRICS, given


class Curve(Record, frozen=True):
    factor: float
    exponent: float
    caution: float

    def expected(self, power: float, engine: float) -> float:
        if engine <= 0.0:
            return 0.0
        share = self.factor * (power / engine) ** self.exponent
        return engine * share if share < 1.0 else engine

    def bound(self, expected: float, engine: float) -> float:
        above = expected + self.caution * expected**0.5
        return above if above < engine else engine


SM_ACTIVE = Curve(0.964, 0.467, 0.095)
SM_OCCUPANCY = Curve(0.346, 0.344, 0.342)
DRAM_ACTIVE = Curve(0.337, 0.752, 0.389)
ROUNDING = 0.01  # NVML gives utilisations in whole percent
IDLE_POWER = 0.1  # largest share of the power range that is plausible without kernels


class InferredActivity(Record, frozen=True):
    """The expected figures, and what nine in ten stay below."""

    expected: Activity
    bound: Activity


def infer(power: float, engine: float, memory_util: float | None = None) -> InferredActivity:
    """`power`: share of the range between idle and the limit. `engine`: share of time with any kernel."""
    power, engine = _share(power), _share(engine)
    sm, occupancy, dram = (curve.expected(power, engine) for curve in (SM_ACTIVE, SM_OCCUPANCY, DRAM_ACTIVE))
    most = memory_util + ROUNDING if memory_util else inf  # 0 while kernels run counts as missing
    return InferredActivity(
        expected=Activity(sm_active=sm, sm_occupancy=occupancy, dram_active=min(dram, most), gr_active=engine),
        bound=Activity(
            sm_active=SM_ACTIVE.bound(sm, engine),
            sm_occupancy=SM_OCCUPANCY.bound(occupancy, engine),
            dram_active=min(DRAM_ACTIVE.bound(dram, engine), most),
            gr_active=engine,
        ),
    )


def completed(sample: GpuSample, gpu: Gpu, idle_w: float | None) -> GpuSample:
    """The sample with inferred figures and their bound, if its activity is not measured and can be inferred; otherwise
    the sample itself. `idle_w` None: unknown, which counts as 0."""
    shown = sample.activity
    if sample.fault is not None or None not in (shown.sm_active, shown.sm_occupancy, shown.dram_active):
        return sample
    watts, engine, limit_w, floor_w = sample.power_w, sample.gpu_util, gpu.power_limit_w, idle_w or 0.0
    if watts is None or engine is None or limit_w is None or not floor_w < limit_w < inf:
        return sample
    if not (0.0 <= watts < inf and 0.0 <= engine <= 1.0):
        return sample
    power = (watts - floor_w) / (limit_w - floor_w)
    if engine == 0.0 and power > IDLE_POWER:  # one of the two readings is wrong
        return sample
    found = infer(power, engine, sample.memory_util)
    return replace(sample, activity=found.expected, bound=found.bound)


def source_of(gpu: Gpu, newest: GpuSample | None) -> ActivitySource:
    """The source of the newest sample; before there is one, what the GPU is said to provide."""
    can = gpu.capabilities
    if newest is None or newest.fault is not None:
        return "measured" if set(METRICS) <= set(can.metrics) else "inferred" if can.source == "inferred" else "none"
    if any(given(newest, metric) is None for metric in METRICS):
        return "none"
    return "measured" if newest.bound is None else "inferred"


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
