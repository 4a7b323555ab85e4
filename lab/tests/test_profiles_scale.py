"""A task's figures on another card: what is conserved, what stretches, and what a loader does to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lab.tools.card_scaling import A100_40, COPY_REACHES, H200, Rates, Shown, scale

PLAIN = replace(A100_40, curve=None)
BUSY = Shown(
    step_ms=20.0,
    sm_active=0.6,
    sm_occupancy=0.3,
    dram_active=0.2,
    gr_active=0.8,
    power_w=400.0,
    tensor_active=0.1,
    fp32_active=0.05,
)


def test_the_same_card_shows_the_same() -> None:
    again = scale(BUSY, H200, H200)
    assert again.step_ms == pytest.approx(BUSY.step_ms)
    assert again.demand.sm_active == pytest.approx(BUSY.sm_active)
    assert again.demand.sm_occupancy == pytest.approx(BUSY.sm_occupancy)
    assert again.demand.dram_active == pytest.approx(BUSY.dram_active)
    assert again.demand.gr_active == pytest.approx(BUSY.gr_active)
    assert again.power_w == pytest.approx(BUSY.power_w)


def test_what_only_copies_goes_with_the_bandwidth() -> None:
    copying = replace(
        BUSY, sm_active=0.9, gr_active=0.9, dram_active=0.9 * COPY_REACHES, tensor_active=0.0, fp32_active=0.0
    )
    scaled = scale(copying, H200, PLAIN)
    assert scaled.busy_ms == pytest.approx(18.0 * H200.dram_gbs / PLAIN.dram_gbs)
    assert scaled.gpu_ms - scaled.busy_ms == pytest.approx(2.0)  # nothing ran there, and nothing does here


def test_what_waits_for_instructions_goes_with_sms_and_clock_and_small_kernels_with_the_clock_alone() -> None:
    light = replace(BUSY, dram_active=0.0, tensor_active=0.0, fp32_active=0.0)
    clock = H200.clock_mhz / A100_40.clock_mhz
    expected_ms = 20.0 * (0.6 * clock * H200.sms / A100_40.sms + 0.2 * clock)
    assert scale(light).busy_ms == pytest.approx(expected_ms)


def test_pipes_that_are_busy_go_with_their_own_arithmetic() -> None:
    none = replace(BUSY, dram_active=0.0, tensor_active=0.0, fp32_active=0.0)
    rest = H200.sms * H200.clock_mhz / (A100_40.sms * A100_40.clock_mhz)
    for pipe, more in (
        ("tensor_active", H200.tensor_tflops / A100_40.tensor_tflops),
        ("fp32_active", H200.fp32_tflops / A100_40.fp32_tflops),
    ):
        longer_ms = scale(replace(none, **{pipe: 0.3})).busy_ms - scale(none).busy_ms
        assert longer_ms == pytest.approx(20.0 * 0.3 * (more - rest))


def test_parts_that_overlap_never_make_more_than_there_is() -> None:
    crowded = replace(BUSY, dram_active=0.6, tensor_active=0.5, fp32_active=0.5)
    slowest = H200.fp32_tflops / A100_40.fp32_tflops
    assert scale(crowded).busy_ms <= 20.0 * (0.6 * slowest + 0.2 * H200.clock_mhz / A100_40.clock_mhz)


def test_a_task_that_waits_for_its_loader_shows_less_in_proportion() -> None:
    alone = scale(BUSY)
    waiting = scale(BUSY, known_ms=2 * alone.step_ms)
    assert waiting.waits == pytest.approx(0.5)
    assert waiting.demand.sm_active == pytest.approx(alone.demand.sm_active / 2)
    assert waiting.demand.sm_occupancy == pytest.approx(alone.demand.sm_occupancy / 2)
    assert waiting.demand.dram_active == pytest.approx(alone.demand.dram_active / 2)
    assert waiting.power_w < alone.power_w


def test_a_known_step_that_is_shorter_holds() -> None:
    fast = scale(BUSY, known_ms=scale(BUSY).busy_ms / 2)
    assert fast.step_ms == fast.busy_ms
    assert fast.demand.gr_active == pytest.approx(1.0)
    assert fast.waits == 0.0


def test_power_follows_the_cards_curve_where_it_has_one() -> None:
    nothing = replace(BUSY, sm_active=0.0, sm_occupancy=0.0, dram_active=0.0, gr_active=0.0)
    nothing = replace(nothing, tensor_active=0.0, fp32_active=0.0)
    assert scale(nothing).power_w < A100_40.idle_w + 10.0
    assert A100_40.idle_w + 10.0 < scale(BUSY).power_w < A100_40.most_w
    hungry = replace(BUSY, power_w=600.0)
    assert scale(hungry).power_w == scale(BUSY).power_w  # the curve tells
    assert scale(hungry, H200, PLAIN).power_w > scale(BUSY, H200, PLAIN).power_w  # the task's own factor tells


share = st.floats(0.0, 1.0)


@given(
    sm=share,
    more=share,
    warps=share,
    dram=share,
    tensor=share,
    fp32=share,
    step_ms=st.floats(0.1, 1e4),
    power_w=st.floats(0.0, 800.0),
    known=st.none() | st.floats(0.1, 1e5),
    to=st.sampled_from((A100_40, PLAIN, H200)),
)
def test_whatever_was_measured_gives_figures_that_can_be(
    sm: float,
    more: float,
    warps: float,
    dram: float,
    tensor: float,
    fp32: float,
    step_ms: float,
    power_w: float,
    known: float | None,
    to: Rates,
) -> None:
    shown = Shown(
        step_ms=step_ms,
        sm_active=sm,
        sm_occupancy=sm * warps,
        dram_active=dram,
        gr_active=min(1.0, sm + more),
        power_w=power_w,
        tensor_active=tensor,
        fp32_active=fp32,
    )
    scaled = scale(shown, H200, to, known_ms=known)
    demand = scaled.demand
    assert demand.gr_active is not None
    assert demand.power is not None
    for value in (demand.sm_active, demand.sm_occupancy, demand.dram_active, demand.gr_active, demand.power):
        assert 0.0 <= value <= 1.0
    assert demand.sm_active <= demand.gr_active + 1e-9
    assert demand.sm_occupancy <= demand.sm_active + 1e-9
    assert to.idle_w <= scaled.power_w <= to.most_w
    assert 0.0 <= scaled.busy_ms <= scaled.step_ms * (1 + 1e-9)
    assert 0.0 <= scaled.waits < 1.0
