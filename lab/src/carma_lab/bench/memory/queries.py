"""Asks estimators about measured runs: the script itself is tried once for all of them, two scripts side by side."""

from __future__ import annotations

import gzip
import os
import pwd
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from carma.core.model.settings import Rules
from carma.core.model.values import Gpu, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest
from carma.errors import Usage
from carma.estimate.combination import make_estimator
from carma.estimate.local import EstimatorAnswer, SharedTrial, answers
from carma.plugins import ESTIMATORS, names
from carma.store.memory import MemoryStore
from carma.trial.layers.description import Described
from carma.trial.protocol import Context, Trial, Trials
from carma.trial.replay import card_constants as constants
from carma.trial.replay.conv_workspaces import ConvModel, ConvWorkspaces
from carma.trial.replay.footprint import figure
from carma_lab.bench.memory.figures import Row
from carma_lab.bench.memory.measured import MIB, Measured

INDEX = "folds.json"


class Folds:
    """Which model was fitted without which families."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, list[str]])
        except (OSError, msgspec.MsgspecError) as error:
            raise Usage(f"{folder / INDEX} cannot be used: {error}", "It names the families of each file.") from error
        self._file = {family: name for name, families in index.items() for family in families}
        for name in index:
            if not (folder / name).is_file():
                raise Usage(f"{folder / name} is not there", f"{INDEX} names it.")

    def model(self, family: str) -> tuple[str, ConvWorkspaces | None]:
        """The file whose model does not know the family, and that model; "" and None for a family in no fold."""
        name = self._file.get(family, "")
        return name, _workspaces(self._folder / name) if name else None


@lru_cache(maxsize=16)
def _workspaces(file: Path) -> ConvWorkspaces:
    return ConvWorkspaces(msgspec.json.decode(gzip.decompress(file.read_bytes()), type=ConvModel))


AT_ONCE = 2  # trial runs, as on the smallest machine that the promise about their time is for
BEST = "trace"
# These need a submission: a declaration of the user, or earlier tasks of the server.
OF_SUBMISSIONS = ("declared", "history")
ZOO = Path(__file__).parent / "zoo"


class ClosingTrials(Trials, Protocol):
    def close(self) -> None: ...


def chosen_estimators(wanted: Sequence[str]) -> tuple[str, ...]:
    """Names of the chosen estimators, the main one first. `all` stands for all of them."""
    known = sorted((name for name in names(ESTIMATORS) if name not in OF_SUBMISSIONS), key=lambda n: (n != BEST, n))
    if "all" in wanted:
        return tuple(known)
    for name in wanted:
        if name not in known:
            raise Usage(f"there is no estimator {name!r} to compare", f"There are {', '.join(known)}, or all.")
    return tuple(dict.fromkeys(wanted))


class Asker(NamedTuple):
    """`script` is the file in the zoo whose arguments the runs have; `python` the interpreter that has torch."""

    trials: ClosingTrials
    rules: Rules
    gpu: Gpu
    estimators: Sequence[str]
    python: str
    script: str = "case.py"
    folds: Folds | None = None

    def ask_all(self, runs: Sequence[Measured]) -> Iterator[list[Row]]:
        """The answers about each run, in their order. Broken off, it ends the trials that are under way."""
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            yield from pool.map(self.ask, runs)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self.trials.close()
            pool.shutdown()

    def ask(self, run: Measured) -> list[Row]:
        shared = SharedTrial(self.trials)
        context = Context(archive=MemoryStore(), gpus=(self.gpu,), rules=self.rules, trials=shared)
        estimators = [make_estimator(name, context) for name in self.estimators]
        request = self._request(run)
        began_s = time.monotonic()
        ran = shared.run(request)
        ran_s = time.monotonic() - began_s
        # One from the cache took no time now; what counts is what it took when it was run.
        remembered_s = max(0.0, ran.seconds - ran_s) if isinstance(ran, Trial) else 0.0
        rows = [row_of(run, answer, remembered_s) for answer in answers(estimators, request, shared)]
        network = network_of(shared.describe(request))
        return [replace(self._replayed(row, ran, request), network=network) for row in rows]

    def _replayed(self, row: Row, ran: Trial | NoEstimate, request: EstimateRequest) -> Row:
        """What its bound is judged by: the figure, by a model that does not know its family where there is one."""
        if row.estimator != BEST or row.refused is not None or isinstance(ran, NoEstimate):
            return row
        fold, other = ("", None) if self.folds is None else self.folds.model(row.family)
        found = figure(ran, request, constants.folders(os.environ), other)
        return replace(
            row,
            replayed_mib=found.footprint_bytes / MIB,
            spread=found.spread,
            group=found.group,
            fold=fold,
        )

    def _request(self, run: Measured) -> EstimateRequest:
        command = (self.python, str(ZOO / self.script), *run.argv)
        spec = TaskSpec(command=command, directory=str(ZOO), environment=dict(os.environ))
        return EstimateRequest(task=TaskId(0), owner=_owner(), spec=spec, gpus=(self.gpu,))


def network_of(described: Described | NoEstimate) -> str:
    """What GPUMemNet takes it for; "" for what it knows nothing of."""
    from carma.trial.layers.column_reading import CannotTell
    from gpumemnet.serving.features import features

    if isinstance(described, NoEstimate):
        return ""
    try:
        return features(described).family
    except CannotTell:
        return ""


def row_of(run: Measured, answer: EstimatorAnswer, remembered_s: float) -> Row:
    result = answer.result
    row = Row(
        case=run.id,
        family=run.family,
        estimator=answer.estimator,
        measured_mib=run.footprint_mib,
        took_s=answer.took_s + remembered_s,
        measured_reserved_mib=run.reserved_peak / MIB,
        measured_allocated_mib=run.allocated_peak / MIB,
    )
    if isinstance(result, NoEstimate):
        return replace(row, refused=result.reason)
    return replace(
        row,
        estimated_mib=float(result.footprint_mib),
        bound_mib=None if result.level is None else float(result.upper_mib),
        reserved_mib=None if result.reserved_mib is None else float(result.reserved_mib),
        allocated_mib=None if result.allocated_mib is None else float(result.allocated_mib),
    )


def _owner() -> Owner:
    uid = os.getuid()
    try:
        return Owner(uid, os.getgid(), pwd.getpwuid(uid).pw_name)
    except KeyError:
        return Owner(uid, os.getgid(), str(uid))
