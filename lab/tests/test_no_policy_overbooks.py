"""For every policy, trace, set of rules and source of figures: no GPU is booked beyond its memory, no GPU has more
tasks than allowed, exclusive tasks are alone, and each policy's own limits on sharing hold.

The bookings are counted here a second time, from events and samples only, without the core's own counts.
"""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carma.core.model import events as e
from carma.core.model.decision import UNKNOWN
from carma.core.model.settings import PlacementRules, Rules, WarmUp
from carma.core.model.values import AttemptKey, Booking, Estimate, GpuId, TaskId
from carma.core.policies import goodput, horus, lucid
from carma.core.scheduling.forecast import Terms
from carma.core.scheduling.gpu_view import Holder
from carma.core.scheduling.sharing_model import engine_share, progress_rates
from carma.core.scheduling.snapshot import view_of
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator.simulation import Setup, Simulation
from lab_fixtures.random_simulations import CARD, EVERY_POLICY, companions, simulations

MANY = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Books:
    """The attempts on each GPU with their bookings, and the memory peak of each attempt."""

    def __init__(self, made: Simulation) -> None:
        self.made, self.rules = made, made.rules
        self.memory_mib: dict[GpuId, int] = {}
        self.on: dict[GpuId, dict[AttemptKey, Booking]] = {}
        self.seen_mib: dict[AttemptKey, int] = {}
        self.shared = 0  # placements beside others

    def follow(self, event: e.AnyEvent) -> None:
        match event:
            case e.GpusFound(gpus=gpus):
                self.memory_mib = {gpu.id: gpu.memory_mib for gpu in gpus}
                self.on = {gpu.id: {} for gpu in gpus}
            case e.GpusSampled(samples=samples):
                for use in (use for sample in samples for use in sample.processes or ()):
                    if use.attempt is not None:
                        self.seen_mib[use.attempt] = max(self.seen_mib.get(use.attempt, 0), use.memory_mib or 0)
            case e.TaskPlaced():
                self._placed(event)
            case e.BookingShrunk(key=key, from_mib=before, to_mib=after):
                for held in self.on.values():
                    if key in held:
                        assert held[key].memory_mib == before > after
                        held[key] = Booking(memory_mib=after, source=held[key].source, placed_mib=before)
            case e.TaskEstimated(task=task, estimate=Estimate() as estimate):
                self._estimated_late(task, estimate)
            case e.AttemptEnded(key=key):
                for held in self.on.values():
                    held.pop(key, None)
            case _:
                return
        self._balance()

    def _estimated_late(self, task: TaskId, estimate: Estimate) -> None:
        """A task that started before its estimate arrived books the estimate, as far as others have left room."""
        on = {gpu: held for gpu, held in self.on.items() if any(key.task == task for key in held)}
        free = [
            self.memory_mib[gpu] - sum(one.memory_mib for key, one in held.items() if key.task != task)
            for gpu, held in on.items()
        ]
        for held in on.values():
            key = next(key for key in held if key.task == task)
            if not held[key].alone and held[key].source == UNKNOWN and held[key].placed_mib is None:
                held[key] = Booking(memory_mib=min(estimate.upper_mib, *free), source=estimate.source)

    def _placed(self, event: e.TaskPlaced) -> None:
        booking = event.placement.booking
        assert len(set(event.placement.gpus)) == self.made.trace.tasks[event.key.task - 1].gpus
        for gpu in event.placement.gpus:
            others = self.on[gpu]
            if others:
                self.shared += 1
                counted = sum(max(one.memory_mib, self.seen_mib.get(key, 0)) for key, one in others.items())
                taken_mib = counted + booking.memory_mib + self.rules.memory.margin_mib
                assert taken_mib <= self.memory_mib[gpu], f"{event.key} on {gpu} beside {others}"
            others[event.key] = booking

    def _balance(self) -> None:
        for gpu, held in self.on.items():
            booked_mib = sum(booking.memory_mib for booking in held.values())
            assert booked_mib <= self.memory_mib[gpu], f"{gpu} has {booked_mib} MiB booked"
            assert len(held) <= self.rules.placement.tasks_per_gpu, f"{gpu} has {len(held)} tasks"
            alone = any(booking.alone for booking in held.values())
            assert len(held) <= 1 or not alone, f"{gpu}: one of {list(held)} is exclusive"


@pytest.mark.parametrize("policy", EVERY_POLICY)
@MANY
@given(data=st.data())
def test_no_gpu_is_booked_beyond_its_memory_or_holds_too_many(policy: str, data: st.DataObject) -> None:
    made = data.draw(simulations(policy))
    books = Books(made)
    for event in made.events():
        books.follow(event)
        if isinstance(event, e.TaskPlaced):
            _sharing_limits_hold(made, event)
    assert not any(books.on.values()), "all tasks have ended"


def _sharing_limits_hold(made: Simulation, event: e.TaskPlaced) -> None:
    """Checked after a placement, for each of its GPUs that has other tasks."""
    state = made.state
    for gpu in event.placement.gpus:
        holders = view_of(state, state.gpus[gpu], event.at).holders
        if len(holders) < 2:
            continue
        match state.policy.name:
            case "exclusive":
                raise AssertionError(f"{gpu} is shared by {[holder.key for holder in holders]}")
            case "horus":
                known = [1.0 if one.demand is None else engine_share(one.demand) for one in holders]
                assert sum(known) <= horus.BUDGET + 1e-6
            case "lucid":
                assert len(holders) == 2
                assert sum(lucid.score(one.demand, one.counted_mib) for one in holders) <= 2
            case "goodput":
                for terms in goodput_limits(state.rules):
                    slow = whole_runs(holders, event, terms)
                    assert max(slow) <= terms.cap + 1e-6, f"{event} slows down by {slow} ({terms})"
            case _:
                pass


def goodput_limits(rules: Rules) -> tuple[Terms, Terms]:
    """The cap on what is expected, and the limit for demanding tasks of unknown demand."""
    limits = goodput.limits_of(rules)
    return limits.expected, limits.bad_case


def whole_runs(holders: tuple[Holder, ...], event: e.TaskPlaced, terms: Terms) -> list[float]:
    """Slowdown of each task over its whole run if no other task comes, by the rates predicted for this GPU; delays on
    other GPUs are left out. A task of unknown run time keeps its initial rate."""
    now, demands = event.at, [terms.demand_of(holder.demand, holder.counted_mib) for holder in holders]
    runs = [holder.progress for holder in holders if holder.progress is not None]
    assert len(runs) == len(holders)
    left_s = [inf if run.alone_s is None else max(1.0, run.alone_s - run.done_by(now)) for run in runs]
    found, at, there = [0.0] * len(runs), 0.0, list(range(len(runs)))
    while there:
        rates = dict(zip(there, progress_rates([demands[one] for one in there], terms.mechanism), strict=True))
        for one in there:
            if left_s[one] == inf and not found[one]:
                found[one] = 1.0 / rates[one]
        ends = {one: left_s[one] / rates[one] for one in there if left_s[one] < inf}
        if not ends:
            break
        first = min(ends, key=lambda one: ends[one])
        at += ends[first]
        for one in there:
            left_s[one] -= ends[first] * rates[one]
        found[first] = (now - runs[first].began_at + at) / (runs[first].alone_s or 1.0)
        there.remove(first)
    return found


@MANY
@given(data=st.data())
def test_goodput_keeps_every_task_within_its_cap_if_its_model_is_exact(data: st.DataObject) -> None:
    """Checked at every placement with the predicted slowdown, and at the end with the actual one."""
    gpus = data.draw(st.integers(1, 2))
    cap = data.draw(st.sampled_from((1.1, 1.25, 1.6)))
    setup = Setup(
        card=CARD,
        gpus=gpus,
        rules=Rules(placement=PlacementRules(slowdown_cap=cap), warmup=WarmUp(enabled=False)),
        policy=goodput.POLICY,
        source=sources.measured,
        mechanism=data.draw(st.sampled_from(("mps", "timeslice"))),
        launch_s=0.0,
        steps=False,  # their errors would correct a model that is exact
    )
    made = Simulation(data.draw(companions(gpus)), setup)
    for event in made.events():
        if isinstance(event, e.TaskPlaced):
            _sharing_limits_hold(made, event)
    slow = {run.task: run.slowdown for run in made.runs}
    assert all(found is not None and found <= cap + 1e-6 for found in slow.values()), slow
