"""From what a task shows on one card to what it shows on another: pure arithmetic over the cards' rates.

What an SM or a part of it does is conserved, and takes as long as the other card needs for it:

- **idle**: no kernel runs (1 - engine activity). The processor launches or waits; that stays as long as it is.
- **SM time** (SM activity) is cut by what bounds it. As long as DRAM moves data at the rate of a plain copy, bandwidth
  does; as long as the tensor cores or the fp32 lanes are busy, their arithmetic does; the rest waits for instructions
  and latency, and goes with SMs times clock. A kernel that fills few of 132 SMs fills more of 108: the same SM time,
  over fewer SMs.
- **narrow**: a kernel runs, but part of the SMs have nothing to do (engine activity less SM activity). Such kernels are
  too small for the card, and stretch with the clock alone.

From the parts follow the step on the other card and what it shows. Warps on an SM that has work stay as many (both
kinds hold 64). Bytes of a step stay as many. Power comes from the other card's own curve over SM and DRAM activity, if
it has one; else it is in proportion to them (weights of core/scheduling/sharing_model.py), each task with the factor
by which it is off
that on the first card.

**Loader.** `known_ms` says how long a step really takes on the other card, where that is known. Where it is longer than
what comes out here, the difference is waiting, and every share falls in proportion. Where it is shorter, it holds: it
is a measurement, and this is not.

Assumptions, not measurements: that pipes are bound for exactly as long as they are busy, that caches catch the same
share of traffic, and that the other machine's processor launches as fast.

Not blind: the parts were chosen after a look at what was published of six tasks on an A100 (an earlier cut, by peak
arithmetic alone, made ResNet-50 a quarter too slow), and the A100's power curve is fitted on published figures of
such tasks. So agreement with those figures is no independent proof, for power least of all.
"""

from __future__ import annotations

from carma.core.model.values import Demand, Record
from carma.core.scheduling.sharing_model import POWER_OF_DRAM, POWER_OF_SM
from carma_lab.simulator import simulated_cards
from carma_lab.simulator.simulated_cards import Curve

COPY_REACHES = 0.85  # of the peak bandwidth: what a kernel that only copies shows as DRAM activity
FULL = 0.98  # no counter shows more than about this over seconds
LEAST_POWER = 0.02  # of the range above idle: a card with a task on it holds its clocks up


class Rates(Record, frozen=True, kw_only=True):
    """A card by its data sheet: dense peaks in TFLOP/s, bandwidth in GB/s, boost clock in MHz, watts."""

    sms: int
    clock_mhz: float
    fp32_tflops: float
    tensor_tflops: float  # TF32, which convolutions use by torch's defaults
    dram_gbs: float
    idle_w: float
    most_w: float
    curve: Curve | None = None  # of power, where the card has one


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
    """What the task shows on the card `to`; see the module's text for what is assumed."""
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
    """How long SMs have work on the other card, as a mean over them."""
    copies, tensor, plain = shown.dram_active / COPY_REACHES, shown.tensor_active, shown.fp32_active
    bound = copies + tensor + plain
    over = max(1.0, bound / max(shown.sm_active, 1e-9))  # where they overlap, each counts for less
    stretched = (
        copies * of.dram_gbs / to.dram_gbs
        + tensor * of.tensor_tflops / to.tensor_tflops
        + plain * of.fp32_tflops / to.fp32_tflops
    ) / over
    rest = max(0.0, shown.sm_active - bound)
    return shown.step_ms * (stretched + rest * (of.sms * of.clock_mhz) / (to.sms * to.clock_mhz))


def _warps(shown: Shown) -> float:
    """On an SM that has work, as a share of what it holds."""
    return min(1.0, shown.sm_occupancy / shown.sm_active) if shown.sm_active > 0 else 0.0


def _power(shown: Shown, demand: Demand, of: Rates, to: Rates) -> float:
    """The share of what the other card can draw above idle."""
    if to.curve is not None:
        return max(LEAST_POWER, to.curve.share(demand.sm_active, demand.dram_active))
    drawn = _part((shown.power_w - of.idle_w) / (of.most_w - of.idle_w))
    expected = POWER_OF_SM * shown.sm_active + POWER_OF_DRAM * shown.dram_active
    own = drawn / expected if expected > 0 else 1.0
    return max(LEAST_POWER, _part(own * (POWER_OF_SM * demand.sm_active + POWER_OF_DRAM * demand.dram_active)))


def _part(value: float) -> float:
    return min(1.0, max(0.0, value))
