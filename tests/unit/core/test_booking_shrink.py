"""A booking shrinks once, to the memory that the first steps have shown, and only if no task is harmed."""

from __future__ import annotations

import msgspec
import pytest

from carma.core.machine import step
from carma.core.model.events import BookingShrunk, Durable, StopRequested
from carma.core.model.outcome import OutOfMemory
from carma.core.model.settings import Memory, RecoveryRules, Rules, Sharing
from carma.core.model.values import Booking, Estimate, GpuId, TaskId
from carma.core.state import State
from carma.daemon.state_checkpoint import adopt, checkpoint, restore
from carma.testing.builders import World

LOG: msgspec.json.Decoder[Durable] = msgspec.json.Decoder(Durable)


def booking(world: World, task: TaskId) -> Booking:
    """The booking, equal in all three places that store it."""
    attempt = world.task(task).attempts[-1]
    key = world.task(task).key
    assert {world.state.on_gpu[gpu][key].booking for gpu in attempt.placement.gpus} == {attempt.placement.booking}
    return attempt.placement.booking


def shrunk(world: World) -> list[BookingShrunk]:
    return [event for event in world.log if isinstance(event, BookingShrunk)]


def test_a_settled_task_books_what_it_was_seen_to_take_and_a_margin() -> None:
    world = World(1)
    task = world.run(12_288, holds_mib=9_114, source="trace")
    assert booking(world, task) == Booking(
        memory_mib=9_114 + 456, source="trace", cap_mib=12_288, placed_mib=12_288
    )  # 5 %; the limit that it runs under stays
    assert world.view(0).booked_mib == 9_570


def test_the_margin_is_256_mib_at_least() -> None:
    world = World(1)
    task = world.run(4_000, holds_mib=1_000, source="trace")
    assert booking(world, task).memory_mib == 1_256


def test_one_of_unknown_size_shrinks_too() -> None:
    world = World(1)
    task = world.run(holds_mib=1_000)
    assert (booking(world, task).source, booking(world, task).memory_mib) == ("unknown", 1_256)


@pytest.mark.parametrize(
    ("why", "rules", "task"),
    [
        ("the user's word stays", Rules(), {"mib": 12_000, "source": "declared"}),
        ("one alone on its GPUs keeps all", Rules(), {"mib": 12_000, "source": "trace", "exclusive": True}),
        ("it is switched off", Rules(memory=Memory(shrink=False)), {"mib": 12_000, "source": "trace"}),
        ("neighbours are not protected", Rules(sharing=Sharing(watchdog=False)), {"mib": 12_000, "source": "trace"}),
        ("it must not be run twice", Rules(), {"mib": 12_000, "source": "trace", "max_oom_retries": 0}),
        ("nothing is", Rules(recovery=RecoveryRules(retries=0)), {"mib": 12_000, "source": "trace"}),
        ("there is nothing to gain", Rules(), {"mib": 4_290, "source": "trace"}),
    ],
)
def test_what_is_not_shrunk(why: str, rules: Rules, task: dict[str, object]) -> None:
    world = World(1, rules=rules)
    number = world.run(holds_mib=4_000, **task)  # type: ignore[arg-type]
    assert shrunk(world) == [], why
    assert booking(world, number).memory_mib == task["mib"]


def test_history_knows_more_than_the_first_steps() -> None:
    """A whole run came to 10,000 MiB; that this one is at 4,000 now does not mean that it stays there."""
    world = World(1)
    task = world.submit(source="history")
    estimate = Estimate(footprint_mib=10_000, upper_mib=14_000, source="history")
    state = world.state
    state.put(msgspec.structs.replace(state.tasks[task], estimate=estimate))
    world.settle()
    world.start(task, mib=4_000)
    world.wait(30)
    world.settle()
    assert booking(world, task).memory_mib == 10_500


def test_a_task_that_only_waits_on_the_gpu_has_shown_nothing() -> None:
    """Its weights are there, and it loads its data: the GPU does nothing. Then it works, and needs time to settle."""
    world = World(1)
    task = world.submit(12_000, source="trace")
    world.settle()
    world.activity[GpuId("GPU-0")] = (0.0, 0.0, 0.0)
    world.start(task, mib=2_000)
    world.wait(60)
    world.settle()
    assert shrunk(world) == []
    del world.activity[GpuId("GPU-0")]
    world.memory[world.state.active[task]] = 9_000
    world.wait(15)
    world.settle()
    assert shrunk(world) == []  # it grew less than the settling time ago
    world.wait(10)
    world.settle()
    assert [event.peak_mib for event in shrunk(world)] == [9_000]


def test_what_it_did_before_it_grew_says_nothing_of_what_it_does_with_it() -> None:
    world = World(1)
    task = world.submit(12_000, source="trace")
    world.settle()
    world.start(task, mib=2_000)
    world.wait(10)
    world.memory[world.state.active[task]] = 5_000
    world.activity[GpuId("GPU-0")] = (0.0, 0.0, 0.0)
    world.wait(60)
    world.settle()
    assert shrunk(world) == []


def test_it_must_have_worked_for_most_of_the_settling_time() -> None:
    world = World(1)
    task = world.submit(12_000, source="trace")
    world.settle()
    world.activity[GpuId("GPU-0")] = (0.0, 0.0, 0.0)
    world.start(task, mib=2_000)
    world.wait(60)
    del world.activity[GpuId("GPU-0")]
    world.wait(3)
    world.settle()
    assert shrunk(world) == []
    world.wait(15)
    world.settle()
    assert len(shrunk(world)) == 1


def test_a_busy_neighbour_does_not_make_a_task_that_waits_look_busy() -> None:
    world = World(1)
    world.run(5_000, runtime_s=1e6)
    world.wait(60)
    waits = world.submit(12_000, source="trace")
    world.settle()
    world.start(waits, mib=2_000)
    world.wait(60)  # and the GPU does what it did before
    world.settle()
    assert shrunk(world) == []


def test_it_happens_once() -> None:
    world = World(1)
    task = world.run(12_000, holds_mib=9_000, source="trace")
    world.memory[world.state.active[task]] = 3_000
    world.wait(60)
    world.settle()
    assert len(shrunk(world)) == 1


def test_the_room_that_it_gives_up_is_for_others_and_comes_back_while_it_is_free() -> None:
    world = World(1, memory_mib=20_000)
    task = world.run(15_000, holds_mib=6_000, source="trace")
    assert world.view(0).room_mib == 20_000 - 6_300
    world.memory[world.state.active[task]] = 11_000  # an evaluation, say
    world.wait(2)
    assert world.settle() != []  # the new peak
    assert world.view(0).room_mib == 9_000
    assert world.task(task).attempts[-1].outcome is None
    newcomer = world.submit(12_000)
    world.settle()
    assert not world.placed(newcomer)


def test_a_task_that_grows_again_beside_new_neighbours_is_stopped_and_retried_first_with_its_first_booking() -> None:
    """It kept to what was booked for it at first, so it is no retry that it used up."""
    world = World(1, memory_mib=20_000)
    task = world.run(15_000, holds_mib=6_000, source="trace")
    neighbour = world.submit(12_000)
    world.settle()
    assert world.placed(neighbour)
    world.start(neighbour, mib=11_000)
    world.wait(2)
    world.memory[world.state.active[task]] = 8_500
    world.wait(1)
    (stop,) = [event for event in world.settle() if isinstance(event, StopRequested)]
    assert stop.task == task
    world.end(task, OutOfMemory("gpu", 137))
    world.settle()
    plan = world.task(task).plan
    assert plan is not None
    assert (plan.memory_mib, plan.first) == (15_000, True)
    assert "from 14.6 GiB to 6.2 GiB" in plan.reason
    assert world.task(neighbour).attempts[-1].outcome is None


def test_a_task_that_grew_beyond_its_first_booking_is_to_blame() -> None:
    world = World(1, memory_mib=30_000)
    task = world.run(15_000, holds_mib=6_000, source="trace")
    world.memory[world.state.active[task]] = 16_000
    world.wait(1)
    world.oom(task, asked_mib=1_000)
    world.settle()
    plan = world.task(task).plan
    assert plan is not None
    assert (plan.rung, plan.first) == ("again", False)
    assert (plan.memory_mib or 0) > 15_000


def test_the_log_and_a_checkpoint_give_the_same_bookings_again() -> None:
    world = World(2)
    task = world.run(12_000, holds_mib=9_000, source="trace")
    rules, policy = world.state.rules, world.state.policy
    again = State(rules, policy)
    for event in world.log:
        step(again, LOG.decode(msgspec.json.encode(event)))
    assert again.tasks[task].attempts == world.task(task).attempts
    saved, _ = checkpoint(world.state, len(world.log))
    back = restore(rules, policy, saved)
    adopt(back)
    assert back.on_gpu == world.state.on_gpu
    assert booking(world, task).memory_mib == 9_450


def test_a_repeated_or_late_event_changes_nothing() -> None:
    world = World(1)
    task = world.run(12_000, holds_mib=9_000, source="trace")
    (event,) = shrunk(world)
    before = booking(world, task)
    world.emit(event)
    world.emit(msgspec.structs.replace(event, to_mib=20_000))
    assert booking(world, task) == before
    world.end(task)
    world.settle()
    world.emit(msgspec.structs.replace(event, to_mib=1))
    assert world.task(task).attempts[-1].placement.booking == before
