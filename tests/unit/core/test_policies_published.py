"""The two schedulers that CARMA's authors compare themselves with: who shares a GPU under them, and who does not."""

from __future__ import annotations

import pytest

from carma.core.model.decision import Ask
from carma.core.model.events import TaskEstimated, TaskSubmitted
from carma.core.model.values import AttemptKey, Demand, Estimate, GpuId, TaskId, TaskSpec
from carma.core.policies import horus, lucid
from carma.core.scheduling.gpu_view import Holder
from carma.core.scheduling.policy import Policy
from carma.plugins import load_policy
from carma.testing.builders import ALICE, World

GIB = 1_024


def busy(share: float) -> Demand:
    """Keeps the GPU's engine busy for that share of the time; the rest does not matter to either."""
    return Demand(sm_active=share / 2, sm_occupancy=0.1, dram_active=0.1, gr_active=share)


def holder(demand: Demand | None, mib: int = 4_000, task: int = 7) -> Holder:
    return Holder(key=AttemptKey(TaskId(task), 1), booking_mib=mib, ends_at=9_999.0, demand=demand)


def ask(demand: Demand | None, mib: int = 4_000) -> Ask:
    return Ask(TaskId(9), 1, mib, "declared", False, demand)


def submit(world: World, demand: Demand | None, mib: int = 4_000, gpus: int = 1) -> TaskId:
    number = TaskId(max(world.state.tasks, default=0) + 1)
    spec = TaskSpec(command=("python", "train.py"), directory="/", gpu_memory_mib=mib, gpus=gpus)
    world.emit(TaskSubmitted(world.now, number, ALICE, spec))
    estimate = Estimate(footprint_mib=mib, upper_mib=mib, source="declared", demand=demand)
    world.emit(TaskEstimated(world.now, number, estimate))
    world.settle()
    return number


def running(policy: Policy, *demands: Demand | None, gpus: int | None = None, mib: int = 4_000) -> World:
    """A settled task of each demand, on a GPU of its own, and as many idle GPUs as are left of `gpus`."""
    world = World(gpus or len(demands), policy=policy)
    for index, demand in enumerate(demands):
        submit(world, demand, mib)
        if demand is not None:  # and they show what was said of them
            world.activity[GpuId(f"GPU-{index}")] = (demand.sm_active, demand.sm_occupancy, demand.dram_active)
    world.start()
    world.wait(60)
    world.settle()
    return world


# -- Horus ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("own", "others", "fits"),
    [
        (0.36, (0.64,), True),  # the whole budget
        (0.36, (0.65,), False),
        (0.3, (0.3, 0.3), True),
        (0.2, (0.3, 0.3, 0.21), False),
        (0.1, (0.2,) * 4 + (0.1,), True),  # sums of such fractions do not come out even
    ],
)
def test_horus_adds_up_utilisation_to_a_hundred_per_cent(own: float, others: tuple[float, ...], fits: bool) -> None:
    found = horus.objection(ask(busy(own)), [holder(busy(other)) for other in others])
    assert (found is None) == fits


def test_horus_takes_an_unknown_task_for_a_full_gpu() -> None:
    assert horus.objection(ask(None), [holder(busy(0.1))]) is not None
    assert horus.objection(ask(busy(0.1)), [holder(None)]) is not None


def test_horus_without_engine_activity_guesses_it_from_sm_activity() -> None:
    plain = Demand(sm_active=0.4, sm_occupancy=0.1, dram_active=0.1)
    assert 0.4 < horus.utilisation(plain) < 0.8
    assert horus.utilisation(busy(0.4)) == pytest.approx(0.4)


def test_horus_says_why_with_the_numbers() -> None:
    found = horus.objection(ask(busy(0.36)), [holder(busy(0.5), task=3), holder(None, task=4)])
    assert found is not None
    assert found.code == "Utilisation"
    assert found.sentence == (
        "predicted utilisation would come to 186% (budget 100%): 36% beside tasks 3 (50%), 4 (100%, not known)"
    )


def test_horus_shares_the_gpu_with_the_least_predicted_utilisation() -> None:
    world = running(horus.POLICY, busy(0.6), busy(0.2), busy(0.4))
    first = submit(world, busy(0.3))
    assert world.gpus_of(first) == (1,)
    assert "utilisation left 0.5" in world.task(first).attempts[-1].decision


def test_horus_takes_an_idle_gpu_before_a_shared_one_and_a_gang_gets_distinct_ones() -> None:
    world = running(horus.POLICY, busy(0.1), busy(0.2), gpus=3)
    assert world.gpus_of(submit(world, busy(0.1))) == (2,)
    fresh = running(horus.POLICY, busy(0.5), busy(0.1), busy(0.3))
    assert world.gpus_of(submit(world, busy(0.05))) == (0,)
    assert fresh.gpus_of(submit(fresh, busy(0.4), gpus=2)) == (1, 2)


def test_under_horus_a_task_over_every_budget_waits_with_that_reason() -> None:
    world = running(horus.POLICY, busy(0.9), busy(0.8))
    task = submit(world, busy(0.5))
    assert not world.placed(task)
    assert world.why(task).code == "Utilisation"
    assert "140% (budget 100%)" in world.why(task).sentence
    world.end(TaskId(2))
    world.wait(5)
    world.settle()
    assert world.gpus_of(task) == (1,)


def test_horus_does_not_ask_the_gate_but_does_ask_the_ledger() -> None:
    """What is observed is not part of Horus; memory is as for every policy."""
    world = World(1, policy=horus.POLICY)
    world.activity[next(iter(world.state.gpus))] = (0.1, 0.9, 0.9)  # the gate would mind
    submit(world, busy(0.2), 30_000)
    world.start()
    world.wait(60)
    world.settle()
    assert world.placed(submit(world, busy(0.2), 4_000))
    large = submit(world, busy(0.2), 30_000)
    assert not world.placed(large)


# -- Lucid ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("demand", "mib", "score"),
    [
        (busy(0.36), 700, 0),
        (busy(0.49), 30 * GIB, 0),
        (busy(0.5), 6 * GIB, 2),
        (busy(0.9), 16 * GIB - 1, 2),
        (busy(0.9), 16 * GIB, 1),
        (None, 700, 2),
    ],
)
def test_the_sharing_score(demand: Demand | None, mib: int, score: int) -> None:
    assert lucid.score(demand, mib) == score


# Task of the traces, its utilisation and peak on an A100, and the score that AEGIS gave it (its table of scores,
# restated): five of each class. Two thresholds give 47 of its 53.
PUBLISHED = {
    "DLRM": (0.105, 1_364, 0),
    "EfficientNet on CIFAR, 32": (0.368, 668, 0),
    "MobileNet on CIFAR, 64": (0.310, 602, 0),
    "ResNet-18 on CIFAR, 128": (0.343, 852, 0),
    "MNIST": (0.163, 1_098, 0),
    "BERT-base": (0.938, 19_868, 1),
    "GPT2-large": (0.950, 28_330, 1),
    "Mask R-CNN": (0.847, 29_854, 1),
    "VGG-16, 128": (0.828, 21_668, 1),
    "Inception, 128": (0.763, 17_964, 1),
    "BERT-large": (0.752, 12_620, 2),
    "EfficientNet, 32": (0.627, 3_760, 2),
    "ResNet-50, 128": (0.830, 13_238, 2),
    "U-Net": (0.842, 5_636, 2),
    "XLNet-large": (0.919, 13_798, 2),
}


@pytest.mark.parametrize("task", PUBLISHED)
def test_the_score_is_the_published_one(task: str) -> None:
    share, mib, score = PUBLISHED[task]
    assert lucid.score(busy(share), mib) == score


TINY, MEDIUM, JUMBO = (busy(0.3), 1_000), (busy(0.9), 17_000), (busy(0.9), 6_000)


@pytest.mark.parametrize(
    ("own", "host", "fits"),
    [
        (TINY, TINY, True),
        (TINY, JUMBO, True),
        (JUMBO, TINY, True),
        (MEDIUM, MEDIUM, True),
        (MEDIUM, JUMBO, False),
        (JUMBO, MEDIUM, False),
        (JUMBO, JUMBO, False),
    ],
)
def test_lucid_packs_where_scores_add_up_to_two(own: tuple[Demand, int], host: tuple[Demand, int], fits: bool) -> None:
    assert (lucid.objection(ask(*own), [holder(*host)]) is None) == fits


def test_lucid_packs_two_and_no_third_however_small() -> None:
    found = lucid.objection(ask(*TINY), [holder(*TINY), holder(*TINY)])
    assert found is not None
    assert (found.code, found.sentence) == ("TasksPerGpu", "has 2 tasks; lucid packs 2")


def test_lucid_says_why_with_the_numbers() -> None:
    found = lucid.objection(ask(*JUMBO), [holder(None, 17_000)])
    assert found is not None
    assert found.code == "Slowdown"
    assert found.sentence == (
        "sharing scores would add up to 4 (at most 2): 2 (Jumbo, 90% utilised) beside task 7's 2 "
        "(Jumbo, demand not known)"
    )


def test_lucid_shares_the_least_score_first_and_the_least_booked_memory_next() -> None:
    world = running(lucid.POLICY, busy(0.9), busy(0.2))
    assert world.gpus_of(submit(world, busy(0.2))) == (1,)
    even = World(2, policy=lucid.POLICY)
    submit(even, busy(0.2), 9_000)
    submit(even, busy(0.2), 3_000)
    for gpu in even.state.gpus:
        even.activity[gpu] = (0.1, 0.1, 0.1)
    even.start()
    even.wait(60)
    even.settle()
    assert even.gpus_of(submit(even, busy(0.9))) == (1,)


def test_under_lucid_a_jumbo_task_waits_for_a_gpu_with_that_reason() -> None:
    world = running(lucid.POLICY, busy(0.9))
    task = submit(world, busy(0.8))
    assert not world.placed(task)
    assert world.why(task).code == "Slowdown"
    assert "add up to 4 (at most 2)" in world.why(task).sentence


@pytest.mark.parametrize("name", ["horus", "Horus", "lucid", "LUCID"])
def test_both_are_found_by_name(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name.lower()
    assert policy.refusal(ask(None), []) is None, "nothing against one alone on a GPU"
