"""goodput and tasks with several GPUs: judged on all of them at once, with those beside them there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from carma.core.model.decision import Ask
from carma.core.model.settings import Rules
from carma.core.model.values import Demand, GpuId
from carma.core.policies import goodput
from carma.core.scheduling.forecast import baseline, slowdowns
from carma.core.scheduling.gpu_view import GpuView, OtherGpu
from carma.core.scheduling.placement import choose
from carma.core.scheduling.sharing_model import progress_rates
from carma.core.scheduling.snapshot import views
from carma.core.scheduling.verdicts import candidate_of, requirement_of
from carma.testing.builders import World, gpu
from tests.unit.core.goodput_world import HEAVY, LIGHT, MPS, NOW, ask, bound, forecast, holder, sentence


def test_who_shares_another_gpu_with_a_wide_task_is_held_up_with_it() -> None:
    """The newcomer slows the wide task down here, which so stays longer beside a third one there."""
    third = holder(LIGHT, 200.0, task=8)
    wide = replace(holder(HEAVY, 100.0), other_gpus=(OtherGpu(GpuId("g1"), HEAVY, (third,)),))
    newcomer = ask(HEAVY, 300.0)
    found = forecast(newcomer, [wide], MPS)
    pressed, _ = progress_rates([HEAVY, HEAVY])
    _, light = progress_rates([HEAVY, LIGHT])
    assert [one.key.task for one in found.holders] == [7, 8]
    assert found.slowdowns[0] == pytest.approx(1.0 / pressed)
    stays_s = 100.0 / pressed
    assert found.slowdowns[1] == pytest.approx((stays_s + 200.0 - light * stays_s) / 200.0)
    before = baseline([(wide,)], NOW, MPS)
    assert found.slowdowns[1] > slowdowns(before.members, [1.0, light], "mps", before.groups)[1]


def test_a_task_is_refused_where_it_would_slow_a_task_on_another_gpu_too_much() -> None:
    """The third one can bear the wide task for as long as that stays by itself, and no longer."""
    third = holder(Demand(0.2, 0.1, 0.1, 0.5, 0.2), 100.0, task=8, done_s=20.0, ran_s=28.0)
    wide = replace(
        holder(HEAVY, 400.0, done_s=360.0, ran_s=360.0), other_gpus=(OtherGpu(GpuId("g1"), HEAVY, (third,)),)
    )
    alone = replace(wide, other_gpus=(OtherGpu(GpuId("g1"), HEAVY, ()),))
    newcomer = ask(Demand(0.5, 0.2, 0.2, 0.8, 0.5), 2_000.0)
    assert bound().refusal(newcomer, (alone,)) is None
    assert bound().refusal(newcomer, (wide,)) is not None
    assert sentence(bound(), newcomer, wide).startswith("beside it task 8 would take 1.2")
    assert sentence(bound(), newcomer, wide).endswith("(cap 1.25)")
    late = replace(wide, other_gpus=(OtherGpu(GpuId("g1"), HEAVY, (holder(LIGHT, 20.0, task=8, ran_s=60.0),)),))
    assert bound().refusal(newcomer, (late,)) is None, "one that was too late anyhow, and ends before, pays nothing"
    assert bound().refusal(newcomer, (late,)) is None


def test_a_task_with_several_gpus_is_judged_on_all_of_them_at_once() -> None:
    """One GPU holds it up much and soon no more, the other a little all the time: each by itself it can bear."""
    soon = holder(HEAVY, 1_000.0, task=1, done_s=900.0, ran_s=900.0)
    long = holder(Demand(0.3, 0.1, 0.1, 0.4, 0.3), 1_000.0, task=2)
    wide = replace(ask(Demand(0.5, 0.2, 0.2, 0.8, 0.5), 400.0), gpus=2)
    policy = bound()
    assert policy.joint_objection is not None
    assert policy.refusal(wide, (soon,)) is None
    assert policy.refusal(wide, (long,)) is None
    assert policy.joint_objection(wide, [(soon,), ()]) is None
    found = policy.joint_objection(wide, [(soon,), (long,)])
    assert found is not None
    assert found.sentence.startswith("beside tasks 1, 2 it would take 1.")


def test_of_gpus_that_do_not_go_together_the_better_is_had_with_another() -> None:
    soon = holder(HEAVY, 1_000.0, task=1, done_s=900.0, ran_s=900.0)
    long = holder(Demand(0.3, 0.1, 0.1, 0.4, 0.3), 1_000.0, task=2)
    wide = replace(ask(Demand(0.5, 0.2, 0.2, 0.8, 0.5), 400.0), gpus=2)
    seen = [
        GpuView(gpu=gpu(place), holders=holders, room_mib=40_000)
        for place, holders in enumerate([(long,), (soon,), ()])
    ]
    assert chosen(wide, seen) == [2, 0]
    assert chosen(wide, seen[:2]) == []
    assert chosen(replace(wide, gpus=1), seen[:2]) == [0]


def chosen(asked: Ask, seen: Sequence[GpuView]) -> list[int]:
    candidates = [candidate_of(view, Rules(), bound()) for view in seen]
    choice = choose(asked, candidates, bound(), None, idle_first=True)
    places = {view.gpu.id: view.gpu.index for view in seen}
    return [places[gpu] for gpu in choice.chosen]


def test_tasks_on_several_gpus_are_known_as_such_before_they_begin_and_after() -> None:
    world = World(2, policy=goodput.POLICY)
    for gpus in (2, 1):
        task = world.submit(1_000, gpus=gpus)
        world.settle()
        for _ in ("placed", "running"):
            seen = views(world.state, world.now)
            others = [[known.gpu for known in one.other_gpus] for view in seen for one in view.holders]
            assert others == ([[view.gpu.id] for view in reversed(seen)] if gpus > 1 else [[]])
            world.start(task)
            world.wait(30)
        world.end(task)
        world.wait(5)


def test_tasks_that_ask_for_different_numbers_of_gpus_have_different_requirements() -> None:
    assert requirement_of(ask(LIGHT)) != requirement_of(replace(ask(LIGHT), gpus=2))
