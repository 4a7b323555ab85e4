"""No policy lets a task wait forever. Every task of a trace ends, and a task that is hard to place starts after a
bounded number of others, although small tasks keep arriving.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carma.core.model.events import TaskEstimated, TaskSubmitted
from carma.core.model.settings import FairnessRules, QueueRules, Rules, WarmUp
from carma.core.model.values import Demand, Estimate, Owner, TaskId, TaskSpec
from carma.plugins import load_policy
from carma.testing.builders import ALICE, World
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator.simulation import Setup, Simulation
from lab_fixtures.random_simulations import CARD, EVERY_POLICY, rules, traces

SOME = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
OVERTAKES = 3


@pytest.mark.parametrize("policy", EVERY_POLICY)
@SOME
@given(data=st.data())
def test_every_task_that_fits_ends_and_the_others_are_reported(policy: str, data: st.DataObject) -> None:
    gpus = data.draw(st.integers(1, 3))
    trace = data.draw(traces(gpus + 1, 12))  # some need one GPU more than the server has
    known = data.draw(st.sampled_from(("measured", "none", "trace", "gpumemnet")))
    setup = Setup(
        card=CARD,
        gpus=gpus,
        rules=data.draw(rules()),
        policy=load_policy(policy),
        source=sources.find(known),
        demand=data.draw(st.sampled_from(("measured", "history", "none"))),
        noise=1.0,
    )
    made = Simulation(trace, setup)
    made.run()
    ends = {run.task: run.outcome for run in made.runs}
    assert len(made.runs) == len(ends) == len(trace.tasks)
    for place, row in enumerate(trace.tasks, 1):
        assert (ends[place] == "never_fits") == (row.gpus > gpus), ends
    if known == "measured":
        assert set(ends.values()) <= {"never_fits", "succeeded"}


# -- an endless stream ----------------------------------------------------------------------------------------------
LIGHT = Demand(0.05, 0.02, 0.02, 0.1, 0.05)
HEAVY = Demand(0.95, 0.5, 0.6, 1.0, 0.9)


class Stream:
    """A server of two GPUs on which small tasks run for `lasts_s` each, and three more wait at any time."""

    def __init__(
        self, policy: str, *, estimated_s: float | None, fair: bool = False, demand: Demand | None = LIGHT
    ) -> None:
        in_force = Rules(
            queue=QueueRules(overtakes=OVERTAKES),
            fairness=FairnessRules(enabled=fair),
            warmup=WarmUp(enabled=False),
        )
        self.world = World(2, rules=in_force, policy=load_policy(policy))
        self.estimated_s, self.demand = estimated_s, demand
        self.ends_at: dict[TaskId, float] = {}
        self.lengths = self._lengths()
        self.owners = 0

    @staticmethod
    def _lengths() -> Iterator[float]:
        """Run times such that tasks do not all end at the same time."""
        while True:
            yield from (90.0, 50.0, 130.0, 70.0, 110.0)

    def submit(self, mib: int, demand: Demand | None, runtime_s: float | None, owner: Owner, **spec: object) -> TaskId:
        number = TaskId(max(self.world.state.tasks, default=0) + 1)
        whole = TaskSpec(command=("x",), directory="/", gpu_memory_mib=mib, **spec)  # type: ignore[arg-type]
        estimate = Estimate(footprint_mib=mib, upper_mib=mib, source="declared", demand=demand, runtime_s=runtime_s)
        self.world.emit(TaskSubmitted(self.world.now, number, owner, whole))
        self.world.emit(TaskEstimated(self.world.now, number, estimate))
        return number

    def go_on(self) -> set[TaskId]:
        """Simulates ten seconds. Returns the tasks that started."""
        world, before = self.world, set(self.world.state.active)
        while len(world.state.queue) < 4:
            self.owners += 1  # each of another user without any use: with fair shares they come first
            self.submit(2_000, self.demand, self.estimated_s, Owner(2_000 + self.owners, 100, f"user{self.owners}"))
        world.now += 10.0
        world.sample()
        for task in [task for task, at in self.ends_at.items() if at <= world.now]:
            del self.ends_at[task]
            world.end(task)
        world.sample()
        world.settle()
        started = set(world.state.active) - before
        world.start(*started)
        self.ends_at.update({task: world.now + next(self.lengths) for task in sorted(started)})
        return started

    def until(self, large: TaskId) -> int:
        """Number of other tasks that started before it."""
        others = 0
        for _ in range(300):
            started = self.go_on()
            if large in started:
                return others
            others += len(started)
        raise AssertionError(f"it waits after {others} others: {self.world.why(large)}")


LARGE: dict[str, dict[str, object]] = {
    "two GPUs": {"mib": 20_000, "gpus": 2},
    "most of a card": {"mib": 38_000},
    "a GPU alone": {"mib": 2_000, "exclusive": True},
    "two GPUs alone": {"mib": 20_000, "gpus": 2, "exclusive": True},
}
# Estimated run time of the small tasks: unknown; correct; a few seconds, so that each may start before a large task and
# still runs at its start; or a day, so that a policy that uses run times expects each to outlast all others.
RUN_TIMES = {"nothing": None, "the truth": 90.0, "seconds": 5.0, "a day": 86_400.0}


@pytest.mark.parametrize("known", RUN_TIMES)
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_large_task_starts_although_small_ones_never_stop_coming(policy: str, kind: str, known: str) -> None:
    stream = Stream(policy, estimated_s=RUN_TIMES[known])
    for _ in range(6):
        stream.go_on()
    large = stream.submit(demand=HEAVY, runtime_s=600.0, owner=ALICE, **LARGE[kind])  # type: ignore[arg-type]
    assert stream.until(large) <= _bound(stream.world)


def _bound(world: World) -> int:
    """Overtaking tasks, the tasks that were before it in the queue, and one for each GPU that it could not have
    used."""
    return 2 * OVERTAKES + 4 + len(world.state.gpus)


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_new_users_do_not_delay_a_large_task_forever_with_fair_shares(policy: str, kind: str) -> None:
    stream = Stream(policy, estimated_s=90.0, fair=True)
    for _ in range(6):
        stream.go_on()
    large = stream.submit(demand=HEAVY, runtime_s=600.0, owner=ALICE, **LARGE[kind])  # type: ignore[arg-type]
    assert stream.until(large) <= _bound(stream.world)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_task_without_any_estimate_starts_too(policy: str) -> None:
    """Policies that predict assume the largest demand for it."""
    stream = Stream(policy, estimated_s=90.0)
    for _ in range(6):
        stream.go_on()
    unknown = stream.submit(9_000, None, None, ALICE)
    assert stream.until(unknown) <= _bound(stream.world)
