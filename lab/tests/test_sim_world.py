"""The truth of a simulated server: rates, memory and energy can be worked out by hand."""

from __future__ import annotations

import pytest

from carma.core.model import events as e
from carma.core.model.values import Demand
from carma.core.policies import lug
from carma.core.scheduling.sharing_model import progress_rates
from carma_lab.simulator import simulated_cards as cards
from lab_fixtures.small_simulations import row, simulation

BEGIN_S = 5.0  # the first look at the GPUs: before it nothing is known, so nothing starts
A100 = cards.find("a100-40")


def test_alone_a_task_takes_its_time() -> None:
    made = simulation(row(seconds=600.0))
    figures = made.run()
    assert figures.makespan_s == pytest.approx(600.0 + BEGIN_S)
    assert figures.slowdown_mean == pytest.approx(1.0)
    assert (figures.ooms, figures.failed) == (0, 0)


def test_a_paused_task_keeps_its_memory_and_its_neighbour_goes_at_full_speed() -> None:
    made = simulation(row(seconds=600.0, name="first"), row(100.0, seconds=3_000.0, name="second"))
    made.world._noise = lambda names, rates: [0.4 / rates[0] if name == "first" else 9.0 for name in names]
    events = []
    for event in made.events():
        events.append(event)
        if isinstance(event, e.TaskUnpaused):
            assert made.world.boards[0].used_mib == 2 * 4_000
    (began,) = (event for event in events if isinstance(event, e.TaskPaused))
    (ended,) = (event for event in events if isinstance(event, e.TaskUnpaused))
    assert (began.task, began.slowed, ended.faster) == (2, 1, True)
    assert began.slowdown == pytest.approx(2.5, rel=0.2)
    paused_s = ended.at - began.at
    first, second = (run.attempts[0] for run in made.runs)
    assert first.used_s is not None
    assert second.used_s is not None
    alone_s = (second.ended_at - second.used_s) - (first.ended_at - first.used_s)
    assert first.used_s == pytest.approx(alone_s + paused_s + (600.0 - alone_s - paused_s) / 0.4, rel=1e-6)
    assert second.used_s == pytest.approx(3_000.0 + paused_s, rel=1e-6)


def test_start_up_is_a_part_of_the_run() -> None:
    assert simulation(row(seconds=600.0, start_s=100.0, ramp_s=50.0)).run().slowdown_mean == pytest.approx(1.0)


@pytest.mark.parametrize("mechanism", ["mps", "timeslice"])
def test_two_that_share_go_as_fast_as_the_sharing_model_says(mechanism: str) -> None:
    demand = Demand(0.4, 0.2, 0.2)
    rate = progress_rates([demand, demand], mechanism)[0]  # type: ignore[arg-type]
    figures = simulation(row(), row(), mechanism=mechanism).run()
    assert figures.slowdown_mean == pytest.approx(1 / rate, rel=1e-6)


def test_who_is_left_behind_goes_on_at_full_speed() -> None:
    rate = progress_rates([Demand(0.4, 0.2, 0.2)] * 2)[0]
    made = simulation(row(seconds=300.0), row(seconds=600.0))
    together_s = 300.0 / rate
    assert made.run().makespan_s == pytest.approx(BEGIN_S + together_s + 300.0, rel=1e-6)


def test_a_task_on_two_gpus_goes_at_the_slower_ones_rate() -> None:
    rate = progress_rates([Demand(0.4, 0.2, 0.2)] * 2)[0]
    made = simulation(row(gpus=2, seconds=600.0, name="two"), row(seconds=6_000.0, name="one"), gpus=2)
    made.run()
    two = next(run for run in made.runs if run.name == "two")
    assert two.slowdown == pytest.approx(1 / rate, rel=1e-6)


def test_a_gpu_that_a_task_leaves_idle_shows_no_activity_and_slows_no_task() -> None:
    two = row(gpus=2, busy_gpus=1, seconds=600.0, name="two")
    made = simulation(two, row(100.0, seconds=300.0, name="beside"), gpus=2, policy=lug.POLICY)
    figures = made.run()
    assert figures.slowdown_max == pytest.approx(1.0)
    beside = next(run for run in made.runs if run.name == "beside")
    assert beside.attempts[0].gpus == (1,)  # the policy sees where there is nothing to do
    assert figures.sm_active_mean == pytest.approx(0.4 * (600.0 + 300.0) / (2 * figures.makespan_s), rel=1e-6)
    assert figures.memory_mib_mean == pytest.approx(4_000 * (2 * 600.0 + 300.0) / (2 * figures.makespan_s), rel=1e-6)


def test_what_the_core_keeps_of_a_gpu_between_two_samples_is_up_to_date() -> None:
    rows = [row(20.0 * place, seconds=200.0 + 30.0 * place, ramp_s=40.0, gpus=1 + place % 2) for place in range(8)]
    made = simulation(*rows, gpus=2)
    for _ in made.events():
        for gpu, live in made.state.live.items():
            assert live.members is None or [one.key for one in live.members] == list(made.state.on_gpu.get(gpu, ()))
            assert all(one.track is made.state.tracks[one.key] for one in live.members or ())


def test_energy_is_power_times_time() -> None:
    load = Demand(0.4, 0.2, 0.2)
    figures = simulation(row(seconds=600.0), gpus=2).run()
    busy_j, idle_j = 600.0 * A100.power_w(load), A100.idle_w * (BEGIN_S + 605.0)
    assert figures.energy_j == pytest.approx(busy_j + idle_j, rel=1e-6)
    assert figures.sm_active_mean == pytest.approx(0.4 * 600.0 / (2 * 605.0), rel=1e-6)
    assert figures.memory_mib_mean == pytest.approx(4_000 * 600.0 / (2 * 605.0), rel=1e-6)


def test_time_before_the_first_arrival_does_not_count() -> None:
    early, late = simulation(row(100.0)).run(), simulation(row(100_000.0)).run()
    assert late.energy_j == pytest.approx(early.energy_j, rel=1e-9)
    assert late.makespan_s == pytest.approx(early.makespan_s, rel=1e-9)


def test_memory_that_grows_beyond_the_card_is_the_end_of_who_grows() -> None:
    """Without known sizes both tasks are placed, and one runs out of memory while it grows."""
    rows = row(memory_mib=30_000, ramp_s=50.0, name="first"), row(memory_mib=30_000, ramp_s=50.0, name="second")
    made = simulation(*rows, memory="none")
    figures = made.run()
    assert (figures.ooms, figures.failed) == (1, 0)
    assert sorted(len(run.attempts) for run in made.runs) == [1, 2]
    assert figures.wasted_gpu_s > 0


def test_a_cap_stops_who_was_underestimated_and_spares_its_neighbour() -> None:
    rows = row(name="good", seconds=5_000.0), row(10.0, memory_mib=9_000, horus_mib=5_000, ramp_s=50.0, name="bad")
    made = simulation(*(rows[0], rows[1]), memory="horus")
    figures = made.run()
    attempts = {run.name: [one.outcome for one in run.attempts] for run in made.runs}
    assert attempts["good"] == ["succeeded"]
    assert attempts["bad"][0] == "out_of_memory"
    assert attempts["bad"][-1] == "succeeded"
    assert figures.innocent_ooms == 0


def test_noise_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    rows = [row(name=f"t{place}") for place in range(4)]
    found = [simulation(*rows, noise=0.1, seed=seed).run().makespan_s for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
