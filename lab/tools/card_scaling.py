"""Scales the activity of a task from one card to another, by the cards' rates. Pure.

The work of each part of a step is conserved and takes the time that the other card needs for it:

- **idle**: no kernel runs (1 - engine activity); the processor launches or waits. This time stays the same.
- **SM time** (SM activity) is divided by its bottleneck: bandwidth while DRAM moves data at the rate of a plain copy,
  arithmetic while the tensor cores or the fp32 lanes are busy. The rest waits for instructions and latency, and scales
  with SMs times clock. A kernel that fills few of 132 SMs fills more of 108: the same SM time, over fewer SMs.
- **narrow**: a kernel runs, but some SMs have no work (engine activity less SM activity). Such kernels are too small
  for the card and scale with the clock alone.

The parts give the step on the other card and its activity. The number of warps on an active SM stays the same (both
kinds hold 64), and so do the bytes of a step. Power follows from the other card's curve over SM and DRAM activity if it
has one. Otherwise it is proportional to them (weights of core/scheduling/sharing_model.py), with the factor by which
the task deviates from these weights on the first card.

**Loader.** `known_ms` is the measured duration of a step on the other card, if known. If it is longer than the computed
one, the difference is waiting, and every share falls in proportion. If it is shorter, the measured value is used.

Assumptions, not measurements: pipes limit a kernel exactly while they are busy, caches catch the same share of
traffic, and the processor of the other server launches as fast.

The parts were chosen after reading published figures of six tasks on an A100 (a first version, by peak arithmetic
alone, made ResNet-50 a quarter too slow), and the power curve of the A100 is fitted on published figures of such tasks.
Agreement with those figures is therefore no independent proof, least of all for power.
"""

from __future__ import annotations

from carma.core.model.values import Demand, Record
from carma.core.scheduling.sharing_model import POWER_OF_DRAM, POWER_OF_SM
from carma_lab.simulator import simulated_cards
from carma_lab.simulator.simulated_cards import Curve

COPY_REACHES = 0.85  # DRAM activity of a kernel that only copies
FULL = 0.98  # about the largest value that a counter shows over seconds
LEAST_POWER = 0.02  # of the range above idle: a card with a task keeps its clocks high


class Rates(Record, frozen=True, kw_only=True):
    """A card by its data sheet: dense peaks in TFLOP/s, bandwidth in GB/s, boost clock in MHz, watts."""

    sms: int
    clock_mhz: float
    fp32_tflops: float
    tensor_tflops: float  # TF32, which convolutions use by torch's defaults
    dram_gbs: float
    idle_w: float
    most_w: float
    curve: Curve | None = None  # of power


class Shown(Record, frozen=True, kw_only=True):
    """A task alone on a card: a step, and means over it. A pipe that was not read counts as idle."""

    step_ms: float
    sm_active: float
    sm_occupancy: float
    dram_active: float
    gr_active: float
    power_w: float
    tensor_active: float = 0.0
    fp32_active: float = 0.0


class Scaled(Record, frozen=True, kw_only=True):
    """The same task on the other card. `gpu_ms` is a step without its loader, `busy_ms` the time with any kernel."""

    demand: Demand
    step_ms: float
    gpu_ms: float
    busy_ms: float
    power_w: float
    waits: float  # the share of a step that is spent on waiting for the loader


H200 = Rates(sms=132, clock_mhz=1980, fp32_tflops=66.9, tensor_tflops=494.0, dram_gbs=4800, idle_w=76.0, most_w=700.0)
A100_40 = Rates(
    sms=108,
    clock_mhz=1410,
    fp32_tflops=19.5,
    tensor_tflops=156.0,
    dram_gbs=1555,
    idle_w=simulated_cards.A100_40.idle_w,
    most_w=simulated_cards.A100_40.most_w,
    curve=simulated_cards.A100_40,
)


def scale(shown: Shown, of: Rates = H200, to: Rates = A100_40, known_ms: float | None = None) -> Scaled:
    """The activity of the task on the card `to`. The module docstring states the assumptions."""
    engine = _part(max(shown.gr_active, shown.sm_active))
    idle_ms = (1.0 - engine) * shown.step_ms
    narrow_ms = (engine - _part(shown.sm_active)) * shown.step_ms * of.clock_mhz / to.clock_mhz
    sm_ms = _sm_ms(shown, of, to)
    gpu_ms = idle_ms + narrow_ms + sm_ms
    step_ms = gpu_ms if known_ms is None else known_ms
    busy_ms = min(narrow_ms + sm_ms, step_ms)
    active = sm_ms / (narrow_ms + sm_ms or 1.0) * busy_ms / step_ms
    moved = shown.dram_active * shown.step_ms * of.dram_gbs
    demand = Demand(
        sm_active=min(FULL, active),
        sm_occupancy=min(FULL, active * _warps(shown)),
        dram_active=min(COPY_REACHES, moved / (step_ms * to.dram_gbs)),
        gr_active=min(1.0, busy_ms / step_ms),
    )
    drawn = _power(shown, demand, of, to)
    return Scaled(
        demand=Demand(demand.sm_active, demand.sm_occupancy, demand.dram_active, demand.gr_active, drawn),
        step_ms=step_ms,
        gpu_ms=gpu_ms,
        busy_ms=busy_ms,
        power_w=to.idle_w + drawn * (to.most_w - to.idle_w),
        waits=max(0.0, 1.0 - gpu_ms / step_ms),
    )


def _sm_ms(shown: Shown, of: Rates, to: Rates) -> float:
    """Mean busy time of an SM on the other card."""
    copies, tensor, plain = shown.dram_active / COPY_REACHES, shown.tensor_active, shown.fp32_active
    bound = copies + tensor + plain
    over = max(1.0, bound / max(shown.sm_active, 1e-9))  # overlapping parts count for less
    stretched = (
        copies * of.dram_gbs / to.dram_gbs
        + tensor * of.tensor_tflops / to.tensor_tflops
        + plain * of.fp32_tflops / to.fp32_tflops
    ) / over
    rest = max(0.0, shown.sm_active - bound)
    return shown.step_ms * (stretched + rest * (of.sms * of.clock_mhz) / (to.sms * to.clock_mhz))


def _warps(shown: Shown) -> float:
    """Share of the warp slots in use on an active SM."""
    return min(1.0, shown.sm_occupancy / shown.sm_active) if shown.sm_active > 0 else 0.0


def _power(shown: Shown, demand: Demand, of: Rates, to: Rates) -> float:
    """The share of the other card's power range above idle."""
    if to.curve is not None:
        return max(LEAST_POWER, to.curve.share(demand.sm_active, demand.dram_active))
    drawn = _part((shown.power_w - of.idle_w) / (of.most_w - of.idle_w))
    expected = POWER_OF_SM * shown.sm_active + POWER_OF_DRAM * shown.dram_active
    own = drawn / expected if expected > 0 else 1.0
    return max(LEAST_POWER, _part(own * (POWER_OF_SM * demand.sm_active + POWER_OF_DRAM * demand.dram_active)))


def _part(value: float) -> float:
    return min(1.0, max(0.0, value))
