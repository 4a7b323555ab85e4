"""The bound on cases whose best schedule can be worked out by hand, and on the published traces."""

from __future__ import annotations

import sys

import msgspec
import pytest

from carma.core.scheduling.sharing_model import progress_rates
from carma.errors import Refused, Usage
from carma.traces import TraceTask, find
from carma_lab.simulator import bound_sets
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.bound import LAUNCH_S, Bound, bound
from carma_lab.simulator.request import Request, simulation
from carma_lab.simulator.simulation import Setup
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.small_simulations import row

CARD = cards.find("a100-40")
HALF, WHOLE = {"sm_active": 0.5, "gr_active": 0.5, "power": 0.3}, {"sm_active": 1.0, "gr_active": 1.0, "power": 1.0}
BUSY = {"sm_active": 0.8, "gr_active": 0.9, "power": 0.6, "memory_mib": 20_000}  # no more than two fit


def limit(*rows: TraceTask, gpus: int = 1, **options: object) -> Bound:
    given: dict[str, object] = {"launch_s": 0.0, **options}
    return bound(sim_made.trace(*rows), CARD, gpus, **given)  # type: ignore[arg-type]


def test_one_task_takes_its_time_however_many_gpus_there_are() -> None:
    found = limit(row(100.0, seconds=600.0), gpus=8)
    assert found.makespan_s == pytest.approx(600.0)
    assert found.stages_s == pytest.approx(600.0)  # a task is on one GPU at a time
    assert found.work_s == pytest.approx(600.0 / 8)
    assert found.completion_mean_s == found.alone_mean_s == pytest.approx(600.0)


def test_a_pair_that_gains_runs_together() -> None:
    rate, same = progress_rates([row(**HALF).demand] * 2)
    assert rate == same > 0.6
    found = limit(row(**HALF), row(**HALF))
    assert found.makespan_s == pytest.approx(600.0 / rate)


def test_a_pair_that_loses_runs_one_after_the_other() -> None:
    assert sum(progress_rates([row(**WHOLE).demand] * 2, "timeslice")) < 1.0
    found = limit(row(**WHOLE), row(**WHOLE), mechanism="timeslice")
    assert found.makespan_s == pytest.approx(1200.0)
    assert found.completion_mean_s == pytest.approx(900.0)  # after 600 s and 1,200 s
    assert found.alone_mean_s == pytest.approx(600.0)


def test_the_shorter_one_is_gone_and_the_longer_one_has_the_gpu_for_itself() -> None:
    rate, _ = progress_rates([row(**HALF).demand] * 2)
    found = limit(row(**HALF, seconds=300.0), row(**HALF, seconds=900.0))
    together_s = 300.0 / rate
    assert found.makespan_s <= together_s + 600.0 + 1e-6
    assert found.makespan_s == pytest.approx(max(900.0, 1200.0 / rate / 2), rel=1e-3)


def test_memory_forbids_a_pair() -> None:
    large = {**HALF, "memory_mib": 30_000}
    assert limit(row(**large), row(**large)).makespan_s == pytest.approx(1200.0)
    assert limit(row(**large), row(**large), gpus=2).makespan_s == pytest.approx(600.0)


def test_a_pair_that_just_fits_is_no_pair_on_a_card_that_is_smaller_by_one_mib() -> None:
    half = {**HALF, "memory_mib": CARD.memory_mib // 2}
    smaller = msgspec.structs.replace(CARD, memory_mib=CARD.memory_mib - 1)
    rows = sim_made.trace(row(**half), row(**half))
    assert bound(rows, CARD, 1, launch_s=0.0).makespan_s < 1000.0
    assert bound(rows, smaller, 1, launch_s=0.0).makespan_s == pytest.approx(1200.0)


def test_at_most_the_allowed_number_of_tasks_share_a_gpu() -> None:
    rows = [row(sm_active=0.0, gr_active=0.0, power=0.0, memory_mib=100) for _ in range(8)]
    assert limit(*rows, tasks_per_gpu=1).makespan_s == pytest.approx(4800.0)
    assert limit(*rows, tasks_per_gpu=2).makespan_s == pytest.approx(2400.0)
    assert limit(*rows, tasks_per_gpu=4).makespan_s == pytest.approx(1200.0)


def saved_s(whole_s: float, cap: float) -> float:
    """What two alike that take so long alone save by sharing as long as the cap lets them, however they do it: in y
    seconds together each is (1 - rate) y late, and one after the other they would have taken 2 rate y."""
    rate, _ = progress_rates([row(**BUSY).demand] * 2)
    assert 0.6 < rate < 0.75
    together_s = min(whole_s * (cap - 1.0) / (1.0 - rate), whole_s / rate)
    return (2.0 * rate - 1.0) * together_s


@pytest.mark.parametrize("cap", [1.0, 1.05, 1.1, 1.2, 4.0, 1e9])
def test_under_a_cap_they_share_for_as_long_as_it_allows(cap: float) -> None:
    found = limit(row(**BUSY), row(**BUSY), slowdown_cap=cap)
    assert found.makespan_s == pytest.approx(1200.0 - saved_s(600.0, cap), rel=1e-3)
    assert found.work_s == pytest.approx(found.makespan_s, rel=1e-3)
    assert found.completion_mean_s == limit(row(**BUSY), row(**BUSY)).completion_mean_s


@pytest.mark.parametrize("before", [{"start_s": 60.0}, {"ramp_s": 60.0}])
def test_what_a_cap_allows_follows_from_the_whole_run(before: dict[str, float]) -> None:
    """Also from the part before the peak of memory: it may have gone by alone."""
    found = limit(row(**BUSY, **before), row(**BUSY, **before), slowdown_cap=1.1)
    assert found.makespan_s == pytest.approx(60.0 + 1080.0 - saved_s(600.0, 1.1), rel=1e-3)


def test_late_work_has_only_what_the_cap_allows_to_those_who_come_late() -> None:
    found = limit(row(0.0, **BUSY), row(3000.0, **BUSY), row(3000.0, **BUSY), slowdown_cap=1.1)
    assert found.late_s == pytest.approx(3000.0 + 1200.0 - saved_s(600.0, 1.1))
    assert found.stages_s < found.late_s  # there the first one may lend


def test_the_allowance_of_a_task_on_two_gpus_is_of_both() -> None:
    wide = {**BUSY, "gpus": 2}
    found = limit(row(**wide), row(**wide), gpus=2, slowdown_cap=1.1)
    assert found.makespan_s == pytest.approx(1200.0 - saved_s(600.0, 1.1), rel=1e-3)


def test_a_cap_of_one_is_a_gpu_for_each() -> None:
    rows = [row(100.0 * place, **BUSY, seconds=200.0 + 90.0 * place) for place in range(6)]
    alone, capped = limit(*rows, gpus=2, tasks_per_gpu=1), limit(*rows, gpus=2, slowdown_cap=1.0)
    assert capped.makespan_s == pytest.approx(alone.makespan_s, rel=2e-3)


def test_a_task_may_be_slower_than_the_cap_for_a_while() -> None:
    """A long one that is slowed down by far more than the cap, by a short one: over its whole run it keeps to it."""
    narrow = {"sm_active": 0.1, "gr_active": 1.0, "power": 0.05}
    wide = {"sm_active": 1.0, "gr_active": 0.5, "power": 0.8}
    rows = [row(0.0, **narrow, seconds=5000.0), row(1000.0, **wide, seconds=200.0)]
    figures = sim_made.simulation(*rows).run()
    slow, _ = progress_rates([each.demand for each in rows])
    assert figures.slowdown_max is not None
    assert figures.slowdown_max < 1.1 < 1.0 / slow
    found = limit(*rows, slowdown_cap=figures.slowdown_max)
    assert 5000.0 < found.makespan_s <= figures.makespan_s < 5200.0


@pytest.mark.parametrize("cap", [0.99, float("nan"), float("inf")])
def test_a_cap_that_no_task_can_keep_is_refused(cap: float) -> None:
    with pytest.raises(Usage, match="slowdown cap"):
        limit(row(), slowdown_cap=cap)


def test_arrivals_dominate() -> None:
    found = limit(row(1000.0), row(5000.0, seconds=700.0))
    assert found.makespan_s == found.arrivals_s == pytest.approx(4700.0)


def test_late_work_cannot_be_done_early() -> None:
    large = {**HALF, "memory_mib": 30_000}
    found = limit(row(0.0, **large), *(row(3000.0, **large) for _ in range(3)))
    assert found.work_s == pytest.approx(2400.0)
    assert found.arrivals_s == pytest.approx(3600.0)
    assert found.makespan_s == found.late_s == pytest.approx(4800.0)


def test_the_time_of_a_gpu_that_no_task_could_use_is_lost() -> None:
    """The first task cannot use both GPUs, so that some of it is left when the others come."""
    found = limit(
        row(0.0, memory_mib=30_000, seconds=1500.0),
        row(1000.0, memory_mib=31_000, seconds=1500.0),
        row(1000.0, memory_mib=31_000, seconds=1500.0),
        row(1000.0, memory_mib=32_000, seconds=500.0),
        gpus=2,
    )
    assert found.work_s == pytest.approx(2500.0)
    assert found.late_s == pytest.approx(2750.0)
    assert found.makespan_s == found.stages_s == pytest.approx(3000.0, rel=1e-3)


def test_no_task_shares_a_gpu_with_a_task_that_has_not_arrived() -> None:
    """The first and the last are alike and would not slow one another; the other two share with no task."""
    light = {"sm_active": 0.0, "gr_active": 0.0, "power": 0.0}
    found = limit(
        row(0.0, **light, seconds=1000.0),
        row(0.0, memory_mib=CARD.memory_mib, seconds=500.0),
        row(1000.0, memory_mib=CARD.memory_mib, seconds=1000.0),
        row(1000.0, **light, seconds=10.0),
    )
    assert found.late_s < 2010.0
    assert 2250.0 < found.makespan_s == found.stages_s <= 2500.0


def test_a_task_on_two_gpus_is_two_pieces_of_work() -> None:
    wide, large = {**HALF, "gpus": 2, "memory_mib": 30_000}, {**HALF, "memory_mib": 30_000}
    assert limit(row(**wide), gpus=2).makespan_s == pytest.approx(600.0)
    assert limit(row(**wide), row(**large), row(**large), gpus=2).makespan_s == pytest.approx(1200.0)


def test_start_up_and_launch_count_once() -> None:
    found = limit(row(seconds=600.0, start_s=60.0), launch_s=2.0)
    assert found.makespan_s == found.stages_s == pytest.approx(602.0)
    assert found.arrivals_s == found.work_s == found.alone_mean_s == pytest.approx(602.0)


def test_launching_takes_as_long_as_in_the_simulator() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(Setup)}
    assert fields["launch_s"] == LAUNCH_S


def test_too_many_kinds_are_left_out_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(memory_mib=20_000 + place, seconds=100.0 * place) for place in range(1, 7)]
    whole = limit(*rows)
    monkeypatch.setattr(bound_sets, "MOST_SETS", 40)
    part = limit(*rows)
    assert whole.counted == 1.0
    assert 0.5 < part.counted < 1.0
    assert 600.0 <= part.makespan_s < whole.makespan_s
    assert part.alone_mean_s == whole.alone_mean_s == pytest.approx(350.0)


def test_what_could_never_run_is_refused() -> None:
    with pytest.raises(Usage, match="2 GPUs; there are 1"):
        limit(row(gpus=2))
    with pytest.raises(Usage, match="50,000 MiB"):
        limit(row(memory_mib=50_000))
    with pytest.raises(Usage, match="no task"):
        limit()


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(Refused, match="scipy") as refused:
        limit(row())
    assert str(refused.value.hint) == "pip install scipy"


@pytest.mark.parametrize(
    ("name", "exclusive_h", "share"),
    [("t1", 7.70, 0.59), ("t2", 9.67, 0.63), ("mix", 12.02, 0.37), ("heavy", 9.92, 0.33)],
)
def test_arrivals_of_the_published_traces(name: str, exclusive_h: float, share: float) -> None:
    """Over the makespan of strict FIFO on exclusive GPUs, as derived from the published arrivals and run times."""
    found = bound(find(name), CARD, 4, tasks_per_gpu=1)
    assert found.arrivals_s / 3600 / exclusive_h == pytest.approx(share, abs=0.006)


def test_the_published_heavy_trace_comes_near_its_bound() -> None:
    trace = find("heavy")
    found = bound(trace, CARD, 4)
    assert found.arrivals_s < found.work_s <= found.late_s * (1.0 + 1e-12) < found.stages_s == found.makespan_s
    assert found.completion_mean_s > 1.5 * found.alone_mean_s
    for policy in ("magm", "lug"):
        figures = simulation(Request(trace="heavy", policy=policy)).run()
        assert found.makespan_s <= figures.makespan_s < 1.4 * found.makespan_s
        assert found.completion_mean_s <= figures.completion_mean_s


@pytest.mark.parametrize("cap", [1.1, 1.25, 1.5, 2.0])
def test_goodput_does_not_beat_the_bound_at_its_cap(cap: float) -> None:
    """Where a task took longer than the cap allows, the bound is that of what it took."""
    trace = find("heavy")
    figures = simulation(Request(trace="heavy", policy="goodput", settings={"placement.slowdown_cap": cap})).run()
    assert figures.slowdown_max is not None
    found = bound(trace, CARD, 4, slowdown_cap=max(cap, figures.slowdown_max))
    free = bound(trace, CARD, 4)
    assert free.makespan_s * (1.0 - 1e-3) <= found.makespan_s <= figures.makespan_s
    if figures.slowdown_max <= 1.25:
        assert found.makespan_s > 1.05 * free.makespan_s
