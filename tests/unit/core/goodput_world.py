"""Holders, questions and policies for tests of goodput's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from carma.core.model.decision import Ask
from carma.core.model.settings import PlacementRules, Rules, Sharing
from carma.core.model.values import AttemptKey, Demand, TaskId
from carma.core.policies import goodput
from carma.core.scheduling import forecast as outlooks
from carma.core.scheduling.forecast import Forecast, Terms, baseline
from carma.core.scheduling.gpu_view import Holder, Progress
from carma.core.scheduling.policy import Policy

NOW = 5_000.0
MPS = Terms(1.25, "mps")
LIGHT = Demand(0.05, 0.02, 0.02, 0.1, 0.05)
MEDIUM = Demand(0.35, 0.15, 0.15, 0.5, 0.3)
HEAVY = Demand(0.95, 0.5, 0.6, 1.0, 0.9)


def goes(rate: float) -> Demand:
    """A task that runs at that rate with any neighbour, for `by_hand`."""
    return Demand(rate, 0.1, 0.1)


def rates_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that a reader can see, in the place of the sharing model."""

    def rates(demands: Sequence[Demand | None], _mechanism: str, **_: object) -> tuple[float, ...]:
        if len(demands) < 2:
            return (1.0,) * len(demands)
        return tuple(0.1 if demand is None else demand.sm_active for demand in demands)

    monkeypatch.setattr(outlooks, "progress_rates", rates)


def holder(
    demand: Demand | None,
    alone_s: float | None = 100.0,
    *,
    task: int = 7,
    done_s: float = 0.0,
    ran_s: float = 0.0,
    rate: float = 1.0,
    elsewhere: float = 1.0,
    mib: int = 1_000,
) -> Holder:
    progress = Progress(NOW - ran_s, done_s, NOW, rate, alone_s, elsewhere)
    key = AttemptKey(TaskId(task), 1)
    return Holder(key=key, booking_mib=mib, ends_at=NOW + 100.0, demand=demand, progress=progress)


def ask(demand: Demand | None, alone_s: float | None = 100.0) -> Ask:
    return Ask(TaskId(9), 1, 1_000, "declared", False, demand, alone_s, NOW)


def forecast(asked: Ask, holders: Sequence[Holder], terms: Terms) -> Forecast:
    return outlooks.forecast(asked, baseline([holders], asked.at, terms), terms)


def bound(cap: float = 1.25, mechanism: str = "mps", limit: float = 1.8) -> Policy:
    sharing = Sharing(mechanism=mechanism)  # type: ignore[arg-type]
    placement = PlacementRules(slowdown_cap=cap, slowdown_limit=limit)
    return goodput.POLICY.bound(Rules(placement=placement, sharing=sharing))


def sentence(policy: Policy, asked: Ask, *holders: Holder) -> str:
    found = policy.refusal(asked, holders)
    assert found is not None
    assert found.code == "Slowdown"
    return found.sentence
