"""What `carma doctor` looks at: each check is a function that returns a finding, or None where there is nothing to say.

None of them raises, starts anything or changes a card.
"""

from __future__ import annotations

from collections.abc import Callable

from carma.cli.checks import gpu_checks as cards
from carma.cli.checks import installation as ours
from carma.cli.checks import sharing_checks as sharing
from carma.cli.checks.machine_facts import Finding, Look
from carma.errors import CarmaError

Check = Callable[[Look], Finding | None]
CHECKS: tuple[Check, ...] = (
    ours.python,
    ours.home,
    ours.disk,
    ours.settings,
    ours.daemon,
    cards.driver,
    cards.gpus,
    cards.activity,
    sharing.mps,
    cards.modes,
    cards.mig,
    cards.persistence,
    sharing.caps,
    sharing.cgroup,
    sharing.task_cgroups,
    sharing.trials,
    sharing.permissions,
)

_LIMITING: tuple[Check, ...] = (cards.activity, sharing.mps, sharing.task_cgroups, sharing.trials)


def run_all(look: Look | None = None) -> list[Finding]:
    look = look or Look()
    found = (_safely(check, look) for check in CHECKS)
    return [finding for finding in found if finding is not None]


def limitations(look: Look) -> list[str]:
    """What the server cannot do, and the consequence, one line each."""
    found = (_safely(check, look) for check in _LIMITING)
    return [finding.limitation for finding in found if finding is not None and finding.limitation]


def _safely(check: Check, look: Look) -> Finding | None:
    try:
        return check(look)
    except CarmaError as error:
        return Finding(check.__name__, "bad", str(error), error.hint)
    except Exception as error:  # a check that breaks is a finding too
        return Finding(check.__name__, "bad", f"{type(error).__name__}: {error}")
