"""The simulator spares samples that nobody could tell from those before, and puts off those that nobody waits for. What
is decided, when, and with which sentences is the same as if every sample were told at its time.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carma.core.model import events as e
from carma.core.model.settings import Rules
from carma.core.policies import exclusive, magm
from carma_lab.simulator.simulation import Simulation
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.random_simulations import EVERY_POLICY, simulations
from lab_fixtures.small_simulations import row

DECIDED = (
    e.TaskPlaced
    | e.RecoveryPlanned
    | e.RecoveryDue
    | e.TaskFinished
    | e.BookingShrunk
    | e.StopRequested
    | e.PreemptionRequested
    | e.PreemptionMissed
)


def decisions(made: Simulation) -> list[bytes]:
    return [msgspec.json.encode(event) for event in made.events() if isinstance(event, DECIDED)]


def telling_all(made: Simulation) -> Simulation:
    return Simulation(made.trace, replace(made.setup, every_sample=True))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_spared_samples_change_no_decision(policy: str) -> None:
    @settings(max_examples=10, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        made = data.draw(simulations(policy))
        every = telling_all(made)
        assert decisions(made) == decisions(every)
        assert made.figures(0.0) == every.figures(0.0)

    check()


def samples(made: Simulation) -> list[tuple[float, float]]:
    """When each was told, and when it was taken."""
    events = (event for event in made.events() if isinstance(event, e.GpusSampled))
    return [(event.at, sample.at) for event in events for sample in event.samples]


def test_a_gpu_to_which_nobody_can_come_is_hardly_looked_at() -> None:
    made = sim_made.simulation(row(1_000.0), row(1_000.0), rules=Rules(), policy=exclusive.POLICY)
    every = samples(telling_all(made))
    found = samples(made)
    assert {taken for _, taken in found} < {taken for _, taken in every}
    assert len(found) <= 3 * 5 < len(every)  # an idle GPU and two tasks: who came, what stayed; nobody


def test_what_those_show_that_share_is_sampled_as_often_as_ever() -> None:
    rows = [row(1_000.0 + place, seconds=600.0) for place in range(3)]
    made = sim_made.simulation(*rows, rules=Rules(), policy=magm.POLICY)
    every = telling_all(made)

    def used(one: Simulation) -> list[object]:
        shown = (event.samples for event in one.events() if isinstance(event, e.GpusSampled))
        return [sample for some in shown for sample in some if sample.processes]

    assert used(made) == used(every)


def test_while_nobody_waits_samples_are_told_before_the_next_thing_that_happens_to_a_task() -> None:
    made = sim_made.simulation(row(1_000.0, seconds=600.0), rules=Rules())
    told: list[tuple[float, float]] = []
    for event in made.events():
        if isinstance(event, e.GpusSampled):
            told.extend((event.at, sample.at) for sample in event.samples)
        elif isinstance(event, e.AttemptEnded):
            assert event.peak_mib == 4_000
            assert event.used_s > 500.0
            assert len(told) >= 10
    assert len({at for at, _ in told}) < len(told) / 3
    assert [taken for _, taken in told] == sorted(taken for _, taken in told)


def test_somebody_who_waits_is_shown_every_sample_at_its_time() -> None:
    rows = [row(1_000.0, seconds=600.0, memory_mib=30_000) for _ in range(2)]
    made = sim_made.simulation(*rows, rules=Rules())
    waited = [(at, taken) for at, taken in samples(made) if 1_010.0 < taken < 1_500.0]
    assert waited
    assert all(at == taken for at, taken in waited)


def test_all_that_was_seen_is_told_in_the_end() -> None:
    made = sim_made.simulation(row(1_000.0), rules=Rules())
    assert samples(made)[-1][1] > made.runs[-1].ended_s
    assert not made.state.tasks
