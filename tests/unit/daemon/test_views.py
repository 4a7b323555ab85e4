"""The state as the API shows it: codes, reasons with numbers, what GPUs do."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model.decision import Refusal, Verdict
from carma.core.model.events import AttemptStarted, GpuDrained, GpusSampled, IdleNoted, StopRequested
from carma.core.model.outcome import (
    Cancelled,
    Disrupted,
    Failed,
    Lost,
    NeverFits,
    Outcome,
    OutOfMemory,
    Succeeded,
    TimedOut,
)
from carma.core.model.settings import PlacementRules, Rules
from carma.core.model.status import Ended, Estimating, Finished, Queued, Recovering, Status
from carma.core.model.values import Activity, Confinement, GpuId, GpuSample, Guard, Owner
from carma.core.policies.exclusive import POLICY as EXCLUSIVE
from carma.daemon.auth import Identity
from carma.daemon.views.explanation import explanation
from carma.daemon.views.server_views import gpu_views
from carma.daemon.views.task_views import ViewContext, code_of, task_views
from carma.launch.output_paths import program_name
from carma.testing.builders import ALICE, BOB, World
from carma.wire.api_types import GpuView, TaskView


def lens(world: World, owner: Owner = ALICE, *, admin: bool = False) -> ViewContext:
    who = Identity(uid=owner.uid, gid=owner.gid, name=owner.name, admin=admin)
    return ViewContext(world.state, world.now, who, Path("/logs"))


def shown(world: World, task: int, owner: Owner = ALICE) -> TaskView:
    return next(task_views([world.state.tasks[task]], lens(world, owner)))  # type: ignore[index]


def gpus(world: World) -> list[GpuView]:
    return gpu_views(world.state, world.now)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Estimating(0.0), "PD"),
        (Queued(0.0), "PD"),
        (Queued(0.0, held=True), "H"),
        (Estimating(0.0, held=True), "H"),
        (Ended(0.0, Succeeded()), "PD"),
        (Recovering(0.0, 9.0), "PD"),
    ],
)
def test_waiting_tasks_have_the_codes_of_other_queues(status: Status, code: str) -> None:
    assert code_of(status) == code


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Succeeded(), "CD"),
        (Failed(1), "F"),
        (OutOfMemory("gpu"), "OOM"),
        (OutOfMemory("host"), "OOM"),
        (Cancelled("alice"), "CA"),
        (TimedOut(60.0), "TO"),
        (Lost("the machine restarted"), "LO"),
        (Disrupted("its MPS server ended"), "DI"),
        (NeverFits("too large"), "NF"),
    ],
)
def test_every_outcome_has_its_code(outcome: Outcome, code: str) -> None:
    assert code_of(Finished(0.0, outcome)) == code


def test_an_attempt_tells_how_it_shares_what_holds_it_and_what_it_takes() -> None:
    world = World(1)
    task = world.submit(4_000, mechanism="mps", threads_percent=30)
    world.settle()
    key = world.state.active[task]
    guard = Guard(rung="mps", limit_mib=4_000, how="MPS's memory limit")
    how = Confinement(mechanism="mps", guards=(guard,), note="only for the owner")
    world.emit(AttemptStarted(world.now, key, 10_001, how))
    world.memory[key] = 3_000
    world.wait(5)
    view = shown(world, task)
    (attempt,) = view.attempts
    assert (view.mechanism, view.mechanism_asked, view.threads_percent) == ("mps", "mps", 30)
    assert [(each.rung, each.limit_mib, each.how) for each in attempt.guards] == [("mps", 4_000, "MPS's memory limit")]
    assert attempt.note == "only for the owner"
    assert shown(world, task, BOB).attempts[0].note == ""
    assert attempt.activity is not None
    assert attempt.activity.sm_active == view.sm_active == 0.3  # while it runs: what was seen so far
    assert attempt.activity.tensor_active is None
    assert view.energy_j == attempt.energy_j
    world.end(task)
    over = shown(world, task)
    assert (over.sm_active, over.mechanism) == (0.3, "mps")


def test_energy_of_the_older_kind_is_not_shown() -> None:
    world = World(1)
    task = world.run(4_000)
    world.end(task)
    assert shown(world, task).energy_j == world.task(task).attempts[0].energy_j is not None
    older = replace(world.task(task).attempts[0], used_s=0.0)
    world.state.put(replace(world.task(task), attempts=(older,)))
    view = shown(world, task)
    assert (view.energy_j, view.attempts[0].energy_j) == (None, None)


def test_waiting_after_an_attempt_is_not_running() -> None:
    world = World(1)
    task = world.submit(4_000)
    assert shown(world, task).ran_s is None
    world.settle()
    assert shown(world, task).ran_s is None  # it was sent there, and has not started
    world.start(task)
    world.wait(30)
    assert shown(world, task).ran_s == 30.0
    world.oom(task)
    world.wait(100)
    assert shown(world, task).ran_s == 30.0
    world.stop(task)
    view = shown(world, task)
    assert (view.code, view.ran_s, view.ended_at) == ("CA", 30.0, world.now)


def test_a_gpu_tells_whether_any_kernel_ran_where_that_is_given() -> None:
    world = World(2)
    for gr_active in (0.9, 0.7):
        world.now += 1
        given = GpuSample(
            gpu=GpuId("GPU-0"), at=world.now, memory_used_mib=0, activity=Activity(gr_active=gr_active), processes=()
        )
        world.emit(GpusSampled(world.now, (given,)))
    first, second = gpus(world)
    assert first.gr_active == pytest.approx(0.8)
    assert (first.tensor_active, second.gr_active) == (None, None)


def test_a_running_task_has_its_gpus_booking_and_what_was_seen() -> None:
    world = World(2)
    task = world.submit(4_000, gpus=2)
    world.settle()
    assert shown(world, task).code == "R"
    world.start(mib=3_500)
    world.wait(3)
    view = shown(world, task)
    assert (view.state, view.gpus, view.gpu_indices) == ("running", ("GPU-0", "GPU-1"), (0, 1))
    assert (view.booking_mib, view.observed_mib, view.attempts[0].booking_source) == (4_000, 3_500, "declared")
    assert (view.used_mib, view.attempts[0].used_mib) == (3_500, 3_500)
    assert view.attempts[0].stderr == f"/logs/{task}.1/stderr.log"
    assert view.reason == ""
    world.emit(StopRequested(world.now, task, Cancelled("alice", "enough"), 10.0))
    view = shown(world, task)
    assert (view.code, view.reason) == ("CG", "is being stopped: cancelled by alice: enough")


def test_a_waiting_task_says_how_much_it_needs_and_how_much_there_is() -> None:
    world = World(2)
    for _ in range(2):
        world.submit(30_000, time_limit_s=600.0)
        world.settle()
    world.start()
    world.wait(60)
    task = world.submit(20_000)
    view = shown(world, task)
    assert view.reason_code == "Memory"
    assert "needs 19.5 GiB; most free is" in view.reason
    assert view.reason_short == "needs 19.5 GiB, GPU 0 has 10.2 GiB"
    assert view.used_mib is None
    assert view.reserved_start_at is not None
    told = explanation(world.task(task), lens(world))
    assert [(entry.gpu, entry.accepted, entry.code) for entry in told.entries] == [
        ("GPU-0", False, "Memory"),
        ("GPU-1", False, "Memory"),
    ]
    assert (told.needs_mib, told.needs_source) == (20_000, "declared")


def test_a_recovering_task_tells_its_plan() -> None:
    world = World(1)
    task = world.submit(4_000)
    world.settle()
    world.start()
    world.oom(task)
    world.settle()
    view = shown(world, task)
    assert (view.state, view.code, view.reason_code) == ("recovering", "PD", "Recovery")
    assert "back in the queue in" in view.reason
    assert view.attempts[0].outcome is not None
    assert view.attempts[0].outcome["kind"] == "out_of_memory"


def test_the_explanation_of_a_running_task_is_where_it_was_placed() -> None:
    world = World(2)
    task = world.submit(4_000)
    world.settle()
    told = explanation(world.task(task), lens(world))
    assert [entry.chosen for entry in told.entries] == [True, False]
    assert told.needs_mib == 4_000


def test_the_explanation_of_a_finished_task_is_its_end_and_its_last_decision() -> None:
    world = World(2)
    task = world.submit(4_000)
    world.settle()
    world.start()
    world.end(task, Failed(3))
    world.settle()
    told = explanation(world.task(task), lens(world))
    assert (told.state, told.reason, told.attempt) == ("finished", "failed with exit code 3", 1)
    assert told.decision.startswith("placed on GPU 0: idle")
    first, second = told.entries
    assert (first.gpu, first.accepted, first.chosen, second.gpu) == ("GPU-0", True, True, "GPU-1")
    assert not any("is over" in entry.reason for entry in told.entries)
    assert (told.needs_mib, told.needs_source) == (4_000, "declared")


def test_what_was_thought_of_each_gpu_then_is_kept_with_the_attempt() -> None:
    world = World(2)
    task = world.submit(4_000)
    world.settle()
    world.start()
    world.end(task, Succeeded())
    world.settle()
    kept = world.task(task)
    verdicts = (Verdict(GpuId("GPU-0"), Refusal("Drained", "was drained")), Verdict(GpuId("GPU-1"), chosen=True))
    kept = replace(kept, attempts=(replace(kept.attempts[0], verdicts=verdicts),))
    told = explanation(kept, lens(world))
    assert [(entry.index, entry.accepted, entry.reason) for entry in told.entries] == [
        (0, False, "was drained"),
        (1, True, "chosen"),
    ]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("/opt/conda/bin/python3.11", "src/train.py", "--lr", "1"), "train.py"),
        (("python", "-m", "carma.vgpu.virtual_task"), "carma.vgpu.virtual_task"),
        (("python", "-c", "print()"), "python"),
        (("python", "-m"), "python"),
        (("python",), "python"),
        (("torchrun", "--nproc", "2"), "torchrun"),
        (("bash", "run.sh"), "run.sh"),
        (("./pythonic", "x"), "pythonic"),
    ],
)
def test_a_task_without_a_name_is_called_after_what_it_runs(command: tuple[str, ...], name: str) -> None:
    assert program_name(command) == name


def test_a_task_that_was_never_placed_has_no_decision_to_look_back_at() -> None:
    world = World(1)
    task = world.submit()
    world.emit(StopRequested(world.now, task, Cancelled("alice"), 0.0))
    told = explanation(world.task(task), lens(world))
    assert (told.reason, told.attempt) == ("cancelled by alice", None)
    assert [entry.reason for entry in told.entries] == ["the task ended before a GPU was chosen"]


def test_a_waiting_task_tells_what_its_next_attempt_needs() -> None:
    world = World(1)
    task = world.submit(4_000)
    assert shown(world, task).needs_mib == 4_000
    world.settle()
    world.start()
    assert shown(world, task).needs_mib is None
    world.oom(task)
    world.settle()
    view = shown(world, task)
    assert view.booking_mib == 4_000
    assert view.needs_mib is not None
    assert view.needs_mib > 4_000


def test_another_users_command_is_hidden_but_a_given_name_is_not() -> None:
    world = World(1)
    plain, named = world.submit(comment="private"), world.submit(name="bert")
    hidden = shown(world, plain, BOB)
    assert (hidden.name, hidden.command, hidden.directory, hidden.comment) == ("-", ("-",), "-", "")
    assert shown(world, named, BOB).name == "bert"
    assert next(task_views([world.task(plain)], lens(world, BOB, admin=True))).command == ("python", "train.py")


def test_an_archived_task_is_shown_without_asking_the_queue() -> None:
    world = World(1)
    task = world.submit()
    world.emit(StopRequested(world.now, task, Cancelled("alice"), 0.0))
    kept = world.task(task)
    world.state.drop(task)
    assert next(task_views([kept], lens(world))).reason == "cancelled by alice"
    assert [entry.accepted for entry in explanation(kept, lens(world)).entries] == [False]


def test_a_gpu_says_what_it_does_and_why() -> None:
    world = World(4)
    assert [view.state for view in gpus(world)] == ["idle"] * 4
    unknown = world.submit()
    world.submit(4_000, exclusive=True)
    world.settle()
    world.start()
    world.start(unknown, mib=4_000)
    world.foreign[GpuId("GPU-2")] = 1_000
    world.faults[GpuId("GPU-3")] = "fell off the bus"
    world.wait(5)
    warming, exclusive, foreign, fault = gpus(world)
    assert (warming.state, warming.tasks, warming.used_mib) == ("warming", (1,), 4_000)
    assert "task 1" in warming.reason
    assert exclusive.state == "exclusive"
    assert (foreign.state, foreign.foreign[0].pid, foreign.foreign[0].memory_mib) == ("open", 77, 1_000)
    assert (fault.state, fault.used_mib) == ("fault", None)
    assert "fell off the bus" in fault.reason
    world.emit(GpuDrained(world.now, None, "maintenance"))
    assert [view.drained for view in gpus(world)] == [True] * 4
    assert gpus(world)[0].state == "drained"


def test_a_settled_gpu_is_open_until_it_is_full_or_busy() -> None:
    world = World(1, rules=Rules(placement=PlacementRules(tasks_per_gpu=2)))
    first = world.submit(4_000)
    world.settle()
    world.start()
    world.wait(60)
    view = gpus(world)[0]
    assert view.state == "open"
    assert view.sm_active == pytest.approx(0.3)
    assert set(view.risk) == {"sm_active", "sm_occupancy", "dram_active"}
    world.activity[GpuId("GPU-0")] = (0.99, 0.1, 0.1)
    world.wait(60)
    assert gpus(world)[0].state == "closed"
    world.activity[GpuId("GPU-0")] = (0.2, 0.1, 0.1)
    world.wait(60)
    second = world.submit(4_000)
    world.settle()
    assert gpus(world)[0].tasks == (first, second)
    assert gpus(world)[0].state == "full"


def test_missing_metrics_are_absent_and_not_zero() -> None:
    world = World(1)
    world.activity[GpuId("GPU-0")] = (None, None, None)
    world.wait(60)
    view = gpus(world)[0]
    assert (view.sm_active, view.dram_active, view.risk, view.tensor_active) == (None, None, {}, None)


def test_with_a_policy_that_does_not_share_a_gpu_with_a_task_is_closed_to_others() -> None:
    world = World(1, policy=EXCLUSIVE)
    world.submit(1_000)
    world.settle()
    assert gpus(world)[0].state == "exclusive"


def test_an_idle_holder_is_shown_with_its_task_and_on_its_gpu() -> None:
    world = World(1)
    task = world.run(1_024)
    assert (shown(world, task).idle_since, gpus(world)[0].idle_tasks) == (None, ())
    world.emit(IdleNoted(world.now, task, world.now - 1_800, "show"))
    view = shown(world, task)
    assert (view.idle_since, view.reason_code) == (world.now - 1_800, "Idle")
    assert (gpus(world)[0].tasks, gpus(world)[0].idle_tasks) == ((task,), (task,))
