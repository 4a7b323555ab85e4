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
    def __init__(self, order: LaunchOrder, plan: Plan, pid: int, at: float) -> None:
        self.order = order
        self.plan = plan
        self.pid = pid
        self.started_at = at
        self.outcome: Outcome | None = None
        self.ended_at: float | None = None
        self.trouble: str | None = None
        self.asked_at: float | None = None
        self.leave_at: float | None = None

    def end(self, outcome: Outcome, at: float) -> None:
        if self.outcome is None:
            self.outcome, self.ended_at = outcome, at

    def look(self, now: float) -> None:
        plan = self.plan
        if plan.outcome is not None and now >= self.started_at + (plan.after_s or 0.0):
            self.end(plan.outcome, self.started_at + (plan.after_s or 0.0))
        if self.leave_at is not None and now >= self.leave_at:
            self.end(Succeeded(), self.leave_at)


class FakeLauncher:
    """`script` gives the plan of each order; `now` is the clock for `after_s`."""

    def __init__(
        self, script: Callable[[LaunchOrder], Plan] = lambda _: FOREVER, *, now: Callable[[], float] = time.time
    ) -> None:
        self._script = script
        self._now = now
        self._runs: dict[AttemptKey, _Run] = {}
        self._next_pid = 1_000_001  # above all pids of the kernel by default
        self.launched: list[LaunchOrder] = []  # each order once
        self.signals: list[tuple[AttemptKey, int]] = []  # all requested signals, also without effect
        self.released: list[AttemptKey] = []
        self.checkpoint_requests: list[tuple[AttemptKey, int]] = []  # delivered requests, each once

    def launch(self, order: LaunchOrder) -> None:
        if order.key in self._runs:
            return
        self._runs[order.key] = _Run(order, self._script(order), self._next_pid, self._now())
        self._next_pid += 1
        self.launched.append(order)

    def poll(self, keys: Iterable[AttemptKey]) -> tuple[AttemptReport, ...]:
        return tuple(self._found(key) for key in keys)

    def _found(self, key: AttemptKey) -> AttemptReport:
        run = self._runs.get(key)
        if run is None:
            return AttemptReport(key=key)
        run.look(self._now())
        if not run.plan.starts:
            return AttemptReport(key=key, outcome=run.outcome, ended_at=run.ended_at)
        return AttemptReport(
            key=key,
            pid=run.pid,
            started_at=run.started_at,
            outcome=run.outcome,
            ended_at=run.ended_at,
            confinement=run.plan.confinement,
            trouble=run.trouble if run.outcome is None else None,
            checkpoint_asked_at=run.asked_at if run.outcome is not None else None,
        )

    def signal(self, key: AttemptKey, signal: int) -> None:
        self.signals.append((key, signal))
        run = self._runs.get(key)
        if run is None or signal in _HARMLESS or (signal in run.plan.ignores and signal != signals.SIGKILL):
            return
        run.look(self._now())
        run.end(Failed(128 + signal, f"ended by {name_of(signal)}"), self._now())

    def request_checkpoint(self, key: AttemptKey, signal: int, asked_at: float) -> bool:
        run = self._runs.get(key)
        if run is None or run.plan.saves_in_s is None or run.outcome is not None:
            return False
        if run.asked_at != asked_at:
            run.asked_at = asked_at
            self.checkpoint_requests.append((key, signal))
            run.leave_at = self._now() + run.plan.saves_in_s
        return True

    def pids(self, keys: Iterable[AttemptKey]) -> dict[int, AttemptKey]:
        found = self.poll(keys)
        return {one.pid: one.key for one in found if one.pid is not None and one.outcome is None}

    def end(self, key: AttemptKey, outcome: Outcome) -> None:
        """End an attempt now."""
        self._runs[key].end(outcome, self._now())

    def disturb(self, key: AttemptKey, reason: str) -> None:
        """A service that the attempt depends on fails; the attempt goes on."""
        self._runs[key].trouble = reason

    def sharing_pids(self) -> frozenset[int]:
        return frozenset()

    def has_order(self, key: AttemptKey) -> bool:
        return key in self._runs

    def lose(self, key: AttemptKey) -> None:
        """Forget the order, as if it had never arrived."""
        self._runs.pop(key, None)

    def release(self, key: AttemptKey) -> None:
        """Only recorded: a key is never started twice."""
        self.released.append(key)
