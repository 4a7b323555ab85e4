"""What follows the end of an attempt: the end of the task, or a retry by the ladder.

Published measurements put the cost of an OOM at 23 s of lost work and 2,330 s of waiting for an empty GPU, so waiting
for an empty GPU is the last step of the ladder:

1. Retry where (peak + requested bytes + margin) fits. A task that reached a memory limit told only the next block that
   it wanted: its booking grows at least by the factor `growth`, and is limited to the free memory of its GPU
   (placement.py).
2. Retry with a larger booking.
3. Retry alone on a GPU.
4. Give up.

A task whose attempt ended through no fault of its own (a neighbour exceeded its booking, the MPS server died) goes
before all other tasks, with its booking unchanged. `max_oom_retries` 0 forbids every retry.

`recovery.mode = "alone"` is the published rule, for comparison: after an OOM a task goes before all others and has its
GPUs to itself, whichever task caused the OOM.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from carma.core.model.outcome import Disrupted, Outcome, OutOfMemory, Preempted, describe
from carma.core.model.settings import Rules
from carma.core.model.status import Ended
from carma.core.model.task import Attempt, Plan, Task
from carma.core.model.units import show_count, show_mib
from carma.core.model.values import Gpu, Record

Blame = Literal["own", "neighbour", "unknown"]
CONTEXT_MIB = 1024  # upper limit of a process's memory outside its framework's allocator (760 on an H200)


class Retry(Record, frozen=True):
    plan: Plan
    wait_s: float


class GiveUp(Record, frozen=True):
    outcome: Outcome


def blame(attempt: Attempt, outcome: OutOfMemory, neighbours_over: bool) -> Blame:
    """Which task caused a GPU OOM. A process above its own booking is the cause, even below its memory limit, because
    it needs a larger booking. Otherwise a neighbour above its booking is."""
    needed_mib = _needed_mib(attempt, outcome)
    if needed_mib > attempt.placement.booking.memory_mib:
        return "own"
    if neighbours_over:
        return "neighbour"
    return "own" if _reached_limit(attempt, needed_mib) else "unknown"


def _reached_limit(attempt: Attempt, needed_mib: int) -> bool:
    """Whether a limit other than the watchdog stopped it. A framework's limit covers its allocator only, and the error
    message leaves out the context, so that a limit can be reached up to CONTEXT_MIB below its figure."""
    guards = attempt.confinement.guards if attempt.confinement is not None else ()
    return any(guard.rung != "watchdog" and needed_mib > guard.limit_mib - CONTEXT_MIB for guard in guards)


def _peak_mib(attempt: Attempt, outcome: OutOfMemory) -> int | None:
    """Highest memory, by the framework's message or by the driver."""
    return max((peak for peak in (outcome.peak_mib, attempt.observed_mib) if peak is not None), default=None)


def _needed_mib(attempt: Attempt, outcome: OutOfMemory) -> int:
    """Known lower limit of its memory: the peak and the failed request. 0 if both are unknown."""
    return (_peak_mib(attempt, outcome) or 0) + (outcome.asked_mib or 0)


def _gpu_oom(attempt: Attempt) -> OutOfMemory | None:
    outcome = attempt.outcome
    return outcome if isinstance(outcome, OutOfMemory) and outcome.where == "gpu" else None


def not_enough_mib(attempt: Attempt) -> int | None:
    """Memory that was not enough for an attempt that ran out of GPU memory; None if unknown."""
    outcome = _gpu_oom(attempt)
    if outcome is None:
        return None
    needed_mib = _needed_mib(attempt, outcome)
    if not needed_mib and attempt.blame == "own":
        needed_mib = attempt.placement.booking.cap_mib or 0  # only the limit that stopped it is known
    return needed_mib or None


def next_step(task: Task, rules: Rules, gpus: tuple[Gpu, ...]) -> Retry | GiveUp:
    """Decides what follows the end of the newest attempt; `gpus` are those that take tasks, largest first.

    Pure, and bounded: every Retry counts an attempt, except after a preemption.
    """
    assert isinstance(task.status, Ended)
    attempt, outcome = task.attempts[-1], task.status.outcome
    if isinstance(outcome, Preempted):
        # All users can read a plan's reason, so the owner's reason and the program's messages are left out.
        return Retry(_unchanged_plan(task, describe(Preempted(outcome.by, code=outcome.code))), 0.0)
    limit = rules.recovery.retries if task.spec.max_oom_retries is None else task.spec.max_oom_retries
    counted = [one for one in task.attempts if one.number > task.counted_from]
    if _without_fault(attempt):
        count = sum(map(_without_fault, counted))
        if limit == 0 or count > rules.recovery.innocent_retries:
            return GiveUp(_end_without_fault(outcome, count))
        return Retry(_first_plan(task, attempt, rules), _back_off_s(rules, count))
    if not isinstance(outcome, OutOfMemory) or outcome.where != "gpu":
        return GiveUp(outcome)
    count = sum(_gpu_oom(one) is not None and not _without_fault(one) for one in counted)
    if count > limit:
        return GiveUp(replace(outcome, no_retry=f"{_no_retries_left(limit)}; {_last_booking(attempt, outcome, gpus)}"))
    return _next_rung(task.spec.gpus, attempt, outcome, count, rules, gpus)


def _no_retries_left(limit: int) -> str:
    return f"no retries left ({limit} of {limit} used)" if limit else "retries are off for this task"


def _last_booking(attempt: Attempt, outcome: OutOfMemory, gpus: tuple[Gpu, ...]) -> str:
    """What the last attempt had, and what the user can do."""
    needed_mib = _needed_mib(attempt, outcome)
    if gpus and needed_mib > gpus[0].memory_mib:
        return f"it needs at least {show_mib(needed_mib)}, and the largest GPU has {show_mib(gpus[0].memory_mib)}"
    had_mib = min((gpu.memory_mib for gpu in gpus if gpu.id in attempt.placement.gpus), default=None)
    if attempt.placement.booking.alone:
        return "the last attempt was alone on a GPU" + ("" if had_mib is None else f" with {show_mib(had_mib)}")
    booked = show_mib(attempt.placement.booking.memory_mib)
    more = f"at least {show_mib(needed_mib)}" if needed_mib > attempt.placement.booking.memory_mib else "more"
    return f"the last attempt had {booked} booked: declare {more} with --gpu-mem"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _without_fault(attempt: Attempt) -> bool:
    """Whether the attempt ended without a fault of its own."""
    return attempt.blame == "neighbour" or isinstance(attempt.outcome, Disrupted) or _within_first_booking(attempt)


def _within_first_booking(attempt: Attempt) -> bool:
    """Whether the attempt ran out of memory within its first booking, which had shrunk since (booking_shrink.py)."""
    outcome, first_mib = _gpu_oom(attempt), attempt.placement.booking.placed_mib
    if first_mib is None or outcome is None or attempt.blame != "own":
        return False
    return _needed_mib(attempt, outcome) <= first_mib


def _first_booking_mib(attempt: Attempt) -> int:
    booking = attempt.placement.booking
    return booking.memory_mib if booking.placed_mib is None else booking.placed_mib


def _end_without_fault(outcome: Outcome, count: int) -> Outcome:
    """The end of a task after too many failures without a fault of its own."""
    if isinstance(outcome, Disrupted):
        return Disrupted(
            f"{outcome.reason}; {show_count(count, 'attempt')} ended without a fault of the task; no further retry"
        )
    assert isinstance(outcome, OutOfMemory)
    return replace(outcome, no_retry=f"a neighbour was the cause {_times(count)}; no further retry")


def _first_plan(task: Task, attempt: Attempt, rules: Rules) -> Plan:
    """The previous plan, with the first place in the queue."""
    plan = replace(_unchanged_plan(task, _without_fault_reason(attempt)), first=True)
    if _within_first_booking(attempt):
        plan = replace(plan, rung="first", memory_mib=_first_booking_mib(attempt))
    elif plan.rung != "alone":
        plan = replace(plan, rung="first")
    if rules.recovery.mode == "alone" and isinstance(attempt.outcome, OutOfMemory):
        return replace(plan, rung="alone", reason=f"{plan.reason}, alone on a GPU (recovery.mode is alone)")
    return plan


def _without_fault_reason(attempt: Attempt) -> str:
    booked = show_mib(attempt.placement.booking.memory_mib)
    if _within_first_booking(attempt):
        first = show_mib(_first_booking_mib(attempt))
        grew = f"its memory grew again after its booking shrank from {first} to {booked}"
        return f"{grew}; next attempt with {first} booked, first in the queue"
    if isinstance(attempt.outcome, Disrupted):
        return "a service that the task depends on failed; next attempt first in the queue"
    return f"a neighbour exceeded its booking, this task did not ({booked}); next attempt first in the queue"


def _unchanged_plan(task: Task, reason: str) -> Plan:
    """The previous plan with this reason. The booking that recovery has found stays."""
    if task.plan is None:
        return Plan(rung="again", memory_mib=None, reason=reason)
    return replace(task.plan, reason=reason, first=False)


def _next_rung(
    wanted: int, attempt: Attempt, outcome: OutOfMemory, count: int, rules: Rules, gpus: tuple[Gpu, ...]
) -> Retry | GiveUp:
    largest = gpus[min(wanted, len(gpus)) - 1].memory_mib if gpus else 0  # the smallest GPU of the largest set
    had_mib = min((gpu.memory_mib for gpu in gpus if gpu.id in attempt.placement.gpus), default=largest)
    was_alone = attempt.placement.booking.alone
    if was_alone and largest <= had_mib:
        why = f"it was alone on a GPU with {show_mib(had_mib)}, and no GPU is larger"
        return GiveUp(replace(outcome, no_retry=why))
    again = count == 1 and outcome.asked_mib is not None and _peak_mib(attempt, outcome) is not None
    memory = _next_booking_mib(attempt, outcome, rules, largest, again)
    if was_alone:
        memory = max(memory, had_mib + 1)  # it had all memory of that GPU, so the next one must be larger
    wait_s = _back_off_s(rules, count)
    published = rules.recovery.mode == "alone"
    if published or count >= 3 or memory > largest or was_alone:
        reason = f"next attempt alone on a GPU ({_use(attempt, outcome)})"
        return Retry(Plan(rung="alone", memory_mib=min(memory, largest), first=published, reason=reason), wait_s)
    if again:
        reason = f"{_request(attempt, outcome)}; next attempt with {show_mib(memory)} booked"
        return Retry(Plan(rung="again", memory_mib=memory, reason=reason), wait_s)
    reason = f"booking raised from {show_mib(_first_booking_mib(attempt))} to {show_mib(memory)}"
    return Retry(Plan(rung="larger", memory_mib=memory, reason=reason), wait_s)


def _next_booking_mib(attempt: Attempt, outcome: OutOfMemory, rules: Rules, largest_mib: int, again: bool) -> int:
    """The next booking, never less than the last. `again`: the first retry of an attempt whose request is known."""
    booked = _first_booking_mib(attempt)
    # An attempt that the watchdog stopped requested nothing, but held its peak. An attempt that requested all of its
    # memory at once may have no observed peak.
    needed_mib = _needed_mib(attempt, outcome)
    least = needed_mib + rules.recovery.margin_mib if needed_mib else 0
    grown = int(booked * rules.recovery.growth)
    if not again:
        return max(least, grown, booked)
    limited = attempt.blame == "own" and _reached_limit(attempt, needed_mib)
    # `growth` is a guess: it must not keep the task from sharing a GPU on which its request fits.
    return max(least, booked, grown if limited and grown <= largest_mib else 0)


def _request(attempt: Attempt, outcome: OutOfMemory) -> str:
    peak = _peak_mib(attempt, outcome)
    if not peak:
        return f"requested {show_mib(outcome.asked_mib)} at once"
    return f"held {show_mib(peak)} and requested {show_mib(outcome.asked_mib)} more"


def _use(attempt: Attempt, outcome: OutOfMemory) -> str:
    peak = _peak_mib(attempt, outcome)
    return f"it held {show_mib(peak)} when memory ran out" if peak else "its memory was not observed"


def _back_off_s(rules: Rules, count: int) -> float:
    doubled: float = rules.recovery.backoff_s * 2.0 ** min(count - 1, 30)
    return min(rules.recovery.backoff_limit_s, doubled)
