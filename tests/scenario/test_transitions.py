"""The table of transitions is what `machine.step` does: none is missing in it, and none of its rows is unused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from carma.core.model import events as e
from carma.core.model.commands import Command
from carma.core.model.outcome import Cancelled, Failed, NeverFits, OutOfMemory, Succeeded
from carma.core.model.status import Status
from carma.core.model.task import Plan, Task
from carma.core.model.transitions import TRANSITIONS
from carma.core.model.values import Estimate, SaveSignal, TaskId, TaskSpec, WarnSignal
from carma.daemon.state_checkpoint import checkpoint, forget
from carma.testing.builders import ALICE, World

Observed = tuple[type[Status] | None, type[e.AnyEvent], type[Status]]
SPEC = TaskSpec(
    command=("x",), directory="/", time_limit_s=30.0, warn=WarnSignal(10, 5.0), checkpoint=SaveSignal(10, 3.0)
)
PLAN = Plan(rung="again", memory_mib=None, reason="")
KNOWN = Estimate(footprint_mib=1_000, upper_mib=1_000, source="history")


class Watched(World):
    """A world that notes every change of a status."""

    def __init__(self, seen: set[Observed]) -> None:
        self.seen = seen
        self.archive: dict[TaskId, Task] = {}
        super().__init__(2)

    def emit(self, event: e.AnyEvent) -> list[Command]:
        before = {task.id: task.status for task in self.state.tasks.values()}
        commands = super().emit(event)
        for task in self.state.tasks.values():
            earlier = before.get(task.id)
            if earlier != task.status:
                self.seen.add((type(earlier) if earlier is not None else None, type(event), type(task.status)))
        return commands

    def leave(self) -> None:
        """Finished tasks go to the archive."""
        _, finished = checkpoint(self.state, len(self.log))
        forget(self.state, finished)
        self.archive |= {task.id: task for task in finished}


# An event of each kind for a task in any status, whether it makes sense or comes too late.
EVENTS: tuple[Callable[[float, Task], e.Durable], ...] = (
    lambda at, task: e.TaskEstimated(at, task.id, KNOWN),
    lambda at, task: e.AttemptStarted(at, task.key, 7),
    lambda at, task: e.BookingShrunk(at, task.key, 1_000, 500 - int(at) % 100, 400),
    lambda at, task: e.MemoryObserved(at, task.key, 900),
    lambda at, task: e.UseNoted(at, (e.AttemptUse(key=task.key, peak_mib=800),)),
    lambda at, task: e.AttemptEnded(at, task.key, Succeeded()),
    lambda at, task: e.AttemptEnded(at, task.key, OutOfMemory("gpu", 1, 500, 1_000)),
    lambda at, task: e.RecoveryPlanned(at, task.id, PLAN, at + 3.0),
    lambda at, task: e.RecoveryDue(at, task.id),
    lambda at, task: e.TaskFinished(at, task.id, NeverFits("")),
    lambda at, task: e.TaskFinished(at, task.id, Failed(3)),
    lambda at, task: e.StopRequested(at, task.id, Cancelled("alice"), 5.0),
    lambda at, task: e.TaskWarned(at, task.id, 10),
    lambda at, task: e.PreemptionRequested(at, task.id, "alice", 10, 3.0),
    lambda at, task: e.PreemptionMissed(at, task.id),
    lambda at, task: e.TaskPaused(at, task.id, "alice"),
    lambda at, task: e.TaskPaused(at, task.id, "carma", until=at + 9.0),
    lambda at, task: e.TaskUnpaused(at, task.id, "alice"),
    lambda at, task: e.NoticeDue(at, task.id),
    lambda at, task: e.IdleNoted(at, task.id, at, "pack"),
    lambda at, task: e.IdleOver(at, task.id),
    lambda at, task: e.NoticeSent(at, task.id, "wait", at),
    lambda at, task: e.TaskHeld(at, task.id),
    lambda at, task: e.TaskReleased(at, task.id),
    lambda at, task: e.TaskRetried(at, task.id),
    lambda at, task: e.TaskRestored(at, task),
    lambda at, task: e.TaskChanged(at, task.id, gpu_memory_mib=2_000 + int(at)),
    lambda at, task: e.TaskChanged(at, task.id, priority=2),
)
ACTIONS: tuple[Callable[[Watched], object], ...] = (
    lambda world: world.emit(
        e.TaskSubmitted(world.now, TaskId(len(world.state.tasks | world.archive) + 1), ALICE, SPEC)
    ),
    lambda world: world.settle(),
    lambda world: world.start(),
    lambda world: world.wait(2.0),
    lambda world: world.leave(),
    lambda world: [world.emit(e.TaskRestored(world.now, world.archive.pop(one))) for one in list(world.archive)],
)


def test_the_table_has_the_transitions_that_random_histories_show_and_no_others() -> None:
    seen: set[Observed] = set()
    for seed in range(100):
        chance = Random(seed)
        world = Watched(seen)
        for _ in range(150):
            if chance.random() < 0.4 or not world.state.tasks:
                chance.choice(ACTIONS)(world)
            else:
                task = chance.choice(list(world.state.tasks.values())[:3])
                world.emit(chance.choice(EVENTS)(world.now, task))
    table = {(row.before, row.event, row.after) for row in TRANSITIONS}
    assert seen - table == set(), "transitions that the table does not have"
    assert table - seen == set(), "rows that no history reaches"


def test_an_event_takes_a_status_to_one_other() -> None:
    assert len({(row.before, row.event) for row in TRANSITIONS}) == len(TRANSITIONS)
