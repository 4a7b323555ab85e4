"""Cases are simulated, in several processes; a case that several parts ask for is simulated once."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import exp, fsum, log
from typing import Any, NamedTuple

from carma.core.model.values import Record
from carma.traces import Trace
from carma_lab.bench.paper.variants import Variant
from carma_lab.simulator import simulated_cards as cards
from carma_lab.simulator.bound import Bound, bound
from carma_lab.simulator.request import simulation
from carma_lab.simulator.simulation import OnProgress


class Ratio(Record, frozen=True, kw_only=True):
    """Exclusive GPUs on the same trace are 1; `slowdown` is against each task's run alone; counts are counts."""

    makespan: float
    completion: float
    completion_p95: float
    wait: float | None
    run: float
    energy: float | None
    slowdown: float | None
    slowdown_p95: float | None
    ooms: int
    failed: int


def ratio(row: Row, alone: Row) -> Ratio:
    return Ratio(
        makespan=row.makespan_s / alone.makespan_s,
        completion=row.completion_mean_s / alone.completion_mean_s,
        completion_p95=row.completion_p95_s / alone.completion_p95_s,
        wait=row.wait_mean_s / alone.wait_mean_s if alone.wait_mean_s > 0 else None,
        run=row.run_mean_s / alone.run_mean_s,
        energy=row.energy_j / alone.energy_j if row.energy_j is not None and alone.energy_j else None,
        slowdown=row.slowdown_mean,
        slowdown_p95=row.slowdown_p95,
        ooms=row.ooms,
        failed=row.failed,
    )


def over_traces(found: Iterable[Ratio]) -> Ratio:
    """Geometric means of what are ratios, sums of what is counted."""
    every = list(found)
    counts = {name: sum(getattr(one, name) for one in every) for name in ("ooms", "failed")}
    means: dict[str, Any] = {
        name: geo_mean([getattr(one, name) for one in every]) for name in Ratio.__struct_fields__ if name not in counts
    }
    return Ratio(**means, **counts)


def geo_mean(values: Sequence[float | None]) -> float | None:
    """None where one is not known, or is 0: nothing waited at all."""
    known = [value for value in values if value is not None and value > 0]
    return exp(fsum(map(log, known)) / len(known)) if known and len(known) == len(values) else None


GPU = "a100-40"
Say = Callable[[str], None]
# A case, the number of its finished tasks, of all its tasks, and simulated seconds.
OnCaseProgress = Callable[[str, int, int, float], None]


class Case(NamedTuple):
    variant: Variant
    trace: str
    gpus: int
    seed: int = 0
    noise: float = 0.0

    def __str__(self) -> str:
        chance = f", seed {self.seed}" if self.noise else ""
        return f"{self.trace}, {self.gpus} GPUs{chance}: {self.variant.name}"


class Limit(NamedTuple):
    """The clairvoyant bound of a trace; with a cap on slowdown, that of runs which keep to it."""

    trace: str
    gpus: int
    cap: float | None = None

    def __str__(self) -> str:
        return f"{self.trace}, {self.gpus} GPUs: the limit" + (f" at cap {self.cap:g}" if self.cap is not None else "")


class Row(Record, frozen=True, kw_only=True):
    """What came of a case. Energy in J, times in seconds."""

    variant: str
    trace: str
    gpus: int
    seed: int
    noise: float
    tasks: int
    makespan_s: float
    completion_mean_s: float
    completion_p95_s: float
    wait_mean_s: float
    wait_p95_s: float
    run_mean_s: float
    slowdown_mean: float | None
    slowdown_p95: float | None
    slowdown_max: float | None
    energy_j: float | None
    sm_active_mean: float | None
    memory_mib_mean: float | None
    ooms: int
    failed: int
    took_s: float


Ask = Case | Limit
Answer = Row | Bound
_known: dict[str, Trace] = {}  # in a worker: the traces by name


def simulate(case: Case, trace: Trace, on_progress: OnProgress | None = None) -> Row:
    request = case.variant.request(case.trace, case.gpus, case.seed, case.noise)
    began = time.process_time()  # others may work on the same cores
    figures = simulation(request, trace).run(on_progress)
    took_s = time.process_time() - began
    own: dict[str, Any] = {**case._asdict(), "variant": case.variant.name, "took_s": took_s}
    return Row(**own, **{name: getattr(figures, name) for name in Row.__struct_fields__ if name not in own})


class Results:
    """What was found so far, over all parts."""

    def __init__(self, jobs: int, say: Say, on_progress: OnCaseProgress | None = None) -> None:
        self._jobs = jobs
        self._say = say
        self._on_progress = on_progress
        self._found: dict[Ask, Answer] = {}
        self._traces: dict[str, Trace] = {}

    def find(self, asks: Sequence[Ask], traces: Mapping[str, Trace]) -> None:
        """Works out those that are not known yet."""
        for name, trace in traces.items():
            assert self._traces.setdefault(name, trace) == trace  # one name, one trace: answers are kept by it
        missing = [ask for ask in dict.fromkeys(asks) if ask not in self._found]
        for count, (ask, answer, took_s) in enumerate(self._worked(missing, traces), 1):
            self._found[ask] = answer
            self._say(f"{count}/{len(missing)} {ask}" + (f" ({took_s:.1f} s)" if isinstance(ask, Limit) else ""))

    def row(self, case: Case) -> Row:
        found = self._found[case]
        assert isinstance(found, Row)
        return found

    def limit(self, limit: Limit) -> Bound:
        found = self._found[limit]
        assert isinstance(found, Bound)
        return found

    def makespan_limit_s(self, limit: Limit) -> float:
        """Lower limit of the makespan. The limit without a cap holds with a cap too. It may be the larger of the two,
        by the gap that the solver left."""
        found = {limit, limit._replace(cap=None)} & self._found.keys()
        return max(self.limit(each).makespan_s for each in found if isinstance(each, Limit))

    def rows(self, cases: Sequence[Case]) -> list[Row]:
        return [self.row(case) for case in dict.fromkeys(cases)]

    def _worked(self, asks: Sequence[Ask], traces: Mapping[str, Trace]) -> Iterator[tuple[Ask, Answer, float]]:
        if self._jobs <= 1 or len(asks) <= 1:
            _know(dict(traces))
            for ask in asks:
                on_progress = None if self._on_progress is None else functools.partial(self._on_progress, str(ask))
                yield ask, *_work(ask, on_progress)
            return
        # Spawned, not forked: a fork of a process with threads (numpy's) may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self._jobs, context, initializer=_begin, initargs=(dict(traces),)) as pool:
            with _uninterrupted():
                asked = {pool.submit(_work, ask): ask for ask in asks}
            try:
                yield from ((asked[done], *done.result()) for done in as_completed(asked))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after an error no further case begins


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal. One that begins now comes to the world without hearing it, since it
    would print where it was in its imports; `_begin` lets it hear again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(traces: dict[str, Trace]) -> None:
    """Prepares a worker: Ctrl-C ends it without a message, because the parent prints one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _know(traces)


def _know(traces: dict[str, Trace]) -> None:
    _known.clear()
    _known.update(traces)


def _work(ask: Ask, on_progress: OnProgress | None = None) -> tuple[Answer, float]:
    """The result and the seconds of processor time that it took."""
    trace, began = _known[ask.trace], time.process_time()
    if isinstance(ask, Limit):
        answer: Answer = bound(trace, cards.find(GPU), ask.gpus, slowdown_cap=ask.cap)
    else:
        answer = simulate(ask, trace, on_progress)
    return answer, time.process_time() - began


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
