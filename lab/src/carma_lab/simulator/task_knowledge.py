"""Knowledge of a simulated task before it runs: the answer to EstimateTask of the core.

1. Memory comes from the source of the setup. Without an estimate, demand and run time are not known either.
2. Demand and run time come from the source that `Setup.demand` names. Past runs are recorded and read by code of the
   daemon (daemon/found_attempts.py, estimate/history.py, estimate/combination.py), for all policies.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from carma.core.model import events as e
from carma.core.model.task import Task
from carma.core.model.values import AttemptKey, Estimate, Gpu
from carma.core.ports import EstimateRequest
from carma.core.state import State
from carma.daemon.found_attempts import neighbours, past_run
from carma.estimate.combination import with_past_runs
from carma.estimate.history import History
from carma.store.memory import MemoryStore
from carma.traces import TraceTask
from carma_lab.simulator.estimate_sources import predict_demand
from carma_lab.simulator.sampling import STEPS_PER_S
from carma_lab.simulator.setup import Setup


class TaskKnowledge:
    def __init__(self, setup: Setup, gpus: Sequence[Gpu]) -> None:
        self._setup, self._gpus = setup, tuple(gpus)
        self._archive = MemoryStore()
        self._history = (History(self._archive),) if setup.demand in ("history", "estimate") else ()
        self._shared: set[AttemptKey] = set()  # attempts that share, or shared, a GPU

    def follow(self, state: State, event: e.AnyEvent) -> None:
        """Records past runs, as the daemon's loop does after each event."""
        if not self._history:
            return
        match event:
            case e.TaskPlaced():
                self._shared |= neighbours(state, event)
            case e.AttemptEnded(key=key):
                run = past_run(state, key, key in self._shared)
                self._shared.discard(key)
                if run is not None:
                    self._archive.remember(run)
            case _:
                return

    def estimated(self, task: Task, row: TraceTask, at: float) -> e.TaskEstimated:
        found = self._setup.source(row)
        if not isinstance(found, Estimate):
            return e.TaskEstimated(at, task.id, None, (found,))
        match self._setup.demand:
            case "measured":
                found = replace(found, demand=row.demand, runtime_s=row.seconds, alone_steps_per_s=STEPS_PER_S)
            case "estimate":
                found = replace(found, demand=predict_demand(self._setup.seed, row), demand_predicted=True)
            case "history" | "none":
                pass
        request = EstimateRequest(task=task.id, owner=task.owner, spec=task.spec, gpus=self._gpus)
        return e.TaskEstimated(at, task.id, with_past_runs(found, self._history, request))
