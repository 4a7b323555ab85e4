"""The checks of `carma doctor`. A check returns a finding, or None if it does not apply.

A check never raises, starts nothing and changes no card.
"""

from __future__ import annotations

from collections.abc import Callable

from carma.cli.checks import gpu_checks, installation, sharing_checks
from carma.cli.checks.doctor_facts import DoctorFacts, Finding
from carma.errors import CarmaError

Check = Callable[[DoctorFacts], Finding | None]
CHECKS: tuple[Check, ...] = (
    installation.python,
    installation.directory,
    installation.disk,
    installation.settings,
    installation.admins,
    installation.daemon,
    gpu_checks.driver,
    gpu_checks.gpus,
    gpu_checks.activity,
    sharing_checks.mps,
    gpu_checks.modes,
    gpu_checks.mig,
    gpu_checks.persistence,
    sharing_checks.memory_limits,
    sharing_checks.cgroup,
    sharing_checks.task_cgroups,
    sharing_checks.trial_runs,
    sharing_checks.permissions,
)


def run_all(facts: DoctorFacts | None = None) -> list[Finding]:
    facts = facts or DoctorFacts()
    found = (_finding(check, facts) for check in CHECKS)
    return [finding for finding in found if finding is not None]


def limitations(facts: DoctorFacts) -> list[str]:
    """What the server cannot do, and the consequence, in one line each."""
    return [finding.limitation for finding in run_all(facts) if finding.limitation]


def _finding(check: Check, facts: DoctorFacts) -> Finding | None:
    name = check.__name__.replace("_", " ")
    try:
        return check(facts)
    except CarmaError as error:
        return Finding(name, "bad", str(error), error.hint)
    except Exception as error:  # a check that fails is a finding too
        return Finding(name, "bad", f"{type(error).__name__}: {error}")
