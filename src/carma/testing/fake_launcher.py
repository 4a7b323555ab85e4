"""A launcher without processes: attempts exist in memory and end by a plan or on request.

It passes the contract suite of launchers (launcher_contract.py).
"""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Callable, Iterable

from carma.core.model.outcome import Failed, Outcome, Succeeded
from carma.core.model.values import AttemptKey, Confinement, Record
from carma.core.ports import AttemptReport, LaunchOrder
from carma.launch.exit_outcome import name_of


class Plan(Record, frozen=True, kw_only=True):
    """The course of an attempt: `outcome` after `after_s`; None for both: it runs until a signal ends it."""

    outcome: Outcome | None = None
    after_s: float | None = None
    starts: bool = True  # False: it ends without a process (a missing directory, ...)
    ignores: tuple[int, ...] = ()  # ignored signals, except SIGKILL
    confinement: Confinement = Confinement(mechanism="timeslice")
    saves_in_s: float | None = None  # time from a checkpoint request to exit code 0; None: no handler


FOREVER = Plan()
AT_ONCE = Plan(outcome=Succeeded(), after_s=0.0)
_HARMLESS = frozenset((signals.SIGCHLD, signals.SIGCONT, signals.SIGURG, signals.SIGWINCH))


class _Run:
    def __init__(self, plan: Plan, pid: int, at: float) -> None:
        self.plan, self.pid, self.started_at = plan, pid, at
        self.trouble: str | None = None
        self.asked_at: float | None = None
        self.ending: tuple[float, Outcome] | None = None
        if plan.outcome is not None:
            self.end(plan.outcome, at + (plan.after_s or 0.0))

    def end(self, outcome: Outcome, at: float) -> None:
        """Ends an attempt at a time; no effect if it ends earlier."""
        if self.ending is None or at < self.ending[0]:
            self.ending = at, outcome

    def ended(self) -> tuple[float | None, Outcome | None]:
        """When and how it ended, if it has."""
        return self.ending if self.ending is not None and self.ending[0] <= time.time() else (None, None)


class FakeLauncher:
    """`script` gives the plan of each order."""

    def __init__(self, script: Callable[[LaunchOrder], Plan] = lambda _: FOREVER) -> None:
        self._script = script
        self._runs: dict[AttemptKey, _Run] = {}
        self._next_pid = 1_000_001  # above all pids of the kernel by default
        self.launched: list[LaunchOrder] = []  # each order once
        self.signals: list[tuple[AttemptKey, int]] = []  # all requested signals, also without effect
        self.released: list[AttemptKey] = []
        self.paused: set[AttemptKey] = set()  # attempts that stand still
        self.checkpoint_requests: list[tuple[AttemptKey, int]] = []  # delivered requests, each once

    def launch(self, order: LaunchOrder) -> None:
        if order.key in self._runs:
            return
        self._runs[order.key] = _Run(self._script(order), self._next_pid, time.time())
        self._next_pid += 1
        self.launched.append(order)

    def poll(self, keys: Iterable[AttemptKey]) -> tuple[AttemptReport, ...]:
        return tuple(self._found(key) for key in keys)

    def _found(self, key: AttemptKey) -> AttemptReport:
        run = self._runs.get(key)
        if run is None:
            return AttemptReport(key=key)
        ended_at, outcome = run.ended()
        if not run.plan.starts:
            return AttemptReport(key=key, outcome=outcome, ended_at=ended_at)
        return AttemptReport(
            key=key,
            pid=run.pid,
            started_at=run.started_at,
            outcome=outcome,
            ended_at=ended_at,
            confinement=run.plan.confinement,
            trouble=run.trouble if outcome is None else None,
            checkpoint_asked_at=run.asked_at if outcome is not None else None,
        )

    def signal(self, key: AttemptKey, signal: int) -> None:
        self.signals.append((key, signal))
        run = self._runs.get(key)
        if run is None or signal in _HARMLESS or (signal in run.plan.ignores and signal != signals.SIGKILL):
            return
        self.paused.discard(key)
        run.end(Failed(128 + signal, f"ended by {name_of(signal)}"), time.time())

    def request_checkpoint(self, key: AttemptKey, signal: int, asked_at: float) -> bool:
        run = self._runs.get(key)
        if run is None or run.plan.saves_in_s is None or run.ended() != (None, None):
            return False
        if run.asked_at != asked_at:
            run.asked_at = asked_at
            self.checkpoint_requests.append((key, signal))
            run.end(Succeeded(), time.time() + run.plan.saves_in_s)
        return True

    def pause(self, key: AttemptKey) -> bool:
        run = self._runs.get(key)
        if run is None or run.ended() != (None, None):
            return False
        self.paused.add(key)
        return True

    def unpause(self, key: AttemptKey) -> bool:
        self.paused.discard(key)
        return True

    def pids(self, keys: Iterable[AttemptKey]) -> dict[int, AttemptKey]:
        found = self.poll(keys)
        return {one.pid: one.key for one in found if one.pid is not None and one.outcome is None}

    def end(self, key: AttemptKey, outcome: Outcome) -> None:
        """End an attempt now."""
        self._runs[key].end(outcome, time.time())

    def disturb(self, key: AttemptKey, reason: str) -> None:
        """A service that the attempt depends on fails; the attempt goes on."""
        self._runs[key].trouble = reason

    def sharing_pids(self) -> frozenset[int]:
        return frozenset()

    def has_order(self, key: AttemptKey) -> bool:
        return key in self._runs

    def release(self, key: AttemptKey) -> None:
        """Records the release: a key is never started twice."""
        self.released.append(key)
