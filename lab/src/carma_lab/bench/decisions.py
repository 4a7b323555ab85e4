"""Duration of a decision with 10,000 tasks in the queue: the core alone, in process, on 64 and on other numbers of
GPUs.

Three cases. *plain*: every GPU has its four tasks, so that no task can start. *placing*: every GPU has room for one
more, so one pass places 64 tasks. *dearest*, the slowest case: every GPU has room and is quiet, so that each examined
task passes every filter of every GPU but the last, because all GPUs are reserved for the first task of the queue. It
needs all of them and was overtaken as often as the settings allow. No two tasks ask for the same memory, so that no
result for one task can be used for another. The state is made by stepping events, as in a daemon.

*propose* is a pass without cached verdicts, as after a restart; *again* is the usual pass: one GPU was sampled since
the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

from carma.core.machine import step
from carma.core.model import events as e
from carma.core.model.settings import FairnessRules, QuotaRules, Rules
from carma.core.model.values import (
    Activity,
    AttemptKey,
    Booking,
    Estimate,
    Gpu,
    GpuSample,
    Owner,
    Placement,
    ProcessUse,
    TaskId,
    TaskSpec,
)
from carma.core.propose import propose
from carma.core.scheduling.explanation import explain, waiting
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.state import State
from carma.demo.figures import percentile
from carma.plugins import load_policy
from carma.testing.builders import gpu
from carma_lab.bench.machine import time_ms
from carma_lab.bench.results_file import Figure

GPUS = 64
QUEUED = 10_000
USERS = 1_000
START = 1_000_000.0
GPU_MIB = 40_960
HOLDER_MIB = 6_000
SAMPLES = 120  # seconds, so that every task has settled and every window is full
GROWTH = (8, 64, 512, 4_096, 8_192)  # GPUs
FEW_SAMPLES = 10  # of each of very many GPUs: enough for tasks to settle
FEW_EVERY_S = 3.0
MANY = 20  # repeats, from which on the largest servers are measured too


def measure(repeats: int) -> Iterator[Figure]:
    yield from _case("plain", repeats, holders=4, gang=False)
    yield from _case("placing", repeats, holders=3, gang=False)
    yield from _case("dearest", repeats, holders=3, gang=True)
    yield from turns(repeats)
    yield from growth(min(repeats, 9), GROWTH if repeats >= MANY else GROWTH[:3])


def turns(repeats: int) -> Iterator[Figure]:
    """The cost of fairness between users and of quotas: the queue is sorted again, the GPUs are not judged again."""
    limit = QuotaRules(running={"default": QUEUED})
    for name, rules in (
        ("by_age", Rules()),
        ("by_share", Rules(fairness=FairnessRules(enabled=True))),
        ("by_share_with_quotas", Rules(fairness=FairnessRules(enabled=True), quota=limit)),
    ):
        for case, gang in (("placing", False), ("dearest", True)):
            state, now = loaded_state(holders=3, gang=gang, rules=rules, users=USERS)

            how = f"{QUEUED:,} queued of {USERS:,} users, {GPUS} GPUs, median of {repeats}, in process"
            yield _timed(f"decision.{case}.{name}", partial(propose, state, now, VerdictCache()), repeats, how)


def growth(repeats: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """Decision time as the server grows."""
    for gpus in sizes:
        for case, holders in (("plain", 4), ("placing", 3)):
            sampled = (FEW_SAMPLES, FEW_EVERY_S)
            state, now = loaded_state(holders=holders, gang=False, gpus=gpus, sampled=sampled)
            how = f"{QUEUED:,} queued, {gpus:,} GPUs with {holders} tasks each, median of {repeats}, in process"
            name = f"decision.{case}.gpus_{gpus}"
            yield from _passes(state, now, name, repeats, how)


def _case(case: str, repeats: int, *, holders: int, gang: bool) -> Iterator[Figure]:
    state, now = loaded_state(holders=holders, gang=gang)
    last = TaskId(max(state.tasks))
    how = f"{QUEUED:,} queued, {GPUS} GPUs with {holders} tasks each, median of {repeats}, in process"
    yield _timed(f"decision.{case}.explain", lambda: explain(state, last, now), repeats, "the last task: " + how)
    yield _timed(f"decision.{case}.waiting", lambda: waiting(state, now), repeats, "the reasons of all: " + how)
    yield from _passes(state, now, f"decision.{case}", repeats, how)


def _passes(state: State, now: float, name: str, repeats: int, how: str) -> Iterator[Figure]:
    """Proposals are not carried out, so that each repetition does the same work."""
    whole_pass = "one pass over the queue: " + how
    yield _timed(f"{name}.propose", lambda: propose(state, now), repeats, whole_pass)
    clock, cache = [now], VerdictCache()
    gpus = cycle(state.gpus.values())

    def sample() -> None:
        clock[0] += 0.001
        gpu = next(gpus)
        step(state, e.GpusSampled(clock[0], (_sample(gpu, clock[0], list(state.on_gpu[gpu.id])),)))

    yield _timed(f"{name}.again", lambda: propose(state, clock[0], cache), repeats, "after one sample: " + how, sample)


def _timed(
    name: str, call: Callable[[], object], repeats: int, how: str, before_each: Callable[[], None] | None = None
) -> Figure:
    """The median."""
    spans_ms = []
    for _ in range(repeats):
        if before_each is not None:
            before_each()
        spans_ms.append(time_ms(call))
    return Figure(name=name, value=percentile(spans_ms, 50), unit="ms", how=how)


def loaded_state(
    *,
    holders: int,
    gang: bool,
    gpus: int = GPUS,
    sampled: tuple[int, float] = (SAMPLES, 1.0),
    rules: Rules = Rules(),
    users: int = 1,
) -> tuple[State, float]:
    """A server in the middle of its day, and the time at which it is asked; only placements may be due. `sampled` is
    how often, and how many seconds apart."""
    state = State(rules, load_policy("magm"))
    found = tuple(map(gpu, range(gpus)))
    step(state, e.GpusFound(START, found))
    first = _queue(state, START, gpus=gpus, memory_mib=GPU_MIB, user=users) if gang else None
    keys = {gpu.id: [_run(state, gpu, first, users) for _ in range(holders)] for gpu in found}
    at = START
    for _ in range(sampled[0]):
        at += sampled[1]
        step(state, e.GpusSampled(at, tuple(_sample(gpu, at, keys[gpu.id]) for gpu in found)))
    while len(state.queue) < QUEUED:
        _queue(state, at, gpus=1, memory_mib=1024 + len(state.queue), user=len(state.queue) % users)
    for event in propose(state, at):  # the peaks of the running tasks, once
        step(state, event)
    return state, at


def _queue(state: State, at: float, *, gpus: int, memory_mib: int, user: int = 0) -> TaskId:
    task = TaskId(len(state.tasks) + 1)
    spec = TaskSpec(command=("python", "train.py"), directory="/", gpus=gpus, gpu_memory_mib=memory_mib)
    owner = Owner(1000 + user, 1000 + user, f"user{user}")
    step(state, e.TaskSubmitted(at, task, owner, spec))
    estimate = Estimate(footprint_mib=memory_mib, upper_mib=memory_mib, source="declared")
    step(state, e.TaskEstimated(at, task, estimate))
    return task


def _run(state: State, gpu: Gpu, overtook: TaskId | None, users: int) -> AttemptKey:
    key = AttemptKey(_queue(state, START, gpus=1, memory_mib=HOLDER_MIB, user=len(state.tasks) % users), 1)
    placement = Placement(gpus=(gpu.id,), booking=Booking(memory_mib=HOLDER_MIB, source="declared"))
    step(state, e.TaskPlaced(START, key, placement, "", overtook))
    step(state, e.AttemptStarted(START + 1, key, pid=1000 + key.task))
    return key


def _sample(gpu: Gpu, at: float, keys: list[AttemptKey]) -> GpuSample:
    return GpuSample(
        gpu=gpu.id,
        at=at,
        memory_used_mib=HOLDER_MIB * len(keys),
        activity=Activity(sm_active=0.2, sm_occupancy=0.1, dram_active=0.1),
        power_w=200.0,
        energy_j=at,
        processes=tuple(ProcessUse(pid=1000 + key.task, memory_mib=HOLDER_MIB, attempt=key) for key in keys),
    )
