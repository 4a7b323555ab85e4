"""Which GPUs each policy takes, with every source of memory figures, and what a policy that misbehaves does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from carma.core.model.decision import Ask, Part
from carma.core.model.events import GpuDrained, GpuResumed
from carma.core.model.settings import Gate, PlacementRules, Rules, WarmUp
from carma.core.model.values import GpuId
from carma.core.policies import best_fit, exclusive, first_fit, lug, magm, round_robin
from carma.core.scheduling.explanation import explain
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.policy import Policy, Rank, Ranked
from carma.testing.builders import World

EVERY = (exclusive.POLICY, round_robin.POLICY, first_fit.POLICY, best_fit.POLICY, magm.POLICY, lug.POLICY)
SHARED_FIRST = Rules(placement=PlacementRules(idle_first=False))


def occupied(policy: Policy, rules: Rules | None = None) -> World:
    """Four GPUs, each with one settled task: room 30,960, 20,960, 10,960 and 30,960; SM activity .3, .1, .2 and .3."""
    world = World(4, policy=policy, rules=rules)
    for index, mib in enumerate((10_000, 20_000, 30_000, 10_000)):
        world.activity[GpuId(f"GPU-{index}")] = ((0.3, 0.1, 0.2, 0.3)[index], 0.1, 0.1)
        world.submit(mib)
        world.settle()  # with the GPUs drained that have a task already, whatever the policy prefers
        world.emit(GpuDrained(world.now, world.state.last_gpu))
    for gpu in world.state.gpus:
        world.emit(GpuResumed(world.now, gpu))
    world.start()
    by_index = {world.gpus_of(task)[0]: world.state.active[task] for task in world.state.active}
    for index, mib in enumerate((10_000, 20_000, 30_000, 10_000)):
        world.memory[by_index[index]] = mib
    world.wait(60)
    world.settle()
    return world


@pytest.mark.parametrize(
    ("policy", "mib", "gpus", "choice"),
    [
        (first_fit.POLICY, 5_000, 1, (0,)),
        (first_fit.POLICY, 25_000, 2, (0, 3)),
        (best_fit.POLICY, 5_000, 1, (2,)),
        (best_fit.POLICY, 15_000, 1, (1,)),
        (best_fit.POLICY, 25_000, 1, (0,)),  # a tie: the lower index
        (best_fit.POLICY, 5_000, 3, (2, 1, 0)),
        (magm.POLICY, 5_000, 1, (0,)),  # a tie: the lower index
        (magm.POLICY, 5_000, 3, (0, 3, 1)),
        (lug.POLICY, 5_000, 1, (1,)),
        (lug.POLICY, 5_000, 2, (1, 2)),
        (lug.POLICY, 5_000, 4, (1, 2, 0, 3)),
        (lug.POLICY, 25_000, 1, (0,)),
        (round_robin.POLICY, 5_000, 1, (0,)),  # after GPU 3, which took the last
        (round_robin.POLICY, 5_000, 2, (0, 1)),
        (round_robin.POLICY, 25_000, 1, (0,)),
    ],
)
def test_the_gpus_that_each_policy_shares(policy: Policy, mib: int, gpus: int, choice: tuple[int, ...]) -> None:
    world = occupied(policy)
    task = world.submit(mib, gpus=gpus)
    world.settle()
    assert world.gpus_of(task) == choice


@pytest.mark.parametrize("policy", [p for p in EVERY if p.shares], ids=lambda p: p.name)
def test_an_idle_gpu_goes_before_a_shared_one(policy: Policy) -> None:
    world = occupied(policy)
    on_gpu_2 = next(task for task in world.state.active if world.gpus_of(task) == (2,))
    world.end(on_gpu_2)
    world.wait(30)
    world.settle()
    task = world.submit(1_000)
    world.settle()
    assert world.gpus_of(task) == (2,)
    assert world.task(task).attempts[-1].decision.startswith("placed on GPU 2: idle")


def test_the_policy_alone_decides_when_idle_gpus_do_not_go_first() -> None:
    world = occupied(best_fit.POLICY, SHARED_FIRST)
    empty = next(task for task in world.state.active if world.gpus_of(task) == (3,))
    world.end(empty)
    world.wait(30)
    world.settle()
    task = world.submit(1_000)
    world.settle()
    assert world.gpus_of(task) == (2,), "the tightest, though GPU 3 is idle"


def test_round_robin_goes_on_from_the_last_gpu_even_when_that_one_is_closed() -> None:
    world = World(4, policy=round_robin.POLICY)

    def next_gpu() -> int:
        task = world.submit(1_000)
        world.settle()
        (found,) = world.gpus_of(task)
        return found

    def settled() -> None:
        world.start()
        world.wait(30)
        world.settle()

    assert [next_gpu() for _ in range(4)] == [0, 1, 2, 3]
    settled()
    assert next_gpu() == 0
    settled()
    assert next_gpu() == 1
    assert next_gpu() == 2, "GPU 1 is warming up and GPU 0 is open; the ring does not start again"
    assert next_gpu() == 3
    assert next_gpu() == 0


@pytest.mark.parametrize("policy", EVERY, ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("source", "mib", "booked", "told"),
    [
        ("none", None, 5_120, "unknown"),
        ("declared", 7_000, 7_000, "declared"),
        ("gpumemnet", 8_000, 8_000, "gpumemnet"),
    ],
)
def test_every_policy_works_with_every_source_of_memory(
    policy: Policy, source: str, mib: int | None, booked: int, told: str
) -> None:
    world = World(2, policy=policy)
    task = world.submit(mib, source=source)
    world.settle()
    booking = world.task(task).attempts[-1].placement.booking
    assert (booking.memory_mib, booking.source) == (booked, told)


@pytest.mark.parametrize("policy", [p for p in EVERY if p.shares], ids=lambda p: p.name)
def test_a_task_of_unknown_size_shares_where_the_published_5120_mib_are_free(policy: Policy) -> None:
    world = World(1, policy=policy)
    world.run(40_960 - 5_120 - 512)
    fits = world.submit(None)
    world.settle()
    assert world.placed(fits)
    tight = World(1, policy=policy)
    tight.run(40_960 - 5_120 - 511)
    waits = tight.submit(None)
    tight.settle()
    assert not tight.placed(waits)


def test_problem_18_without_an_estimate_the_declared_figure_is_not_used_in_secret() -> None:
    """Who gave the figure is written down; without one the booking says `unknown`."""
    world = World(1)
    task = world.submit(None)
    world.settle()
    assert world.task(task).attempts[-1].placement.booking.source == "unknown"


@pytest.mark.parametrize("policy", EVERY, ids=lambda p: p.name)
def test_a_gang_takes_distinct_gpus_or_waits(policy: Policy) -> None:
    world = World(3, policy=policy)
    gang = world.submit(10_000, gpus=3)
    world.settle()
    assert sorted(world.gpus_of(gang)) == [0, 1, 2]
    few = World([40_960, 40_960, 8_192], policy=policy)
    waits = few.submit(10_000, gpus=2, exclusive=True)
    few.settle()
    assert sorted(few.gpus_of(waits)) == [0, 1]


def test_lug_takes_what_it_cannot_see_for_the_busiest() -> None:
    world = occupied(lug.POLICY, Rules(gate=Gate(enabled=False)))
    world.activity[GpuId("GPU-1")] = (None, None, None)
    world.wait(1)
    task = world.submit(5_000)
    world.settle()
    assert world.gpus_of(task) == (2,)


def test_scores_are_shown_in_their_parts() -> None:
    world = occupied(lug.POLICY)
    task = world.submit(5_000)
    decision = explain(world.state, task, world.now)
    assert [part.name for part in decision.verdicts[1].parts] == ["sm_free", "room_mib"]
    assert decision.verdicts[1].parts[0].value == pytest.approx(0.9)
    assert [verdict.chosen for verdict in decision.verdicts] == [False, True, False, False]


# -- policies of other packages ---------------------------------------------------------------------------------------
def raises(_ask: Ask, _views: Sequence[GpuView], _last: GpuId | None) -> list[Ranked]:
    raise RuntimeError("no luck\nat all")


def endless(_ask: Ask, views: Sequence[GpuView], _last: GpuId | None):  # type: ignore[no-untyped-def]
    while True:
        yield Ranked(views[0].gpu.id, ())


def answer(given: object) -> Rank:
    return lambda _ask, _views, _last: given  # type: ignore[return-value]


NONSENSE: dict[str, Rank] = {
    "it raises": raises,
    "nothing at all": answer(None),
    "a number": answer(7),
    "names instead of entries": answer(["GPU-0"]),
    "a GPU that is not there": answer([Ranked(GpuId("GPU-9"), ())]),
    "one GPU twice": answer([Ranked(GpuId("GPU-0"), ()), Ranked(GpuId("GPU-0"), ())]),
    "parts that are none": answer([Ranked(GpuId("GPU-0"), None)]),  # type: ignore[arg-type]
    "a part that is a word": answer([Ranked(GpuId("GPU-0"), ("best",))]),  # type: ignore[arg-type]
    "a score that is a word": answer([Ranked(GpuId("GPU-0"), (Part("p", "high"),))]),  # type: ignore[arg-type]
    "a score that is not a number": answer([Ranked(GpuId("GPU-0"), (Part("p", float("nan")),))]),
    "entries without an end": endless,
    "no GPU at all": answer([]),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_policy_that_answers_nonsense_is_a_reason_to_wait(what: str) -> None:
    world = World(2, policy=Policy("odd", NONSENSE[what]))
    task = world.submit(1_000)
    world.settle()
    assert not world.placed(task)
    assert world.why(task).code == "Policy"
    assert "odd" in world.why(task).sentence
    assert "\n" not in world.why(task).sentence
    assert [world.refusal(task, index) is not None for index in range(2)] == [True, True]


def test_a_policy_that_refuses_one_task_does_not_stop_the_others() -> None:
    def picky(ask: Ask, views: Sequence[GpuView], last: GpuId | None) -> list[Ranked]:
        return [] if ask.memory_mib == 13 else list(magm.rank(ask, views, last))

    rules = Rules(warmup=WarmUp(enabled=False), gate=Gate(enabled=False))
    world = World(1, policy=Policy("picky", picky), rules=rules)
    unlucky = world.submit(13)
    for _ in range(60):  # more than any bound on overtaking
        task = world.submit(1_000, time_limit_s=5.0)
        world.settle()
        assert world.placed(task)
        world.start(task)
        world.wait(1)
        world.end(task)
        world.settle()
    assert not world.placed(unlucky)
