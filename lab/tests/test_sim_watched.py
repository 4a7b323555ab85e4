"""A run whose course is kept decides as one whose is not, to the last digit."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from carma.core.scheduling.placement import Policy
from carma.errors import CarmaError
from carma.traces import find
from carma_lab.simulator.request import Request, recorded, simulation
from carma_lab.simulator.simulation import Simulation
from lab_fixtures import small_simulations as sim_made
from lab_fixtures.small_simulations import row


def log_of(made: Simulation) -> list[bytes]:
    return [msgspec.json.encode(event) for event in made.events()]


@pytest.mark.parametrize(
    ("trace", "policy", "more"),
    [
        ("t1", "goodput", {}),
        ("t1", "magm", {"memory": "none", "noise": 1.0}),
        ("t1", "lucid", {"demand": "history"}),
        ("t2", "horus", {"memory": "horus"}),
        ("t2", "goodput", {"demand": "none"}),
        ("mix", "lug", {"memory": "trace", "seed": 3}),
        ("heavy", "exclusive", {}),
        ("heavy", "first-fit", {"memory": "gpumemnet", "mechanism": "timeslice"}),
    ],
)
def test_the_log_is_the_same_watched_or_not(
    trace: str, policy: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = msgspec.convert({"trace": trace, "policy": policy, **more}, Request)
    some = replace(find(trace), tasks=find(trace).tasks[:30])
    seen, unseen = simulation(request, some), simulation(request, some)
    log = log_of(seen)
    monkeypatch.setattr(Simulation, "_note", lambda _self, _until: None)
    assert log_of(unseen) == log
    assert seen.runs == unseen.runs
    assert seen.figures(0.0) == unseen.figures(0.0)
    assert len(seen.course) > 100
    assert not unseen.course


def test_a_course_reaches_from_the_start_to_the_step_of_the_last_end() -> None:
    made = sim_made.simulation(row(40.0, seconds=100.0), row(1_000.0, seconds=50.0))
    made.run()
    end = made.runs[-1].ended_s
    times = [point.at_s for point in made.course]
    assert times == [30.0 * place for place in range(1, len(times) + 1)]
    assert times[-2] < end <= times[-1]
    assert [point.running for point in made.course if 60.0 <= point.at_s <= 120.0] == [1.0] * 3
    assert {point.running for point in made.course if 150.0 <= point.at_s < 1_000.0} == {0.0}


def test_the_means_of_a_course_are_those_of_the_whole_run() -> None:
    run = recorded(Request(trace="t1", policy="magm"))
    step_s = run.course[1].at_s - run.course[0].at_s

    sm_s = sum(point.sm_active or 0.0 for point in run.course) * step_s
    assert sm_s == pytest.approx((run.figures.sm_active_mean or 0.0) * run.figures.makespan_s, rel=1e-9)
    mib_s = sum(point.memory_mib or 0.0 for point in run.course) * step_s
    assert mib_s == pytest.approx((run.figures.memory_mib_mean or 0.0) * run.figures.makespan_s, rel=1e-9)


def test_a_run_that_cannot_go_on_ends_though_it_is_watched() -> None:
    no_gpu = Policy("no_gpu", lambda _ask, _views, _last: [])
    with pytest.raises(CarmaError, match="no task runs"):
        sim_made.simulation(row(), policy=no_gpu).run()


def test_totals_are_those_after_a_move_and_move_nothing() -> None:
    made = sim_made.simulation(row(seconds=100.0), row(50.0))
    events = made.events()
    (board,) = made.world.boards
    while not board.load.sm_active:
        next(events)
    was = (board.since, board.sums)
    told = board.totals(board.since + 0.1)
    assert (board.since, board.sums) == was
    board.move(board.since + 0.1)
    assert told == board.sums
    assert min(told) > 0.0
