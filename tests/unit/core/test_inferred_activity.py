"""Activity inferred from power and engine utilisation, and what the core makes of it."""

from __future__ import annotations

from math import nan

import pytest
from hypothesis import given, strategies
from msgspec.structs import asdict, replace

from carma.core.model.events import GpusFound
from carma.core.model.values import NO_ACTIVITY, Activity, Capabilities, Gpu, GpuId, GpuSample
from carma.core.policies.goodput import POLICY as GOODPUT
from carma.core.policies.magm import POLICY as MAGM
from carma.core.scheduling.policy import Policy
from carma.core.telemetry.inferred_activity import ROUNDING, completed, infer, source_of
from carma.core.telemetry.pace import BELIEVED_S
from carma.core.telemetry.window import METRICS, Window
from carma.testing.builders import World

GPU = Gpu(id=GpuId("GPU-0"), index=0, name="a card", memory_mib=24_000, power_limit_w=350.0)
SAMPLE = GpuSample(gpu=GPU.id, at=1.0, memory_used_mib=100, gpu_util=0.6, power_w=190.0)
shares = strategies.floats(0.0, 1.0)


@given(shares, shares, strategies.one_of(strategies.none(), shares))
def test_no_figure_exceeds_its_bound_and_no_bound_the_engine_activity(
    power: float, engine: float, memory_util: float | None
) -> None:
    found = infer(power, engine, memory_util)
    for metric in METRICS:
        assert 0.0 <= getattr(found.expected, metric) <= getattr(found.bound, metric) <= engine


@given(shares, shares, shares)
def test_more_power_never_means_less_activity(power: float, more: float, engine: float) -> None:
    low, high = (asdict(infer(one, engine).bound) for one in sorted((power, more)))
    assert all(low[metric] <= high[metric] for metric in METRICS)


def test_a_gpu_without_kernels_shows_no_activity_whatever_it_draws() -> None:
    found = infer(0.1, 0.0)
    assert found.expected == found.bound == Activity(sm_active=0.0, sm_occupancy=0.0, dram_active=0.0, gr_active=0.0)


def test_memory_utilisation_limits_dram_activity_unless_it_reads_zero() -> None:
    free, limited, zero = infer(0.7, 0.9), infer(0.7, 0.9, 0.1), infer(0.7, 0.9, 0.0)
    assert free.expected.dram_active is not None
    assert free.expected.dram_active > 0.2
    assert limited.expected.dram_active == limited.bound.dram_active == pytest.approx(0.1 + ROUNDING)
    assert zero == free


def test_a_sample_is_completed_from_power_above_idle_and_utilisation() -> None:
    found = completed(SAMPLE, GPU, 30.0)
    assert found.activity == infer(0.5, 0.6).expected
    assert found.bound == infer(0.5, 0.6).bound


def test_unknown_idle_power_counts_as_none_and_is_the_cautious_side() -> None:
    known, unknown = completed(SAMPLE, GPU, 30.0), completed(SAMPLE, GPU, None)
    assert known.activity.sm_active is not None
    assert unknown.activity.sm_active is not None
    assert unknown.activity.sm_active > known.activity.sm_active


@pytest.mark.parametrize(
    ("gpu", "sample"),
    [
        (GPU, replace(SAMPLE, power_w=None)),
        (GPU, replace(SAMPLE, power_w=nan)),
        (GPU, replace(SAMPLE, gpu_util=None)),
        (GPU, replace(SAMPLE, fault="lost")),
        (replace(GPU, power_limit_w=None), SAMPLE),
        (replace(GPU, power_limit_w=20.0), SAMPLE),
    ],
)
def test_without_power_its_range_or_utilisation_activity_stays_missing(gpu: Gpu, sample: GpuSample) -> None:
    found = completed(sample, gpu, 30.0)
    assert (found.activity, found.bound) == (NO_ACTIVITY, None)


def test_power_without_kernels_is_a_contradiction_and_activity_stays_missing() -> None:
    idle = replace(SAMPLE, gpu_util=0.0)
    near, far = (replace(idle, power_w=30.0 + 320.0 * share) for share in (0.09, 0.5))
    assert completed(near, GPU, 30.0).activity.sm_active == 0.0
    assert completed(far, GPU, 30.0) is far


def test_measured_activity_stays_as_it_is() -> None:
    measured = replace(SAMPLE, activity=Activity(sm_active=0.1, sm_occupancy=0.1, dram_active=0.1))
    assert completed(measured, GPU, 30.0) is measured


def test_a_window_summarises_the_bounds_for_the_gate_and_tells_the_expected_means() -> None:
    window = Window(30.0)
    for at in (1.0, 2.0, 3.0):
        window.add(completed(replace(SAMPLE, at=at), GPU, 30.0))
    expected, bound = infer(0.5, 0.6).expected, infer(0.5, 0.6).bound
    assert window.gauges()["sm_active"].mean == pytest.approx(bound.sm_active)
    assert window.mean("sm_active") == pytest.approx(expected.sm_active)
    assert window.mean("tensor_active") is None


class PowerOnly(World):
    """One GPU that shows power and utilisation only; a task that uses it takes `load` of both."""

    def __init__(self, load: float, limit_w: float | None = 250.0, policy: Policy = MAGM) -> None:
        self.load = load
        super().__init__(1, policy=policy)
        (gpu,) = self.state.gpus.values()
        can = Capabilities(power=True, energy=True, processes=True, source="inferred")
        self.emit(GpusFound(self.now, (replace(gpu, capabilities=can, power_limit_w=limit_w),)))

    def _sample(self, found: Gpu) -> GpuSample:
        sample = super()._sample(found)
        load = self.load if sample.processes else 0.0
        return replace(sample, activity=NO_ACTIVITY, gpu_util=load, power_w=50.0 + 200.0 * load)


def second_task(world: World) -> str:
    """The code of the refusal of a second task once the first has settled; empty if it is placed."""
    first = world.submit(4_000)
    world.settle()
    world.start(first)
    world.wait(60)
    second = world.submit(4_000)
    world.settle()
    refused = world.refusal(second, 0)
    return "" if world.placed(second) else refused.code if refused is not None else "?"


def test_a_gpu_without_counters_takes_a_second_task_while_its_inferred_activity_is_low() -> None:
    assert second_task(PowerOnly(0.3)) == ""


def test_a_gpu_without_counters_is_closed_by_its_inferred_activity() -> None:
    assert second_task(PowerOnly(0.85)) == "Utilisation"


def test_the_gate_judges_the_bound() -> None:
    """At this load the expected figures are below all caps."""
    expected, world = infer(0.65, 0.65).expected, PowerOnly(0.65)
    gate = world.state.rules.gate
    assert all(getattr(expected, metric) < getattr(gate, metric) for metric in METRICS)
    assert second_task(world) == "Utilisation"


@pytest.mark.parametrize("policy", [MAGM, GOODPUT], ids=["magm", "goodput"])
def test_a_gpu_whose_activity_cannot_be_inferred_takes_one_task(policy: Policy) -> None:
    assert second_task(PowerOnly(0.3, limit_w=None, policy=policy)) == "Metrics"
    assert second_task(PowerOnly(0.3, policy=policy)) == ""


def test_the_demand_of_a_task_is_not_learned_from_inferred_activity_beside_others() -> None:
    world = PowerOnly(0.3, policy=GOODPUT)
    assert second_task(world) == ""
    (first, second) = world.state.active
    world.start(second)
    world.wait(60 + BELIEVED_S)
    observed_s = [next(iter(world.state.tracks[key].on.values())).solo.seconds for key in world.state.active.values()]
    assert observed_s[0] >= BELIEVED_S
    assert observed_s[1] == 0.0
    assert (first, second) == tuple(world.state.active)


def test_the_demand_of_a_task_is_learned_from_the_expected_figures() -> None:
    world = PowerOnly(0.4)
    task = world.submit(4_000)
    world.settle()
    world.start(task)
    world.wait(30 + BELIEVED_S)
    (seen,) = world.state.tracks[world.state.active[task]].on.values()
    expected = infer(0.4, 0.4).expected
    assert seen.solo.demand.sm_active == pytest.approx(expected.sm_active, abs=0.01)
    assert seen.solo.demand.gr_active == pytest.approx(0.4, abs=0.01)
    assert seen.solo.demand.power is None  # so that rates get the larger caution


def test_the_source_is_that_of_the_newest_sample() -> None:
    world = PowerOnly(0.3)
    (gpu,) = world.state.gpus.values()
    assert source_of(gpu, None) == "inferred"
    world.wait(1)
    assert source_of(gpu, world.view(0).newest) == "inferred"
    assert source_of(gpu, replace(SAMPLE, power_w=None)) == "none"
    assert (
        source_of(gpu, replace(SAMPLE, activity=Activity(sm_active=0.1, sm_occupancy=0.1, dram_active=0.1)))
        == "measured"
    )
    assert source_of(replace(gpu, capabilities=Capabilities(source="nvml")), None) == "none"
    assert source_of(replace(gpu, capabilities=Capabilities(source="gpm", metrics=METRICS)), None) == "measured"
