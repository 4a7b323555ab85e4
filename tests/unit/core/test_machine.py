"""`machine.step`: statuses and their changes, late and repeated events, changes, GPUs that come and go, replay."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from carma.core.machine import step
from carma.core.model.commands import EstimateTask, LaunchAttempt
from carma.core.model.events import (
    AttemptEnded,
    AttemptStarted,
    Durable,
    GpusFound,
    MemoryObserved,
    RecoveryDue,
    StopRequested,
    TaskChanged,
    TaskEstimated,
    TaskFinished,
    TaskHeld,
    TaskPlaced,
    TaskReleased,
    TaskRestored,
    TaskRetried,
    TaskSubmitted,
    TaskWarned,
    Ticked,
)
from carma.core.model.outcome import Cancelled, Failed, NeverFits, OutOfMemory, Succeeded
from carma.core.model.settings import PlacementRules, QueueRules, RecoveryRules, Rules
from carma.core.model.status import Ended, Estimating, Finished, Queued, Running, Starting
from carma.core.model.values import (
    AttemptKey,
    Booking,
    Dependency,
    Estimate,
    GpuId,
    NoEstimate,
    Placement,
    TaskId,
    TaskSpec,
)
from carma.core.policies import exclusive
from carma.core.scheduling.eligibility import Waiting
from carma.core.scheduling.explanation import explain
from carma.core.state import InvalidEvent, State
from carma.daemon.state_checkpoint import checkpoint
from carma.testing.builders import ALICE, World, gpu

ONE = TaskId(1)


def test_the_way_of_a_task_with_the_commands_that_go_out() -> None:
    world = World(1)
    spec = TaskSpec(command=("x",), directory="/")
    assert world.emit(TaskSubmitted(world.now, ONE, ALICE, spec)) == [EstimateTask(ONE)]
    assert isinstance(world.task(ONE).status, Estimating)
    refusal = NoEstimate(source="history", reason="never seen")
    assert world.emit(TaskEstimated(world.now, ONE, None, (refusal,))) == []
    assert isinstance(world.task(ONE).status, Queued)
    assert world.task(ONE).no_estimate == (refusal,)
    world.settle()
    status = world.task(ONE).status
    assert isinstance(status, Starting)
    key = AttemptKey(ONE, 1)
    assert world.commands[-1] == LaunchAttempt(key, ALICE, spec, status.placement)
    world.emit(AttemptStarted(world.now, key, 77))
    running = world.task(ONE).status
    assert isinstance(running, Running)
    assert (running.pid, running.placement) == (77, status.placement)
    world.emit(AttemptEnded(world.now, key, Succeeded(), 1_234, 5.5, used_s=3.0))
    assert world.task(ONE).status == Ended(world.now, Succeeded())
    world.settle()
    assert world.outcome(ONE) == Succeeded()
    attempt = world.task(ONE).attempts[0]
    assert (attempt.observed_mib, attempt.own_energy_j, attempt.ended_at) == (1_234, 5.5, world.now)


def test_a_launch_that_fails_ends_an_attempt_that_never_ran() -> None:
    world = World(1)
    task = world.submit(1_000)
    world.settle()
    world.end(task, Failed(127, "no such file"))
    world.settle()
    assert world.outcome(task) == Failed(127, "no such file")
    assert world.task(task).attempts[0].started_at is None


# -- late and repeated events -----------------------------------------------------------------------------------------
LATE: dict[str, Callable[[AttemptKey, float], Durable]] = {
    "started again": lambda key, at: AttemptStarted(at, key, 99),
    "ended again": lambda key, at: AttemptEnded(at, key, Failed(9)),
    "memory seen late": lambda key, at: MemoryObserved(at, key, 99_999),
    "stopped when over": lambda key, at: StopRequested(at, key.task, Cancelled("bob"), 1.0),
    "warned when over": lambda key, at: TaskWarned(at, key.task, 10),
    "held when over": lambda key, at: TaskHeld(at, key.task),
    "released when over": lambda key, at: TaskReleased(at, key.task),
    "finished again": lambda key, at: TaskFinished(at, key.task, Failed(5)),
    "recovery due when over": lambda key, at: RecoveryDue(at, key.task),
    "estimated when over": lambda key, at: TaskEstimated(at, key.task, None),
    "changed when over": lambda key, at: TaskChanged(at, key.task, priority=5),
}


@pytest.mark.parametrize("what", LATE)
def test_late_and_repeated_events_are_harmless(what: str) -> None:
    world = World(1)
    task = world.run(1_000)
    key = world.state.active[task]
    world.end(task)
    world.settle()
    before = world.task(task)
    assert world.emit(LATE[what](key, world.now + 1)) == []
    assert world.task(task) == before
    assert world.settle() == []


@pytest.mark.parametrize(
    "event",
    [
        AttemptStarted(2_000.0, AttemptKey(TaskId(1), 1), 99),
        AttemptEnded(2_000.0, AttemptKey(TaskId(1), 1), Succeeded()),
        MemoryObserved(2_000.0, AttemptKey(TaskId(1), 1), 39_000),
    ],
)
def test_news_of_an_earlier_attempt_does_not_touch_the_newer_one(event: Durable) -> None:
    world = World(1)
    task = world.run(1_000)
    world.oom(task)
    world.settle()
    world.wait(5)
    world.settle()
    assert world.task(task).key.attempt == 2
    before = world.task(task)
    world.emit(event)
    assert world.task(task) == before


def test_an_end_that_is_reported_twice_frees_the_gpu_once() -> None:
    world = World(1)
    one, two = world.run(1_000), world.run(1_000)
    key = world.state.active[one]
    world.end(one)
    world.emit(AttemptEnded(world.now, key, Failed(1)))
    world.settle()
    assert world.outcome(one) == Succeeded()
    assert [holder.key.task for holder in world.view(0).holders] == [two]


@pytest.mark.parametrize(
    "event",
    [
        TaskHeld(1.0, TaskId(9)),
        StopRequested(1.0, TaskId(9), Cancelled("x"), 1.0),
        TaskFinished(1.0, TaskId(9), Succeeded()),
        TaskPlaced(1.0, AttemptKey(TaskId(9), 1), Placement(gpus=(), booking=Booking(memory_mib=1, source="x"))),
    ],
)
def test_an_event_about_a_task_that_never_was_is_a_defect(event: Durable) -> None:
    with pytest.raises(InvalidEvent, match="there is no task 9"):
        step(State(World(1).state.rules, World(1).state.policy), event)


def test_a_task_is_not_placed_twice_nor_submitted_twice() -> None:
    world = World(1)
    task = world.submit(1_000)
    world.settle()
    placed = next(event for event in world.log if isinstance(event, TaskPlaced))
    with pytest.raises(InvalidEvent, match="cannot be placed"):
        world.emit(placed)
    with pytest.raises(InvalidEvent, match="submitted before"):
        world.emit(TaskSubmitted(world.now, task, ALICE, world.task(task).spec))


def test_time_never_goes_back() -> None:
    world = World(1)
    world.emit(Ticked(5_000.0))
    world.emit(Ticked(4_000.0))
    assert world.state.now == 5_000.0


# -- changes ----------------------------------------------------------------------------------------------------------
def test_a_changed_memory_is_estimated_again_and_replaces_the_booking_of_recovery() -> None:
    world = World(1)
    task = world.run(1_000)
    world.oom(task)
    world.settle()
    assert world.task(task).plan is not None
    assert world.emit(TaskChanged(world.now, task, gpu_memory_mib=9_000)) == [EstimateTask(task)]
    assert isinstance(world.task(task).status, Estimating)
    world.emit(TaskEstimated(world.now, task, Estimate(footprint_mib=9_000, upper_mib=9_000, source="declared")))
    world.settle()
    booking = Booking(memory_mib=9_000, source="declared", cap_mib=9_000)
    assert world.task(task).attempts[-1].placement.booking == booking


def test_an_estimate_of_the_figure_before_the_change_is_asked_for_again() -> None:
    world = World(1)
    spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=1_000)
    world.emit(TaskSubmitted(world.now, ONE, ALICE, spec))
    world.emit(TaskChanged(world.now, ONE, gpu_memory_mib=8_000))
    old = Estimate(footprint_mib=1_000, upper_mib=1_000, source="declared")
    assert world.emit(TaskEstimated(world.now, ONE, old)) == [EstimateTask(ONE)]
    assert isinstance(world.task(ONE).status, Estimating)
    world.emit(TaskEstimated(world.now, ONE, Estimate(footprint_mib=8_000, upper_mib=8_000, source="declared")))
    assert isinstance(world.task(ONE).status, Queued)


def test_a_held_task_stays_held_through_a_change() -> None:
    world = World(1)
    task = world.submit(1_000, held=True)
    world.emit(TaskChanged(world.now, task, gpu_memory_mib=2_000))
    world.emit(TaskEstimated(world.now, task, Estimate(footprint_mib=2_000, upper_mib=2_000, source="declared")))
    world.settle()
    assert world.why(task).code == "Held"


def test_a_name_and_a_comment_change_nothing_else() -> None:
    world = World(1)
    task = world.run(1_000)
    before = world.task(task)
    world.emit(TaskChanged(world.now, task, name="new", comment="why"))
    after = world.task(task)
    assert (after.spec.name, after.spec.comment, after.status) == ("new", "why", before.status)


def test_a_task_ends_with_its_last_attempt_however_late_that_is_noticed() -> None:
    world = World(1)
    task = world.run(1_000)
    ended_at = world.now
    world.end(task)
    world.now += 3_600.0
    world.settle()
    assert world.task(task).status == Finished(ended_at, Succeeded())
    assert world.log[-1].at == world.now, "the log itself does not go back"


# -- GPUs that come and go --------------------------------------------------------------------------------------------
ENDING = Rules(queue=QueueRules(misfits="end"))


def test_tasks_that_no_longer_fit_wait_for_their_gpus_and_delay_no_other_task() -> None:
    world = World(2)
    gang = world.submit(1_000, gpus=2, priority=5)
    large = world.submit(39_000, held=True, priority=5)
    small = world.submit(1_000)
    world.emit(GpusFound(world.now, (gpu(0, 24_576),)))
    world.sample()
    world.emit(TaskReleased(world.now, large))
    world.settle()
    assert world.placed(small)
    assert world.why(gang) == Waiting("NeverFits", "it asks for 2 GPUs; this server has 1")
    assert world.why(large).code == "NeverFits"
    assert explain(world.state, gang, world.now).code == "NeverFits"
    world.emit(GpusFound(world.now, (gpu(0, 24_576), gpu(1), gpu(2))))
    world.sample()
    world.settle()
    assert world.placed(gang) or world.placed(large)
    assert "NeverFits" not in {world.why(task).code for task in (gang, large) if not world.placed(task)}


def test_tasks_that_no_longer_fit_end_with_the_reason_wherever_they_wait() -> None:
    world = World(2, rules=ENDING)
    world.run(20_000)
    queued = world.submit(30_000, gpus=2)
    held = world.submit(30_000, gpus=2, held=True)
    depends = world.submit(39_000, after=(Dependency(queued),))
    fits = world.submit(1_000, held=True)
    world.settle()
    world.emit(GpusFound(world.now, (gpu(0, 24_576),)))
    world.sample()
    world.settle()
    assert world.outcome(queued) == NeverFits("it asks for 2 GPUs; this server has 1")
    assert world.outcome(held) == world.outcome(queued)
    assert world.outcome(depends) is not None
    assert world.outcome(fits) is None


def test_a_retry_on_a_smaller_server_ends_instead_of_waiting_for_ever() -> None:
    world = World([40_960, 81_920], rules=ENDING)
    task = world.run(60_000)
    assert world.gpus_of(task) == (1,)
    world.emit(GpusFound(world.now, (gpu(0, 40_960),)))
    world.settle()
    world.oom(task, asked_mib=None)
    world.settle()
    world.wait(5)
    world.settle()
    assert world.outcome(task) is not None


@pytest.mark.parametrize("when", ["retried", "changed"])
def test_what_is_asked_for_by_hand_is_held_against_the_gpus_again(when: str) -> None:
    world = World([40_960, 81_920], rules=ENDING)
    task = world.run(60_000)
    world.end(task, Failed(1))
    world.settle()
    world.emit(GpusFound(world.now, (gpu(0, 40_960),)))
    world.settle()
    if when == "changed":
        task = world.submit(1_000, held=True)
        world.settle()
        world.emit(TaskChanged(world.now, task, gpu_memory_mib=60_000))
    else:
        world.emit(TaskRetried(world.now, task))
    world.settle()
    told = world.outcome(task)
    assert isinstance(told, NeverFits)
    assert told.reason == "it asks for 58.6 GiB of GPU memory; the largest GPU here is GPU 0 with 40.0 GiB"


def test_a_moment_without_gpus_ends_no_task() -> None:
    world = World(2)
    task = world.submit(30_000, gpus=2)
    world.emit(GpusFound(world.now, ()))
    assert world.settle() == []
    world.emit(GpusFound(world.now, (gpu(0), gpu(1))))
    world.wait(1)
    world.settle()
    assert world.placed(task)


def test_a_task_on_a_gpu_that_vanished_ends_as_its_process_does() -> None:
    world = World(2)
    task = world.run(30_000)
    world.emit(GpusFound(world.now, (gpu(1),)))
    world.wait(3)
    world.settle()
    assert world.placed(task)
    world.end(task, Failed(1))
    world.settle()
    assert world.outcome(task) == Failed(1)


# -- replay -----------------------------------------------------------------------------------------------------------
def test_a_replay_gives_the_same_state_whatever_the_settings_say_today() -> None:
    world = World(2)
    first = world.run(5_000)
    second = world.submit(30_000, gpus=2)
    world.oom(first)
    world.settle()
    world.stop(second)
    world.wait(10)
    world.settle()
    decoder = msgspec.json.Decoder(Durable)
    other = Rules(
        placement=PlacementRules(tasks_per_gpu=1, gpus=("7",)),
        recovery=RecoveryRules(retries=0),
        queue=QueueRules(overtakes=0, backfill_depth=0),
    )
    again = State(other, exclusive.POLICY)
    for event in world.log:
        step(again, decoder.decode(msgspec.json.encode(event)))
    assert again.tasks == world.state.tasks
    assert checkpoint(again, 7)[0].overtaken == checkpoint(world.state, 7)[0].overtaken
    assert again.last_gpu == world.state.last_gpu


def test_a_finished_task_can_be_taken_out_of_the_archive_and_retried() -> None:
    world = World(1)
    task = world.run(1_000)
    world.end(task, Failed(1))
    world.settle()
    kept = world.task(task)
    world.state.drop(task)
    world.emit(TaskRestored(world.now, kept))
    world.emit(TaskRestored(world.now, msgspec.structs.replace(kept, attempts=())))
    assert world.task(task) == kept, "one that is there is not replaced"
    world.emit(TaskRetried(world.now, task))
    assert (world.task(task).retried_at, kept.retried_at) == (world.now, None)
    world.settle()
    assert world.state.active[task] == AttemptKey(task, 2)


def test_an_oom_of_the_host_has_no_blame() -> None:
    world = World(1)
    task = world.run(1_000)
    world.end(task, OutOfMemory("host", 137))
    world.settle()
    assert world.task(task).attempts[-1].blame is None
    assert isinstance(world.task(task).status, Finished)


def test_an_unknown_gpu_id_is_ignored() -> None:
    world = World(1)
    assert GpuId("GPU-7") not in world.state.live
    world.emit(GpusFound(world.now, (gpu(0),)))
    assert list(world.state.live) == [GpuId("GPU-0")]
