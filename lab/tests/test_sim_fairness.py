"""Taking turns in the simulator: who comes with one task does not wait for all of another's."""

from __future__ import annotations

from carma.traces.schema import Trace
from carma_lab.reports.fairness import Fairness, fairness
from carma_lab.simulator.request import Request, simulation
from lab_fixtures.small_simulations import row


def run(enabled: str) -> tuple[Fairness, list[float]]:
    many = [row(arrival_s=0.0, seconds=600.0, user="many") for _ in range(12)]
    few = [row(arrival_s=60.0 + 1200.0 * place, seconds=600.0, user="few") for place in range(3)]
    tasks = tuple(sorted([*many, *few], key=lambda task: task.arrival_s))
    settings: dict[str, object] = {"fairness.enabled": enabled}
    made = simulation(Request(trace="x", policy="exclusive", gpus=1, settings=settings), Trace(name="x", tasks=tasks))
    made.run()
    found = fairness(made.runs, 1)
    assert found is not None
    return found, [one.wait_s for one in made.runs if one.user == "few"]


def test_the_user_with_few_tasks_is_better_off_and_all_are_served_more_evenly() -> None:
    (off, waits_off), (on, waits_on) = run("no"), run("yes")
    assert min(waits_off) > 4000.0  # behind all that came before
    assert max(waits_on) <= 1300.0  # for the task that runs, and for one in turn
    assert _worst(on) < 0.5 * _worst(off)
    assert on.jain_finish_time is not None
    assert off.jain_finish_time is not None
    assert on.jain_finish_time > off.jain_finish_time


def _worst(found: Fairness) -> float:
    return max(user.finish_time_mean or 0.0 for user in found.users)
