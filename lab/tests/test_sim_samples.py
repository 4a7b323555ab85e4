"""The core gets each sample at its time, from a change on a GPU until its windows hold only the present state."""

from __future__ import annotations

from carma.core.model import events as e
from carma.core.model.settings import Rules
from carma_lab.simulator.simulation import Simulation
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.small_simulations import row


def samples(made: Simulation) -> list[tuple[float, float]]:
    """When each was passed to the core, and when it was taken."""
    events = (event for event in made.events() if isinstance(event, e.GpusSampled))
    return [(event.at, sample.at) for event in events for sample in event.samples]


def test_each_sample_is_passed_to_the_core_at_its_time() -> None:
    for tasks in (1, 2):  # also while a task waits
        rows = [row(1_000.0, seconds=600.0, memory_mib=30_000) for _ in range(tasks)]
        found = samples(sim_made.simulation(*rows, rules=Rules()))
        assert len(found) >= 10
        assert all(at == taken for at, taken in found)


def test_nothing_is_sampled_while_nothing_changes() -> None:
    found = samples(sim_made.simulation(row(10_000.0), rules=Rules()))
    assert not [taken for _, taken in found if 1_000.0 < taken < 10_000.0]


def test_the_end_of_a_task_is_sampled() -> None:
    made = sim_made.simulation(row(1_000.0), rules=Rules())
    assert samples(made)[-1][1] > made.runs[-1].ended_s
    assert not made.state.tasks


def test_an_ended_attempt_has_the_peak_and_the_time_that_were_sampled() -> None:
    made = sim_made.simulation(row(1_000.0, seconds=600.0), rules=Rules())
    (ended,) = (event for event in made.events() if isinstance(event, e.AttemptEnded))
    assert ended.peak_mib == 4_000
    assert ended.used_s > 500.0
