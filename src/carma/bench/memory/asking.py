"""Asks estimators about measured runs: the script itself is tried once for all of them, two scripts side by side."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from carma.bench.memory.figures import Row
from carma.bench.memory.folds import Folds
from carma.bench.memory.measured import MIB, Measured
from carma.core.model import Estimate, Gpu, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.core.settings import Rules
from carma.errors import Usage
from carma.estimate.local import STEPS, Answer, SharedTrial, answers, cache_directory
from carma.estimate.protocol import Context, Trial, Trials
from carma.estimate.registry import make_estimator
from carma.estimate.trace.bound import Features, group_of
from carma.estimate.trace.report import Report
from carma.estimate.trace.trial import TrialRuns
from carma.plugins import ESTIMATORS, names
from carma.store.memory import MemoryStore

AT_ONCE = 2  # trial runs, as on the smallest machine that the promise about their time is for
BEST = "trace"
# The user's word and the server's memory: neither says anything of a command that nobody submitted.
OF_SUBMISSIONS = ("declared", "history")
ZOO = Path(__file__).parent / "zoo"


class ClosingTrials(Trials, Protocol):
    def close(self) -> None: ...


def chosen_estimators(wanted: Sequence[str]) -> tuple[str, ...]:
    """By name, `all` for every one; the main one first."""
    known = sorted((name for name in names(ESTIMATORS) if name not in OF_SUBMISSIONS), key=lambda n: (n != BEST, n))
    if "all" in wanted:
        return tuple(known)
    for name in wanted:
        if name not in known:
            raise Usage(f"there is no estimator {name!r} to compare", f"There are {', '.join(known)}, or all.")
    return tuple(dict.fromkeys(wanted))


def own_trials(rules: Rules, environ: Mapping[str, str]) -> TrialRuns:
    """In the caller's own cache, so that a comparison that was broken off goes on where it was."""
    memory = rules.memory
    return TrialRuns(
        cache_dir=cache_directory(environ),
        limit_s=memory.trial_limit_s,
        memory_mib=memory.trial_memory_mib,
        steps=STEPS,
    )


class Asker:
    """`script` is the file in the zoo whose arguments the runs have; `python` the interpreter that has torch."""

    def __init__(
        self,
        trials: ClosingTrials,
        rules: Rules,
        gpu: Gpu,
        estimators: Sequence[str],
        *,
        python: str,
        script: str = "case.py",
        folds: Folds | None = None,
    ) -> None:
        self._trials, self._rules, self._gpu = trials, rules, gpu
        self._estimators = tuple(estimators)
        self._python, self._script, self._folds = python, script, folds

    def ask_all(self, runs: Sequence[Measured]) -> Iterator[list[Row]]:
        """The answers about each run, in their order. Broken off, it ends the trials that are under way."""
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            yield from pool.map(self.ask, runs)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._trials.close()
            pool.shutdown()

    def ask(self, run: Measured) -> list[Row]:
        shared = SharedTrial(self._trials)
        context = Context(archive=MemoryStore(), gpus=(self._gpu,), rules=self._rules, trials=shared)
        estimators = [make_estimator(name, context) for name in self._estimators]
        request = self._request(run)
        began_s = time.monotonic()
        ran = shared.run(request)
        ran_s = time.monotonic() - began_s
        # One from the cache took no time now; what counts is what it took when it was run.
        remembered_s = max(0.0, ran.seconds - ran_s) if isinstance(ran, Trial) else 0.0
        group = group_in(ran.report) if isinstance(ran, Trial) else ""
        rows = [row_of(run, answer, group, remembered_s) for answer in answers(estimators, request, shared)]
        return [self._left_out(row, ran, request) for row in rows]

    def _left_out(self, row: Row, ran: Trial | NoEstimate, request: EstimateRequest) -> Row:
        if self._folds is None or row.replayed_mib is None or isinstance(ran, NoEstimate):
            return row
        again_mib = self._folds.replayed_mib(row.family, ran, request)
        return row if again_mib is None else replace(row, replayed_mib=again_mib, fold=self._folds.name(row.family))

    def _request(self, run: Measured) -> EstimateRequest:
        command = (self._python, str(ZOO / self._script), *run.argv)
        spec = TaskSpec(command=command, directory=str(ZOO), environment=dict(os.environ))
        return EstimateRequest(task=TaskId(0), owner=_owner(), spec=spec, gpus=(self._gpu,))


def row_of(run: Measured, answer: Answer, group: str, remembered_s: float) -> Row:
    said = answer.said
    row = Row(
        case=run.id,
        family=run.family,
        estimator=answer.estimator,
        measured_mib=run.footprint_mib,
        took_s=answer.took_s + remembered_s,
        measured_reserved_mib=run.reserved_peak / MIB,
        measured_allocated_mib=run.allocated_peak / MIB,
        refused=said.reason if isinstance(said, NoEstimate) else None,
    )
    return row if isinstance(said, NoEstimate) else _with_figures(row, said, group)


def _with_figures(row: Row, said: Estimate, group: str) -> Row:
    replayed_mib = None
    if said.source == BEST and said.reserved_mib is not None:
        replayed_mib = float(said.reserved_mib + said.parts_mib.get("context", 0))
    return replace(
        row,
        estimated_mib=float(said.footprint_mib),
        bound_mib=None if said.level is None else float(said.upper_mib),
        reserved_mib=None if said.reserved_mib is None else float(said.reserved_mib),
        allocated_mib=None if said.allocated_mib is None else float(said.allocated_mib),
        replayed_mib=replayed_mib,
        group="" if replayed_mib is None else group,
    )


def group_in(report: Report) -> str:
    """The kind of run that its bound goes by, which hangs on its calls alone and not on any size."""
    features = Features(
        footprint_bytes=0,
        reserved_bytes=0,
        allocated_bytes=0,
        scratch_bytes=0,
        cudnn=False,
        convolutions=tuple(call for call in report.calls if call.op.startswith("conv")),
        recurrent=any(call.op.startswith("rnn") for call in report.calls),
        flags=report.flags,
    )
    return group_of(features)


def _owner() -> Owner:
    uid = os.getuid()
    try:
        return Owner(uid, os.getgid(), pwd.getpwuid(uid).pw_name)
    except KeyError:
        return Owner(uid, os.getgid(), str(uid))
