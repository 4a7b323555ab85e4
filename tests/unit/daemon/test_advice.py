"""Advice for finished tasks: a table of figures; the sentences are in tests/wording/advice.txt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from carma.core.model import events as e
from carma.core.model.values import TaskId
from carma.daemon.views.advice import advice
from carma.testing.builders import World
from carma.wire.api_types import ActivityView, AttemptView, ProgressView, TaskView
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import finished, running
from tests.unit.daemon.test_views import shown

SUCCEEDED = {"kind": "succeeded"}
OOM = {"kind": "out_of_memory", "where": "gpu", "asked_mib": 2_048, "peak_mib": 8_000}
STARVED = ActivityView(sm_active=0.04, gr_active=0.12)
SLOW = ProgressView(slowdown=1.8, alone_steps_per_s=10.0)


def attempt(**changes: Any) -> AttemptView:
    """Ten minutes on one GPU beside others, kept busy, at nearly full speed."""
    usual: dict[str, Any] = {
        "used_s": 600.0,
        "outcome": SUCCEEDED,
        "activity": ActivityView(sm_active=0.5, gr_active=0.9),
        "progress": ProgressView(slowdown=1.1),
    }
    return replace(finished(1).attempts[0], **(usual | changes))


def task(*attempts: AttemptView, **changes: Any) -> TaskView:
    newest = attempts[-1]
    return finished(1, attempts=attempts, **({"outcome": newest.outcome} | changes))


ADVISED = {
    "booked far too much": task(attempt(observed_mib=6_246), gpu_memory_mib=24_576),
    "an earlier attempt had the peak": task(
        attempt(observed_mib=9_000), attempt(observed_mib=300), gpu_memory_mib=24_576
    ),
    "the GPU waited": task(attempt(activity=STARVED)),
    "the GPU waited, SM activity not measured": task(attempt(activity=ActivityView(gr_active=0.12))),
    "the GPU waited, alone by its booking": task(attempt(activity=STARVED, alone=True, progress=ProgressView())),
    "slowed down": task(attempt(progress=SLOW)),
    "out of memory, then succeeded": task(attempt(outcome=OOM), attempt(observed_mib=18_000), gpu_memory_mib=8_192),
    "out of memory in the end": task(attempt(outcome=OOM), attempt(outcome=OOM), gpu_memory_mib=8_192),
    "out of memory alone on a GPU": task(
        attempt(outcome=OOM), attempt(outcome=OOM), attempt(outcome=OOM, alone=True), gpu_memory_mib=None
    ),
    "memory comes before time": task(
        attempt(observed_mib=6_246, activity=STARVED, progress=SLOW), gpu_memory_mib=24_576
    ),
}
NOT_ADVISED = {
    "all is well": task(attempt()),
    "not finished": running(1, attempts=(attempt(activity=STARVED),)),
    "never started": finished(1, attempts=()),
    "without a GPU": task(attempt(gpus=(), activity=STARVED)),
    "nothing measured": task(
        attempt(observed_mib=None, used_s=None, activity=None, progress=ProgressView()), gpu_memory_mib=24_576
    ),
    "not declared": task(attempt(observed_mib=300), gpu_memory_mib=None),
    "exclusive": task(attempt(observed_mib=300), gpu_memory_mib=24_576, exclusive=True),
    "failed, perhaps before its peak": task(attempt(observed_mib=300, outcome={"kind": "failed", "code": 1})),
    "too short for a peak": task(attempt(observed_mib=300, used_s=59.0)),
    "too short on two GPUs": task(attempt(observed_mib=300, used_s=100.0, gpus=("GPU-1", "GPU-2"))),
    "a prudent figure": task(attempt(observed_mib=6_246), gpu_memory_mib=10_240),
    "start-up only": task(attempt(activity=STARVED, used_s=200.0)),
    "neighbours may have kept it from the GPU": task(attempt(activity=STARVED, progress=ProgressView())),
    "slowed down on a full GPU": task(
        attempt(activity=ActivityView(gr_active=0.28), progress=ProgressView(slowdown=1.3))
    ),
    "slowdown inferred": task(attempt(progress=replace(SLOW, inferred=True))),
    "out of memory because of a neighbour": task(
        attempt(outcome=OOM, blame="neighbour"), attempt(observed_mib=11_000), gpu_memory_mib=8_192
    ),
    "out of memory, nothing declared": task(attempt(outcome=OOM), attempt(), gpu_memory_mib=None),
    "out of host memory": task(attempt(outcome=OOM | {"where": "host"}, alone=True)),
}


def test_advice_is_given_where_the_figures_support_it() -> None:
    assert_wording("advice", {name: advice(view) for name, view in ADVISED.items()})


def test_without_certain_figures_there_is_no_advice() -> None:
    assert {name: advice(view) for name, view in NOT_ADVISED.items()} == dict.fromkeys(NOT_ADVISED, "")


def test_a_finished_task_is_shown_with_its_advice_and_the_time_that_it_waited() -> None:
    world = World(1)
    world.submit(4_000, held=True)
    begun = world.now
    task = world.run(4_000)
    placed, ran_s = world.task(task).attempts[0].placed_at, world.now - begun
    assert (placed, shown(world, task).waited_s, shown(world, TaskId(1)).waited_s) == (begun, 0.0, ran_s)
    assert shown(world, task).advice == ""
    while world.outcome(task) is None:
        world.oom(task)
        world.settle()
        world.wait(400.0, every_s=100.0)  # longer than any back-off
        if world.outcome(task) is None:
            world.settle()
            world.start(task)
    view = shown(world, task)
    assert "alone on its GPU" in view.advice
    assert len(view.attempts) > 1
    spans = [(each.started_at or 0.0, each.ended_at or 0.0) for each in view.attempts]
    assert view.waited_s == sum(start - end for (_, end), (start, _) in pairwise(spans))
    world.wait(500.0, every_s=100.0)  # the task lies finished
    world.emit(e.TaskRetried(world.now, task))
    world.wait(30.0, every_s=10.0)
    assert shown(world, task).waited_s == 30.0, "since the retry"
