"""The reasons of recovery, as users read them."""

from __future__ import annotations

from msgspec.structs import replace

from carma.core.model.outcome import Disrupted, Outcome, OutOfMemory, Preempted, describe
from carma.core.model.settings import RecoveryRules, Rules
from carma.core.model.status import Ended
from carma.core.model.task import Attempt, Task
from carma.core.model.values import Booking, Placement, TaskId, TaskSpec
from carma.core.recovery import Retry, next_step
from carma.testing.builders import ALICE, gpu
from tests.golden_text import assert_wording

GPUS = (gpu(0, 40_960), gpu(1, 20_480))
BOOKING = Booking(memory_mib=5_000, source="declared")
OOM = OutOfMemory("gpu", 1, 3_000, 4_800, "CUDA out of memory")


def attempt(number: int, outcome: Outcome, booking: Booking = BOOKING, blame: str | None = "own") -> Attempt:
    placement = Placement(gpus=(GPUS[0].id,), booking=booking)
    return Attempt(number=number, placement=placement, placed_at=1.0, outcome=outcome, blame=blame)  # type: ignore[arg-type]


def reason(*attempts: Attempt, rules: Rules | None = None) -> str:
    outcome = attempts[-1].outcome
    assert outcome is not None
    spec = TaskSpec(command=("true",), directory="/")
    task = Task(id=TaskId(1), owner=ALICE, spec=spec, submitted_at=1.0, status=Ended(9.0, outcome), attempts=attempts)
    answer = next_step(task, rules or Rules(), GPUS)
    if isinstance(answer, Retry):
        return answer.plan.reason
    return describe(answer.outcome)


def test_the_reasons_of_retries_and_ends() -> None:
    first, at_once = attempt(1, OOM), attempt(1, replace(OOM, peak_mib=0))
    unknown = attempt(1, OutOfMemory("gpu"))
    alone = attempt(1, OOM, replace(BOOKING, alone=True))
    shrunk = attempt(1, OOM, replace(BOOKING, memory_mib=4_000, placed_mib=8_000))
    victim = attempt(1, OOM, blame="neighbour")
    disrupted = attempt(1, Disrupted("the MPS server ended"), blame=None)
    published = Rules(recovery=RecoveryRules(mode="alone"))
    too_large = replace(OOM, asked_mib=12_000, peak_mib=36_000)
    no_retry, once = (Rules(recovery=RecoveryRules(retries=count, innocent_retries=count)) for count in (0, 1))
    assert_wording(
        "recovery",
        {
            "first retry": reason(first),
            "all at once": reason(at_once),
            "larger": reason(first, attempt(2, OOM)),
            "unknown": reason(unknown),
            "alone": reason(first, attempt(2, OOM), attempt(3, OOM)),
            "alone, memory unknown": reason(unknown, rules=published),
            "no larger GPU": reason(alone),
            "too many retries": reason(first, attempt(2, OOM), rules=once),
            "too many retries, alone": reason(first, replace(alone, number=2), rules=once),
            "too many retries, too large": reason(first, attempt(2, too_large), rules=once),
            "too many retries, memory unknown": reason(unknown, replace(unknown, number=2), rules=once),
            "no retries": reason(first, rules=no_retry),
            "victim": reason(victim),
            "victim, published": reason(victim, rules=published),
            "victim too often": reason(victim, attempt(2, OOM, blame="neighbour"), rules=once),
            "shrunk": reason(shrunk),
            "disrupted": reason(disrupted),
            "disrupted too often": reason(disrupted, replace(disrupted, number=2), rules=once),
            "preempted": reason(attempt(1, Preempted("bob", "private", 3), blame=None)),
        },
    )
