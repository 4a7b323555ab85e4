"""The daemon decides as the simulator does. What a simulated world tells its core (tasks, estimates, starts, ends and
samples) is told to the daemon's own shell, with its store and its clock; whatever the shell then commits by itself must
be what the simulator's core decided, one by one. And the stored log replays to the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model import events as e
from carma.core.model.commands import Command, LaunchAttempt
from carma.core.model.events import AnyEvent, Durable, Transient
from carma.core.model.settings import FairnessRules, Rules, Undo
from carma.core.model.values import AttemptKey, Placement, Record
from carma.core.ports import Loaded
from carma.core.state import State
from carma.daemon import writer as writer_module
from carma.daemon.recovery_on_start import replay
from carma.daemon.runtime import SteadyClock
from carma.daemon.shell import Shell
from carma.plugins import load_policy
from carma.store.memory import MemoryStore
from carma.store.sqlite import SqliteStore
from carma.traces import Trace, find
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator.simulation import Demands, Setup, Simulation
from lab_fixtures.random_simulations import CARD, EVERY_POLICY
from tests.scenario.test_properties import logged
from tests.unit.daemon.shells import make_shell, writing

# What the world tells; all else is the core's own to decide.
TOLD = e.GpusFound | e.TaskSubmitted | e.TaskEstimated | e.AttemptStarted | e.AttemptEnded
LIMIT_S = 300.0


class Scripted:
    """Time, set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Daemon:
    """A shell that receives each event and then decides until it proposes nothing more."""

    def __init__(self, shell: Shell, time: Scripted) -> None:
        self.shell, self._time = shell, time
        self.by_itself: list[Durable] = []  # events that the core committed itself, without an input
        self.launched: list[tuple[AttemptKey, Placement]] = []

    def follow(self, commands: Sequence[Command], event: Durable) -> None:
        if not isinstance(event, TOLD | e.UseNoted):
            self.by_itself.append(event)
        orders = (command for command in commands if isinstance(command, LaunchAttempt))
        self.launched.extend((order.key, order.placement) for order in orders)

    async def told(self, event: AnyEvent) -> None:
        self._time.now = max(self._time.now, event.at)
        if isinstance(event, Transient):
            self.shell.observe(event)
        else:
            await self.shell.commit([event])

    async def settled(self) -> None:
        """A change that changes nothing is answered before its turn thinks: two, and one thought lies between."""
        while True:
            before = self.shell.sequence
            for _ in range(2):
                await self.shell.change(lambda _state: ())
            if self.shell.sequence == before:
                return


@contextlib.asynccontextmanager
async def daemon(store: MemoryStore | SqliteStore, state: State) -> AsyncIterator[Daemon]:
    time = Scripted()
    shell = make_shell(store, state)
    shell.clock = SteadyClock(wall=lambda: 0.0, monotonic=time)
    shell.reconciled.set()
    made = Daemon(shell, time)
    async with writing(shell, made.follow):
        yield made


def turns(log: Sequence[AnyEvent]) -> list[tuple[list[AnyEvent], list[Durable]]]:
    """What was told, and what the core made of it. Between two tellings it had time to decide; what only time has
    brought about is told as a tick."""
    found: list[tuple[list[AnyEvent], list[Durable]]] = []
    for event in log:
        if isinstance(event, TOLD | Transient):
            if found and isinstance(event, e.TaskEstimated) and isinstance(found[-1][0][-1], e.TaskSubmitted):
                found[-1][0].append(event)
            else:
                found.append(([event], []))
            continue
        if not found or found[-1][0][-1].at < event.at:
            found.append(([e.Ticked(event.at)], []))
        found[-1][1].append(event)
    return found


def plainly(events: Sequence[Durable]) -> list[Durable]:
    """Energy is added up in the order in which tasks stand on a GPU; its last digit decides nothing."""
    return [
        replace(event, energy_j=round(event.energy_j, 6))
        if isinstance(event, e.MemoryObserved) and event.energy_j is not None
        else event
        for event in events
    ]


class Followed(Record, frozen=True):
    placements: int  # that were compared
    state: bytes  # as the daemon had it in the end
    loaded: Loaded  # the whole log, as it was stored


async def follow(log: Sequence[AnyEvent], store: MemoryStore | SqliteStore, state: State) -> Followed:
    placements, loaded = 0, []
    async with asyncio.timeout(LIMIT_S), daemon(store, state) as world:
        for told, decided in turns(log):
            for event in told:
                await world.told(event)
            await world.settled()
            assert plainly(world.by_itself) == plainly(decided), f"after {told}"
            placed = [(event.key, event.placement) for event in decided if isinstance(event, e.TaskPlaced)]
            assert world.launched == placed
            placements += len(placed)
            world.by_itself, world.launched = [], []
        await world.shell.in_store(lambda: loaded.append(store.load()))
        return Followed(placements, logged(state), loaded[0])


def simulated(policy: str, memory: str, demand: Demands, rules: Rules) -> Simulation:
    """Thirty tasks of a published trace, ten times as fast, on three GPUs."""
    rows = tuple(
        replace(row, arrival_s=row.arrival_s / 10, priority=int(place % 7 == 3))
        for place, row in enumerate(find("mix").tasks[:30])
    )
    setup = Setup(
        card=CARD,
        gpus=3,
        rules=rules,
        policy=load_policy(policy),
        source=sources.find(memory, 1),
        demand=demand,
        seed=1,
        noise=1.0,
    )
    return Simulation(Trace(name="part of mix", tasks=rows), setup)


# Without undo where nothing is known: its pauses lead to a task whose demand was observed beside neighbours and then is
# observed alone. For 15 s the simulator does not know it, and the daemon knows what it has noted (UseNoted).
WAYS: tuple[tuple[str, Demands, Rules], ...] = (
    ("measured", "measured", Rules()),
    ("none", "history", Rules(fairness=FairnessRules(enabled=True), undo=Undo(enabled=False))),
)


@pytest.mark.parametrize(("memory", "demand", "rules"), WAYS, ids=["known", "unknown"])
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_daemon_decides_as_the_simulator_does(
    policy: str, memory: str, demand: Demands, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PROPOSAL_PAUSE_FACTOR", 0.0)  # it need not leave the loop to others here
    made = simulated(policy, memory, demand, rules)
    log = list(made.events())
    found = asyncio.run(follow(log, MemoryStore(), State(made.rules, load_policy(policy))))
    assert found.placements >= 30
    assert logged(replay(found.loaded, made.rules, load_policy(policy)).state) == found.state


def test_so_it_does_with_a_database_which_a_restart_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a checkpoint was saved, and finished tasks were forgotten, in the middle of it."""
    monkeypatch.setattr(writer_module, "PROPOSAL_PAUSE_FACTOR", 0.0)
    monkeypatch.setattr(writer_module, "CHECKPOINT_EVERY", 60)
    made = simulated("goodput", "trace", "measured", Rules())
    log = list(made.events())
    state = State(made.rules, load_policy("goodput"))
    found = asyncio.run(follow(log, SqliteStore(tmp_path / "carma.db"), state))
    assert found.placements >= 30
    assert found.loaded.checkpoint is not None
    assert logged(replay(found.loaded, made.rules, load_policy("goodput")).state) == found.state
