"""The verdict cache never makes a difference: at any moment of a random history, also of odd ones (GPUs without samples
for a while, GPUs that fail, are lost and found, clocks that are set back, policies that refuse), `propose` finds with
it what it finds without. And `propose` changes nothing. Each seed is a history of its own, the same one every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from carma.core.model.decision import Ask, Part
from carma.core.model.events import (
    Durable,
    GpuDrained,
    GpuResumed,
    GpusFound,
    GpusSampled,
    TaskChanged,
    TaskEstimated,
    TaskHeld,
    TaskReleased,
    TaskRestored,
    TaskRetried,
    TaskSubmitted,
)
from carma.core.model.outcome import Failed, OutOfMemory, Succeeded
from carma.core.model.settings import (
    FairnessRules,
    Gate,
    PlacementRules,
    QueueRules,
    QuotaRules,
    Rules,
    WarmUp,
    WindowRules,
)
from carma.core.model.task import Task
from carma.core.model.values import (
    ArrayPlace,
    Demand,
    Dependency,
    Estimate,
    GpuId,
    Owner,
    TaskId,
    TaskSpec,
    WarnSignal,
)
from carma.core.policies import best_fit, exclusive, goodput, horus, lucid, lug, magm, round_robin
from carma.core.propose import propose
from carma.core.scheduling.gpu_view import GpuView
from carma.core.scheduling.placement import Policy, Ranked
from carma.daemon.state_checkpoint import checkpoint, forget
from carma.testing.builders import ALICE, BOB, World, gpu
from tests.state_image import image

SEEDS = 100
STEPS = 300
IMAGE_EVERY = 5  # questions: an image takes longer than the answer
MIB = (1, 200, 903, 2_000, 6_000, 9_001, 15_000, 30_000, 40_000)
QUOTA = QuotaRules(running={"bob": 1}, gpus={"default": 3, "carol": 1}, memory_share={"alice": 0.3})
CAROL = Owner(1003, 1003, "carol")
ENDS = (Succeeded(), Succeeded(), Succeeded(), Failed(3), OutOfMemory("gpu", 1, 900, 5_000))


def _picky(ask: Ask, views: Sequence[GpuView], _last: GpuId | None) -> list[Ranked]:
    """Looks at all that a policy may look at, leaves GPUs out, and fails now and then."""
    if ask.task % 7 == 3:
        raise ValueError("no")
    ends = {view.gpu.id: sum(one.ends_at + (one.settles_at or 0.0) for one in view.holders) for view in views}
    wanted = [view for view in views if len(view.holders) < 3 and int(ends[view.gpu.id]) % 5]
    ordered = sorted(wanted, key=lambda view: (ends[view.gpu.id], view.gpu.index))
    return [Ranked(view.gpu.id, (Part("ends", ends[view.gpu.id]),)) for view in ordered]


DEMANDS = (None, *(Demand(sm_active=part, sm_occupancy=0.2, dram_active=0.2) for part in (0.05, 0.3, 0.8)))
POLICIES = (
    magm.POLICY,
    magm.POLICY,
    magm.POLICY,
    best_fit.POLICY,
    exclusive.POLICY,
    lug.POLICY,
    round_robin.POLICY,
    *[Policy("picky", _picky)] * 2,
    goodput.POLICY,
    horus.POLICY,
    lucid.POLICY,
)


class History:
    """A server to which random things happen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        pick = self.random.choice
        self.world = World(pick((1, 2, 3, 6)), rules=self._rules(), policy=pick(POLICIES))
        self.odd = pick((0.0, 0.1, 0.3))  # how much of it is out of the ordinary
        self.sampled = pick((0.0, 0.1, 0.5, 1.0))  # share of the GPUs in each sample
        self.each_step = pick((True, False))  # the cache may also be of some steps ago
        self.number = 0
        self.archive: list[Task] = []
        self.questions = 0

    def _rules(self) -> Rules:
        pick = self.random.choice
        return Rules(
            gate=Gate(enabled=pick((True, False, False))),
            warmup=WarmUp(enabled=pick((True, False)), settle_s=3.0, idle_s=20.0, limit_s=50.0),
            queue=QueueRules(
                backfill_depth=pick((0, 1, 3, 100)),
                overtakes=pick((0, 1, 20)),
                assumed_runtime_s=40.0,
                misfits=pick(("wait", "end")),
            ),
            window=WindowRules(stale_s=pick((3.0, 15.0, 1e9, 1e9, 1e9)), length_s=10.0, min_samples=1),
            placement=PlacementRules(tasks_per_gpu=pick((1, 2, 4, 4)), idle_first=pick((True, False))),
            fairness=FairnessRules(enabled=pick((True, False)), half_life_s=60.0, shares={"carol": 3.0}),
            quota=pick((QuotaRules(), QuotaRules(), QUOTA)),
        )

    # -- what happens -------------------------------------------------------------------------------------------------
    def submit(self) -> None:
        pick, world, now = self.random.choice, self.world, self.world.now
        self.number += 1
        number, odd = TaskId(self.number), pick(range(8)) if self.random.random() < 2 * self.odd else 0
        before = TaskId(self.random.randint(max(1, number - 5), number))
        spec = TaskSpec(
            command=("x",),
            directory="/",
            gpus=min(pick((1, 1, 1, 2)), max(1, len(world.state.gpus))),
            exclusive=odd == 1,
            priority=1 if odd == 2 else 0,
            time_limit_s=pick((None, None, 5.0, 30.0, 200.0)),
            warn=WarnSignal(10, 4.0) if odd == 3 else None,
            begin_at=now + 5.0 if odd == 4 else None,
            after=(Dependency(before, pick(("ok", "any"))),) if odd == 5 and before in world.state.tasks else (),
            array=ArrayPlace(TaskId(1_000), number, 2) if odd in (6, 7) else None,
        )
        world.emit(TaskSubmitted(now, number, pick((ALICE, ALICE, ALICE, BOB, CAROL)), spec))
        mib, runtime_s = pick(MIB), pick((None, None, 3.0, 20.0, 200.0))
        estimate = Estimate(
            footprint_mib=mib, upper_mib=mib + number % 5, source="trace", runtime_s=runtime_s, demand=pick(DEMANDS)
        )
        world.emit(TaskEstimated(now, number, estimate if self.random.random() < 0.9 else None))

    def time(self) -> None:
        """Time passes, and some of the GPUs are sampled."""
        world = self.world
        world.now += self.random.choice((0.0, 0.2, 0.2, 1.0, 1.0, 1.0, 2.5, 4.0, 7.0, 16.0, 60.0))
        found = [one for one in world.state.gpus.values() if self.random.random() < self.sampled]
        world.emit(GpusSampled(world.now, tuple(world._sample(one) for one in found)))

    def calm(self) -> None:
        self.world.wait(self.random.randint(1, 6))

    def settle(self) -> None:
        self.world.settle()

    def start(self) -> None:
        for task_id in sorted(self.world.state.active):
            if self.random.random() < 0.7:
                self.world.start(task_id, mib=self.random.choice((None, None, None, 500, 9_000)))

    def end(self) -> None:
        if self.world.state.active:
            self.world.end(self.random.choice(sorted(self.world.state.active)), self.random.choice(ENDS))

    def grow(self) -> None:
        if self.world.memory:
            self.world.memory[self.random.choice(sorted(self.world.memory))] = self.random.choice(MIB)
            self.world.now += 0.2
            self.world.sample_memory()

    def user(self) -> None:
        if self.world.state.tasks:
            task, now = self.random.choice(sorted(self.world.state.tasks)), self.world.now
            events: tuple[Durable, ...] = (
                TaskHeld(now, task),
                TaskReleased(now, task),
                TaskRetried(now, task),
                TaskChanged(now, task, priority=self.random.choice((-2, 2))),
                TaskChanged(now, task, gpu_memory_mib=self.random.choice((500, 50_000))),
                TaskChanged(now, task, time_limit_s=float(self.random.randint(1, 30))),
                TaskEstimated(now, task, None),
            )
            self.world.emit(self.random.choice(events))

    def stop(self) -> None:
        if self.world.state.tasks:
            self.world.stop(self.random.choice(sorted(self.world.state.tasks)))

    def admin(self) -> None:
        name, now = self._some_gpu(), self.world.now
        whose = self.random.choice((name, name, name, None))
        self.world.emit(GpuResumed(now, whose) if self.random.random() < 0.7 else GpuDrained(now, whose, "test"))
        self.world.faults.pop(name, None)
        if self.random.random() < 0.2:
            self.world.faults[name] = "broken"

    def others(self) -> None:
        """Processes of others, a driver that lists none, and how busy a GPU is."""
        world, name = self.world, self._some_gpu()
        world.foreign.pop(name, None)
        if self.random.random() < 0.4:
            world.foreign[name] = self.random.choice((300, 20_000))
        (world.no_processes.add if self.random.random() < 0.2 else world.no_processes.discard)(name)
        world.activity[name] = self.random.choice(
            ((0.95, 0.6, 0.5), (None, 0.1, 0.1), (0.3, 0.1, 0.1), (0.3, 0.1, 0.1))
        )

    def _some_gpu(self) -> GpuId:
        return GpuId(f"GPU-{self.random.randint(0, 5)}")

    def found(self) -> None:
        count = self.random.choice((len(self.world.state.gpus), 6, self.random.randint(1, 6)))
        self.world.emit(GpusFound(self.world.now, tuple(gpu(index) for index in range(count))))

    def archived(self) -> None:
        _, finished = checkpoint(self.world.state, 0)
        forget(self.world.state, finished)
        self.archive.extend(finished)

    def restored(self) -> None:
        if self.archive:
            self.world.emit(TaskRestored(self.world.now, self.archive.pop()))

    def set_back(self) -> None:
        """Sets back the requests only; observations stay."""
        self.same(self.world.now - self.random.choice((0.5, 3.0, 50.0)))

    # -- what must hold ---------------------------------------------------------------------------------------------
    def step(self) -> None:
        usual: tuple[Callable[[], None], ...] = (
            *(self.submit, self.submit, self.submit, self.time, self.time, self.time, self.time, self.calm),
            *(self.settle, self.settle, self.settle, self.start, self.start, self.end, self.archived, self.grow),
        )
        strange = (self.user, self.user, self.stop, self.admin, self.others, self.found, self.restored, self.set_back)
        self.random.choice(strange if self.random.random() < self.odd else usual)()
        if self.each_step:
            self.same(self.world.now)

    def same(self, now: float) -> None:
        self.questions += 1
        imaged = self.questions % IMAGE_EVERY == 0
        before = image(self.world.state) if imaged else b""
        due = propose(self.world.state, now)
        assert propose(self.world.state, now, self.world.verdicts) == due
        assert propose(self.world.state, now, self.world.verdicts) == due
        assert not imaged or image(self.world.state) == before, "only `machine.step` changes the state"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_cache_makes_no_difference(seed: int) -> None:
    history = History(seed)
    for _ in range(STEPS):
        history.step()
    history.world.settle()
