"""Random traces, and the simulations of them under any policy: what tests over all policies have in common."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from carma.core.model.settings import FairnessRules, Gate, Memory, PlacementRules, QueueRules, Rules, WarmUp
from carma.core.model.values import Demand, Estimate
from carma.plugins import POLICIES, load_policy, names
from carma.traces import Trace, TraceTask
from carma_lab.runs.figures import Asked
from carma_lab.simulator import estimate_sources as sources
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.simulation import Setup, Simulation

EVERY_POLICY = tuple(sorted(names(POLICIES)))
CARD = cards.find("a100-40")
SHARES = st.sampled_from((0.02, 0.1, 0.3, 0.5, 0.8, 1.0))
MIB = st.sampled_from((300, 1_500, 6_000, 15_000, 24_000, 36_000, CARD.memory_mib - 200))


@st.composite
def rows(draw: st.DrawFn, gpus: int) -> TraceTask:
    """`arrival_s` is the gap to the one before."""
    seconds = draw(st.sampled_from((5.0, 60.0, 400.0, 3_000.0)))
    memory_mib = draw(MIB)
    wrong = st.none() | st.just(memory_mib // 3) | st.just(2 * memory_mib)
    return TraceTask(
        arrival_s=draw(st.sampled_from((0.0, 0.0, 1.0, 30.0, 500.0))),
        name=draw(st.sampled_from(("a", "b", "c", "d"))),
        gpus=draw(st.integers(1, gpus)),
        memory_mib=memory_mib,
        seconds=seconds,
        sm_active=draw(SHARES),
        sm_occupancy=draw(SHARES) / 2,
        dram_active=draw(SHARES) / 2,
        gr_active=draw(st.none() | SHARES),
        power=draw(st.none() | SHARES),
        start_s=draw(st.sampled_from((0.0, 0.5 * seconds))),
        ramp_s=draw(st.sampled_from((0.0, 8.0))),
        busy_gpus=draw(st.integers(0, 1)),
        user=draw(st.sampled_from(("", "ann", "bob"))),
        priority=draw(st.sampled_from((0, 0, 0, 1, -1))),
        save_s=draw(st.none() | st.just(4.0)),
        horus_mib=draw(wrong),
        faketensor_mib=draw(wrong),
        gpumemnet_mib=draw(wrong),
    )


@st.composite
def traces(draw: st.DrawFn, gpus: int, most: int = 14) -> Trace:
    found: list[TraceTask] = []
    at = 0.0
    for row in draw(st.lists(rows(gpus), min_size=3, max_size=most)):
        at += row.arrival_s
        found.append(replace(row, arrival_s=at))
    return Trace(name="made.csv", tasks=tuple(found))


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(
        placement=PlacementRules(
            tasks_per_gpu=draw(st.integers(1, 5)),
            slowdown_cap=draw(st.sampled_from((1.0, 1.1, 1.25, 2.0))),
            slowdown_limit=draw(st.sampled_from((1.0, 1.4, 1.8))),
            idle_first=draw(st.booleans()),
        ),
        gate=Gate(enabled=draw(st.booleans())),
        warmup=WarmUp(enabled=draw(st.booleans())),
        memory=Memory(margin_mib=draw(st.sampled_from((0, 512, 3_000)))),
        queue=QueueRules(overtakes=draw(st.sampled_from((0, 1, 20)))),
        fairness=FairnessRules(enabled=draw(st.booleans())),
    )


@st.composite
def asked(draw: st.DrawFn, trace: Trace) -> tuple[Asked, ...]:
    """For each task an estimate that is near the truth, far from it, or missing; some tasks request a GPU alone."""
    return tuple(
        Asked(
            estimate=draw(st.none() | estimates(row)),
            estimated_s=draw(st.sampled_from((0.0, 0.0, 20.0))),
            priority=row.priority,
            exclusive=draw(st.booleans()) and draw(st.booleans()),
        )
        for row in trace.tasks
    )


@st.composite
def estimates(draw: st.DrawFn, row: TraceTask) -> Estimate:
    mib = min(CARD.memory_mib, max(1, int(row.memory_mib * draw(st.sampled_from((0.2, 0.9, 1.0, 1.1, 1.5))))))
    return Estimate(
        footprint_mib=mib,
        upper_mib=mib,
        source=draw(st.sampled_from(("declared", "trace"))),
        demand=draw(st.sampled_from((row.demand, None, Demand(0.1, 0.05, 0.05, 0.1, 0.1)))),
        runtime_s=draw(st.sampled_from((row.seconds, None, 0.3 * row.seconds, 4 * row.seconds))),
    )


@st.composite
def simulations(draw: st.DrawFn, policy: str, most: int = 14) -> Simulation:
    """Any trace, any rules, any source of memory figures."""
    gpus = draw(st.integers(1, 3))
    trace = draw(traces(gpus, most))
    seed = draw(st.integers(0, 9))
    return Simulation(
        trace,
        Setup(
            card=CARD,
            gpus=gpus,
            rules=draw(rules()),
            policy=load_policy(policy),
            source=sources.find(draw(st.sampled_from(sources.NAMES)), seed),
            demand=draw(st.sampled_from(("measured", "history", "none"))),
            mechanism=draw(st.sampled_from(("mps", "timeslice"))),
            seed=seed,
            noise=draw(st.sampled_from((0.0, 1.0))),
            asked=draw(st.just(()) | asked(trace)),
            watchdog=draw(st.booleans()),
        ),
    )


@st.composite
def companions(draw: st.DrawFn, gpus: int) -> Trace:
    """Tasks with room for each other, that come so fast that they must share."""
    found: list[TraceTask] = []
    at = 0.0
    for _ in range(draw(st.integers(8, 14))):
        part = draw(st.sampled_from((0.05, 0.15, 0.3, 0.6)))
        at += draw(st.sampled_from((0.0, 20.0, 100.0)))
        task = TraceTask(
            arrival_s=at,
            name="a",
            gpus=draw(st.integers(1, gpus)),
            memory_mib=2_000,
            seconds=draw(st.sampled_from((60.0, 300.0, 1_500.0))),
            sm_active=part,
            sm_occupancy=part / 2,
            dram_active=part / 2,
            gr_active=draw(st.none() | st.just(min(1.0, 1.5 * part))),
        )
        found.append(task)
    return Trace(name="made.csv", tasks=tuple(found))
