"""Random histories through `machine.step`: no invariant breaks, nothing is lost, a replay gives the same state.

Each example is up to 100 steps; 250 examples make well over 10,000, derandomised so that a red run can be
had again. `validate` runs after every event (tests/builders.py).
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carma.core.machine import step
from carma.core.model.commands import SetPaused
from carma.core.model.events import (
    AttemptEnded,
    BookingShrunk,
    Durable,
    GpuDrained,
    GpuResumed,
    PreemptionRequested,
    StopRequested,
    TaskChanged,
    TaskEstimated,
    TaskFinished,
    TaskHeld,
    TaskPaused,
    TaskReleased,
    TaskRetried,
    TaskSubmitted,
    TaskUnpaused,
)
from carma.core.model.outcome import Cancelled, Disrupted, Failed, Lost, Outcome, OutOfMemory, Preempted, Succeeded
from carma.core.model.settings import Gate, Preemption, Rules, WarmUp
from carma.core.model.status import Finished, Running, Starting
from carma.core.model.values import ArrayPlace, Dependency, Estimate, GpuId, SaveSignal, TaskId, TaskSpec
from carma.core.policies import best_fit, exclusive, first_fit, horus, lucid, lug, magm, round_robin
from carma.core.propose import propose
from carma.core.scheduling.explanation import explain, waiting
from carma.core.scheduling.placement import Policy
from carma.core.state import State
from carma.core.telemetry.usage import note
from carma.daemon.state_checkpoint import checkpoint, forget, restore
from carma.testing.builders import ALICE, World
from tests.state_image import image

POLICIES: tuple[Policy, ...] = (
    exclusive.POLICY,
    round_robin.POLICY,
    first_fit.POLICY,
    best_fit.POLICY,
    magm.POLICY,
    lug.POLICY,
    horus.POLICY,
    lucid.POLICY,
)
LOG: msgspec.json.Decoder[Durable] = msgspec.json.Decoder(Durable)
MIB = st.sampled_from([200, 1_000, 6_000, 15_000, 30_000, 40_960])


def logged(state: State) -> bytes:
    """What a replay must rebuild: everything but what was only seen."""
    saved, finished = checkpoint(state, 0)
    order = sorted((*saved.tasks, *finished), key=lambda task: task.id)
    return msgspec.json.encode([order, saved.gpus, saved.drained, saved.last_gpu, sorted(saved.overtaken.items())])


class Histories(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        gpus=st.integers(1, 4),
        gate=st.booleans(),
        warm=st.booleans(),
        preempts=st.booleans(),
    )
    def begin(self, policy: Policy, gpus: int, gate: bool, warm: bool, preempts: bool) -> None:
        self.in_force = Rules(
            gate=Gate(enabled=gate),
            warmup=WarmUp(enabled=warm, settle_s=3.0),
            preemption=Preemption(enabled=preempts, after_s=2.0, least_run_s=2.0, again_s=5.0),
        )
        self.world = World(gpus, rules=self.in_force, policy=policy)
        self.policy = policy
        self.submitted: set[TaskId] = set()
        self.archived: set[TaskId] = set()
        self.ends: dict[TaskId, int] = {}

    # -- what users do ----------------------------------------------------------------------------------------------
    @rule(
        mib=st.one_of(st.none(), MIB),
        source=st.sampled_from(["declared", "trace"]),
        gpus=st.integers(1, 2),
        alone=st.booleans(),
        priority=st.integers(-1, 1),
        held=st.booleans(),
        after=st.booleans(),
        when=st.sampled_from(["ok", "any", "notok"]),
        limit=st.sampled_from([None, 1.0, 5.0, 30.0]),
        saves=st.booleans(),
        data=st.data(),
    )
    def submit(self, mib, source, gpus, alone, priority, held, after, when, limit, saves, data):  # type: ignore[no-untyped-def]
        on: tuple[Dependency, ...] = ()
        if after and self.world.state.tasks:
            on = (Dependency(data.draw(st.sampled_from(sorted(self.world.state.tasks))), when),)
        wanted = min(gpus, len(self.world.state.gpus))
        number = TaskId(max(self.submitted, default=0) + 1)
        array = ArrayPlace(TaskId(number - number % 3), number % 3, 1) if priority == 1 else None
        self.submitted.add(number)
        spec = TaskSpec(
            command=("x",),
            directory="/",
            gpus=wanted,
            gpu_memory_mib=mib if source == "declared" else None,
            exclusive=alone,
            priority=priority,
            after=on,
            time_limit_s=limit,
            array=array,
            checkpoint=SaveSignal(10, 3.0) if saves else None,
        )
        self.world.emit(TaskSubmitted(self.world.now, number, ALICE, spec, held))
        estimate = None if mib is None else Estimate(footprint_mib=mib, upper_mib=mib, source=source)
        self.world.emit(TaskEstimated(self.world.now, number, estimate))

    @precondition(lambda self: self.world.state.tasks)
    @rule(
        data=st.data(),
        verb=st.sampled_from(["hold", "release", "cancel", "retry", "memory", "priority", "pause", "unpause"]),
    )
    def user(self, data, verb):  # type: ignore[no-untyped-def]
        task = data.draw(st.sampled_from(sorted(self.world.state.tasks)))
        now = self.world.now
        event: Durable
        match verb:
            case "hold":
                event = TaskHeld(now, task)
            case "release":
                event = TaskReleased(now, task)
            case "cancel":
                event = StopRequested(now, task, Cancelled("alice"), 1.0)
            case "retry":
                event = TaskRetried(now, task, fresh=bool(task % 2))
            case "pause" if task % 2:
                event = TaskPaused(now, task, "alice")
            case "pause":  # for the oldest task, which may be anywhere
                slowed = min(self.world.state.tasks)
                event = TaskPaused(now, task, "carma", until=now + 5.0, slowed=slowed, slowdown=2.0)
            case "unpause":
                event = TaskUnpaused(now, task, "alice")
            case "memory":
                event = TaskChanged(now, task, priority=2)
            case _:
                event = TaskChanged(now, task, priority=-3)
        self.world.emit(event)

    def savers(self) -> list[TaskId]:
        """Running tasks that can be asked to save."""
        tasks = (self.world.state.tasks[task] for task in sorted(self.world.state.active))
        return [task.id for task in tasks if isinstance(task.status, Running) and task.spec.checkpoint is not None]

    @precondition(lambda self: self.savers())
    @rule(data=st.data(), hold=st.booleans(), after=st.integers(0, 7), leaves=st.booleans())
    def preempt(self, data, hold, after, leaves):  # type: ignore[no-untyped-def]
        """Preempts a task, which leaves in time, too late, or never."""
        task = data.draw(st.sampled_from(self.savers()))
        key = self.world.state.active[task]
        self.world.emit(PreemptionRequested(self.world.now, task, "alice", 10, 3.0, hold=hold))
        self.world.wait(after)
        self.world.settle()
        if leaves and self.world.state.active.get(task) == key:
            self.world.end(task, Failed(3))
            self.world.settle()

    @precondition(lambda self: self.savers())
    @rule(seconds=st.integers(3, 9), leaves=st.booleans())
    def urgent(self, seconds: int, leaves: bool) -> None:
        """A task that goes before all others and fills a GPU: with preemption, another task may be asked to save."""
        number = TaskId(max(self.submitted, default=0) + 1)
        self.submitted.add(number)
        spec = TaskSpec(command=("x",), directory="/", gpu_memory_mib=40_000, priority=9)
        self.world.emit(TaskSubmitted(self.world.now, number, ALICE, spec))
        full = Estimate(footprint_mib=40_000, upper_mib=40_000, source="declared")
        self.world.emit(TaskEstimated(self.world.now, number, full))
        for _ in range(seconds):
            self.world.wait(1)
            self.world.settle()
        for task in sorted(self.world.state.preempting) if leaves else ():
            self.world.end(task)
        self.world.settle()

    @rule(index=st.integers(0, 3), drain=st.booleans(), whole=st.booleans())
    def admin(self, index: int, drain: bool, whole: bool) -> None:
        gpu = None if whole else GpuId(f"GPU-{index}")
        self.world.emit(GpuDrained(self.world.now, gpu, "test") if drain else GpuResumed(self.world.now, gpu))

    # -- what the world does ----------------------------------------------------------------------------------------
    @rule(seconds=st.integers(0, 8))
    def time(self, seconds: int) -> None:
        self.world.wait(seconds)
        self.world.settle()

    @precondition(lambda self: self.world.state.active)
    @rule(data=st.data(), mib=MIB)
    def start(self, data, mib):  # type: ignore[no-untyped-def]
        task = data.draw(st.sampled_from(sorted(self.world.state.active)))
        self.world.start(task, mib=mib)

    @precondition(lambda self: self.world.memory)
    @rule(data=st.data(), mib=MIB, disrupted=st.booleans())
    def grow(self, data, mib, disrupted):  # type: ignore[no-untyped-def]
        """Memory moves between two samples; what a task runs under may go at the same time."""
        key = data.draw(st.sampled_from(sorted(self.world.memory)))
        self.world.memory[key] = mib
        self.world.now += 0.2
        self.world.sample_memory()
        if disrupted and self.world.state.active.get(key.task) == key:
            self.world.emit(StopRequested(self.world.now, key.task, Disrupted("the server ended"), 2.0))
        self.world.settle()

    @precondition(lambda self: self.world.state.active)
    @rule(
        data=st.data(),
        how=st.sampled_from(["ok", "failed", "oom", "blind oom", "host", "lost"]),
        twice=st.booleans(),
    )
    def end(self, data, how, twice):  # type: ignore[no-untyped-def]
        task = data.draw(st.sampled_from(sorted(self.world.state.active)))
        key = self.world.state.active[task]
        outcomes: dict[str, Outcome] = {
            "ok": Succeeded(),
            "failed": Failed(3),
            "oom": OutOfMemory("gpu", 1, 900, 5_000),
            "blind oom": OutOfMemory("gpu"),
            "host": OutOfMemory("host", 137),
            "lost": Lost("gone"),
        }
        self.world.end(task, outcomes[how])
        if twice:
            self.world.emit(AttemptEnded(self.world.now, key, Succeeded()))

    @rule()
    def archive(self) -> None:
        """What a checkpoint does: finished tasks leave memory."""
        _, finished = checkpoint(self.world.state, len(self.world.log))
        forget(self.world.state, finished)
        self.archived |= {task.id for task in finished}

    @rule()
    def look(self) -> None:
        """Reading and proposing never change anything, and every waiting task has a reason."""
        before = image(self.world.state)
        propose(self.world.state, self.world.now, self.world.verdicts)
        note(self.world.state)
        reasons = waiting(self.world.state, self.world.now)
        for task in self.world.state.tasks.values():
            if not isinstance(task.status, Finished | Starting | Running):
                assert reasons[task.id].sentence
            assert explain(self.world.state, task.id, self.world.now).task == task.id
        assert image(self.world.state) == before

    # -- what must always hold ----------------------------------------------------------------------------------------
    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "world"):
            assert set(self.world.state.tasks) | self.archived == self.submitted

    @invariant()
    def a_finished_task_finished_once(self) -> None:
        if not hasattr(self, "world"):
            return
        retried = [event.task for event in self.world.log if isinstance(event, TaskRetried)]
        for task in {event.task for event in self.world.log if isinstance(event, TaskFinished)}:
            ends = sum(1 for event in self.world.log if isinstance(event, TaskFinished) and event.task == task)
            assert ends <= 1 + retried.count(task)

    @invariant()
    def no_energy_is_given_out_twice(self) -> None:
        if not hasattr(self, "world"):
            return
        for row in self.world.state.usage.values():
            assert row.tasks_j + row.idle_j <= row.energy_j + 1e-6
            assert row.shared_s <= row.held_s <= row.watched_s

    @invariant()
    def the_watchdog_stops_only_those_above_their_booking(self) -> None:
        if not hasattr(self, "world"):
            return
        for event in self.world.log:
            if isinstance(event, StopRequested) and isinstance(event.ending, OutOfMemory):
                task = self.world.state.tasks.get(event.task)
                peak_mib = event.ending.peak_mib or 0
                assert task is None or any(peak_mib > a.placement.booking.memory_mib for a in task.attempts)

    @invariant()
    def no_task_is_stopped_because_it_was_asked_to_save(self) -> None:
        """Only users, limits and the watchdog stop tasks; a request for a checkpoint does not. A task that left for a
        checkpoint returns."""
        if not hasattr(self, "world"):
            return
        stopped = {event.task for event in self.world.log if isinstance(event, StopRequested)}
        for task in self.world.state.tasks.values():
            left = [attempt for attempt in task.attempts if isinstance(attempt.outcome, Preempted)]
            if left and left[-1] is task.attempts[-1] and task.id not in stopped:
                ended = isinstance(task.status, Finished) and isinstance(task.status.outcome, Preempted | Failed | Lost)
                assert not ended, task

    @invariant()
    def commands_leave_processes_as_the_state_says(self) -> None:
        """The last command about the pauses of a running attempt is that of its status."""
        if not hasattr(self, "world"):
            return
        told = {one.key: one.paused for one in self.world.commands if isinstance(one, SetPaused)}
        for task in self.world.state.tasks.values():
            if isinstance(task.status, Running):
                assert told.get(task.key, False) == (task.paused is not None)

    @invariant()
    def a_cap_is_never_below_the_booking(self) -> None:
        if hasattr(self, "world"):
            for held in self.world.state.on_gpu.values():
                for booking in (placement.booking for placement in held.values()):
                    assert booking.cap_mib is None or (booking.cap_mib >= booking.memory_mib and not booking.alone)

    @invariant()
    def a_booking_shrinks_once_and_never_below_what_was_seen(self) -> None:
        if not hasattr(self, "world"):
            return
        shrunk = [event for event in self.world.log if isinstance(event, BookingShrunk)]
        assert len({event.key for event in shrunk}) == len(shrunk)
        for event in shrunk:
            assert event.peak_mib < event.to_mib < event.from_mib
            task = self.world.state.tasks.get(event.key.task)
            if task is not None:
                booking = task.attempts[event.key.attempt - 1].placement.booking
                assert (booking.memory_mib, booking.placed_mib) == (event.to_mib, event.from_mib)
                assert booking.source != "declared"
                assert not booking.alone

    def teardown(self) -> None:
        """The log, through JSON and through a checkpoint, rebuilds what a replay can rebuild."""
        if not hasattr(self, "world") or self.archived:
            return
        log = [LOG.decode(msgspec.json.encode(event)) for event in self.world.log]
        again = State(self.in_force, self.policy)
        for event in log:
            step(again, event)
        assert logged(again) == logged(self.world.state)
        half = State(self.in_force, self.policy)
        middle = len(log) // 2
        for event in log[:middle]:
            step(half, event)
        saved, finished = checkpoint(half, middle)
        whole = msgspec.structs.replace(saved, tasks=tuple(sorted((*saved.tasks, *finished), key=lambda t: t.id)))
        rest = restore(self.in_force, self.policy, whole)
        for event in log[middle:]:
            step(rest, event)
        assert logged(rest) == logged(self.world.state)


TestHistories = pytest.mark.slow(Histories.TestCase)
TestHistories.settings = settings(
    max_examples=250,
    stateful_step_count=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
