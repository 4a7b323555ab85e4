"""No policy beats the bound, whatever the trace; and the parts of it are what they claim to be."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carma.core.model.values import Demand
from carma.core.scheduling.placement import Policy
from carma.core.scheduling.sharing_model import progress_rates
from carma.plugins import POLICIES, load_one, names
from carma.traces import TraceTask
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.bound import bound
from carma_lab.simulator.bound_completion import mean_busy_s
from carma_lab.simulator.bound_prices import prices
from carma_lab.simulator.bound_sets import Sets, Work, sets_of, work_of
from carma_lab.simulator.bound_stages import earliest_end_s, stages_of
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.small_simulations import row

CARD = cards.find("a100-40")
SLOW = settings(deadline=None, derandomize=True, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
Mechanism = Literal["mps", "timeslice"]

shares = st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])
unknown = st.one_of(st.none(), shares)
task = st.builds(
    row,
    arrival_s=st.floats(0.0, 1500.0),
    gpus=st.sampled_from([1, 1, 1, 2]),
    memory_mib=st.sampled_from([1_000, 9_000, 14_000, 21_000, 40_960]),
    seconds=st.floats(10.0, 2000.0),
    sm_active=shares,
    dram_active=shares,
    gr_active=unknown,
    power=unknown,
    start_s=st.sampled_from([0.0, 0.0, 30.0]),
    ramp_s=st.sampled_from([0.0, 0.0, 5.0, 400.0]),
    busy_gpus=st.sampled_from([0, 0, 1]),
)
tasks = st.lists(task, min_size=1, max_size=7).map(lambda rows: sorted(rows, key=lambda each: each.arrival_s))
mechanisms = st.sampled_from(["mps", "timeslice"])
caps = st.sampled_from([None, 1.0, 1.05, 1.2, 1.5])


@SLOW
@given(rows=tasks, gpus=st.sampled_from([2, 3]), mechanism=mechanisms, memory=st.sampled_from(["measured", "none"]))
def test_no_policy_beats_it(rows: list[TraceTask], gpus: int, mechanism: Mechanism, memory: str) -> None:
    found = bound(sim_made.trace(*rows), CARD, gpus, mechanism, launch_s=0.0)
    for name in names(POLICIES):
        policy = load_one(POLICIES, name)
        assert isinstance(policy, Policy)
        figures = sim_made.simulation(*rows, gpus=gpus, policy=policy, memory=memory, mechanism=mechanism).run()
        if figures.failed:
            continue  # a task that gives up ends early
        assert figures.makespan_s >= found.makespan_s * (1.0 - 1e-9)
        assert figures.completion_mean_s >= found.completion_mean_s * (1.0 - 1e-9)
        if figures.slowdown_max is not None and not figures.preemptions:
            capped = bound(
                sim_made.trace(*rows), CARD, gpus, mechanism, slowdown_cap=max(1.0, figures.slowdown_max), launch_s=0.0
            )
            assert figures.makespan_s >= capped.makespan_s * (1.0 - 1e-9)


@SLOW
@given(rows=tasks, gpus=st.sampled_from([2, 3]), mechanism=mechanisms)
def test_a_smaller_cap_never_makes_it_smaller(rows: list[TraceTask], gpus: int, mechanism: Mechanism) -> None:
    """As far as the solver goes."""
    trace = sim_made.trace(*rows)
    found = [bound(trace, CARD, gpus, mechanism, slowdown_cap=cap) for cap in (1.0, 1.05, 1.3, 2.0, 100.0, None)]
    for tighter, looser in pairwise(found):
        assert tighter.makespan_s >= looser.makespan_s * (1.0 - 2e-3)
        assert tighter.late_s >= looser.late_s * (1.0 - 2e-4)
        assert tighter.completion_mean_s == looser.completion_mean_s
    assert found[-2].makespan_s == pytest.approx(found[-1].makespan_s, rel=2e-3)
    alone = bound(trace, CARD, gpus, mechanism, tasks_per_gpu=1)
    assert found[0].makespan_s <= alone.makespan_s * (1.0 + 2e-3)


def test_memory_that_is_not_there_yet_shares_where_the_peak_would_not() -> None:
    """Nobody asks for memory here, so that the second warms up beside the first, which ends just in time."""
    rows = [row(seconds=100.0, memory_mib=30_000), row(seconds=1000.0, memory_mib=30_000, ramp_s=500.0)]
    figures = sim_made.simulation(*rows, memory="none").run()
    found = bound(sim_made.trace(*rows), CARD, 1, launch_s=0.0)
    assert figures.ooms == 0
    assert found.makespan_s <= figures.makespan_s < 1100.0


def listed(rows: list[TraceTask], mechanism: Mechanism, per_gpu: int = 4) -> tuple[Work, Sets]:
    work = work_of(sim_made.trace(*rows), per_gpu, 0.0)
    return work, sets_of(work.kinds, CARD.memory_mib, per_gpu, mechanism)


@SLOW
@given(rows=tasks, mechanism=mechanisms, cap=caps)
def test_under_the_prices_no_group_of_tasks_earns_more_than_one(
    rows: list[TraceTask], mechanism: Mechanism, cap: float | None
) -> None:
    """Every group of tasks that fits, not only the sets that were thought worth a look."""
    work, sets = listed(rows, mechanism)
    priced, _ = prices(sets, work.by_kind(), set(), work.most_by_kind(cap))
    found, fees = priced.prices, np.zeros(len(work.kinds)) if priced.fees is None else priced.fees
    assert (found >= 0.0).all()
    assert (fees >= 0.0).all()
    for size in range(1, 5):
        for group in combinations_with_replacement(range(len(work.kinds)), size):
            members = [work.kinds[place] for place in group]
            if sum(kind.memory_mib for kind in members) > CARD.memory_mib:
                continue
            if any(group.count(place) > work.kinds[place].tasks for place in group):
                continue
            rates = progress_rates([kind.demand for kind in members], mechanism)
            assert float(found[list(group)] @ np.array(rates) - fees[list(group)].sum()) <= 1.0 + 1e-9


def best_end_s(work: Work, sets: Sets, at_s: Any, gpus: int, cap: float | None = None) -> float:
    """The same linear program with all columns, told in another way: what comes late is done late."""
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    kinds, count, columns = len(work.kinds), len(at_s), len(sets.members)
    stages = stages_of(work, at_s)
    lengths = [after - before for before, after in pairwise(at_s)] + [0.0]
    size = 1 + columns * count
    rows, most = [], []
    progress = sets.progress(np.arange(columns), kinds)
    heads = Sets(sets.members, (sets.members < kinds).astype(float), sets.ranks).progress(np.arange(columns), kinds)

    def line(length: float, limit: float, parts: dict[int, Any]) -> None:
        made = np.zeros(size)
        made[0] = -length
        for stage, part in parts.items():
            made[1 + stage * columns : 1 + (stage + 1) * columns] = part
        rows.append(made)
        most.append(limit)

    for stage in range(count):
        last = stage == count - 1
        possible = sets.possible(stages.tasks[:, stage])
        line(gpus if last else 0.0, gpus * lengths[stage], {stage: np.ones(columns)})
        line(0.0, 0.0, {stage: (~possible).astype(float)})
        for kind in range(kinds):
            pieces = stages.pieces[kind, stage]
            line(pieces if last else 0.0, pieces * lengths[stage], {stage: heads[kind]})
            to_do = stages.new_gpu_s[kind, stage:].sum()
            line(0.0, -to_do, dict.fromkeys(range(stage, count), -progress[kind]))
    most_gpu_s = work.most_by_kind(cap)
    for kind in range(kinds if most_gpu_s is not None else 0):
        line(0.0, most_gpu_s[kind], dict.fromkeys(range(count), heads[kind]))  # type: ignore[index]
    cost = np.zeros(size)
    cost[0] = 1.0
    found = linprog(cost, A_ub=np.array(rows), b_ub=np.array(most), method="highs")
    return float(at_s[-1] + found.fun)


@SLOW
@given(rows=tasks, mechanism=mechanisms, gpus=st.sampled_from([1, 2]), cap=caps)
def test_stages_come_to_the_optimum_of_the_program(
    rows: list[TraceTask], mechanism: Mechanism, gpus: int, cap: float | None
) -> None:
    work, sets = listed(rows, mechanism, per_gpu=3)
    at_s = np.unique(work.release_s)
    found = earliest_end_s(sets, stages_of(work, at_s, cap), gpus, [], 0.0)
    best = best_end_s(work, sets, at_s, gpus, cap)
    assert best * (1.0 - 2e-3) <= found <= best * (1.0 + 1e-6)


@SLOW
@given(rows=tasks, mechanism=mechanisms)
def test_stages_are_no_worse_than_any_moment_and_few_are_no_better_than_many(
    rows: list[TraceTask], mechanism: Mechanism
) -> None:
    work, sets = listed(rows, mechanism)
    at_s = np.unique(work.release_s)
    found = earliest_end_s(sets, stages_of(work, at_s), 2, [], 0.0)
    fewer = earliest_end_s(sets, stages_of(work, at_s[:1]), 2, [], 0.0)
    assert fewer <= found * (1.0 + 2e-3)
    for place, release_s in enumerate(work.release_s):
        left = work.by_kind(place)
        priced, _ = prices(sets, left, set())
        assert release_s + priced.prices @ left / 2 <= found * (1.0 + 2e-3)


@pytest.mark.parametrize(
    ("release_s", "sizes", "weights", "expected"),
    [
        ([0.0, 0.0], [1.0, 3.0], [1.0, 1.0], [0.5, 2.5]),
        ([0.0, 0.0], [1.0, 3.0], [0.1, 1.0], [3.5, 1.5]),
        ([0.0, 2.0], [10.0, 1.0], [1.0, 1.0], [5.8, 2.5]),
        ([0.0, 5.0], [1.0, 1.0], [1.0, 1.0], [0.5, 5.5]),
    ],
)
def test_mean_busy_times(
    release_s: list[float], sizes: list[float], weights: list[float], expected: list[float]
) -> None:
    found = mean_busy_s(np.array(release_s), np.array(sizes), np.array(weights))
    assert found.tolist() == pytest.approx(expected)


@SLOW
@given(demands=st.lists(st.builds(Demand, shares, shares, shares, unknown, unknown), min_size=1, max_size=4),
       other=st.builds(Demand, shares, shares, shares, unknown, unknown), mechanism=mechanisms)  # fmt: skip
def test_a_neighbour_never_makes_a_task_faster(demands: list[Demand], other: Demand, mechanism: Mechanism) -> None:
    """What the bound leaves out, it may leave out because of this."""
    without = progress_rates(demands, mechanism)
    beside = progress_rates([*demands, other], mechanism)
    assert all(before >= after - 1e-12 for before, after in zip(without, beside, strict=False))
