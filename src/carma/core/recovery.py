"""What becomes of a task whose attempt ended: finished, or another attempt by the ladder.

Published measurements put the cost of an OOM at 23 s of lost work and 2,330 s of waiting for an empty GPU: the rule is
the cost. So the ladder first retries where (peak + asked bytes + margin) fits, then with a larger booking, then alone,
then gives up with the story. One that a limit stopped has told only the block that it wanted next: its first retry
books `growth` times as much at least, and is held to what is free where it comes (placement.py). An innocent victim
comes back first, with its booking as it was; so does a task whose MPS server died under it. A task that must not be run
twice says so with `max_oom_retries` 0, and that covers these too.

`recovery.mode = "alone"` is the published rule, to compare with: after an OOM, whoever was to blame, a task comes back
before all others and has its GPUs to itself.
"""

from __future__ import annotations

from typing import Literal

from carma.core.model.outcome import Disrupted, Outcome, OutOfMemory, Preempted, describe
from carma.core.model.settings import Rules
from carma.core.model.status import Ended
from carma.core.model.task import Attempt, Plan, Task
from carma.core.model.units import show_mib
from carma.core.model.values import Gpu, Record

Blame = Literal["own", "neighbour", "unknown"]
CONTEXT_MIB = 1024  # at most so much a process takes outside its framework's allocator (760 on an H200)


class Retry(Record, frozen=True):
    plan: Plan
    wait_s: float


class GiveUp(Record, frozen=True):
    outcome: Outcome


def blame(attempt: Attempt, outcome: OutOfMemory, neighbours_over: bool) -> Blame:
    """A process over its booking is the one that pays, also where its limit lies higher: it needs a larger booking. A
    neighbour over its own is to blame otherwise."""
    wanted = (_peak_mib(attempt, outcome) or 0) + (outcome.asked_mib or 0)
    if wanted > attempt.placement.booking.memory_mib:
        return "own"
    if neighbours_over:
        return "neighbour"
    return "own" if _at_its_limit(attempt, wanted) else "unknown"


def _at_its_limit(attempt: Attempt, wanted_mib: int) -> bool:
    """Whether something harder than the watchdog held it. A framework's limit holds its allocator alone, and what a
    message says was held leaves out the context: a limit is reached below its figure by that much."""
    guards = attempt.confinement.guards if attempt.confinement is not None else ()
    return any(guard.rung != "watchdog" and wanted_mib > guard.limit_mib - CONTEXT_MIB for guard in guards)


def _peak_mib(attempt: Attempt, outcome: OutOfMemory) -> int | None:
    """The most that it held, by the framework's message or by the driver's figures."""
    known = [peak for peak in (outcome.peak_mib, attempt.observed_mib) if peak is not None]
    return max(known) if known else None


def not_enough_mib(attempt: Attempt) -> int | None:
    """Of one that ran out of GPU memory: so much it needs at least, and more. None where nothing was seen of it."""
    outcome = attempt.outcome
    if not isinstance(outcome, OutOfMemory) or outcome.where != "gpu":
        return None
    wanted = (_peak_mib(attempt, outcome) or 0) + (outcome.asked_mib or 0)
    if not wanted and attempt.blame == "own":
        wanted = attempt.placement.booking.cap_mib or 0  # all that is known is that this stopped it
    return wanted or None


def next_step(task: Task, rules: Rules, gpus: tuple[Gpu, ...]) -> Retry | GiveUp:
    """Of a task whose newest attempt has ended; `gpus` are those that take tasks, largest first.

    Pure, and bounded: every path to Retry counts an attempt, but for one that left because it was asked to.
    """
    assert isinstance(task.status, Ended)
    attempt, outcome = task.attempts[-1], task.status.outcome
    if isinstance(outcome, Preempted):
        # Everyone reads a plan's reason. The reason that its owner gave, or the program's words, are not for everyone.
        return Retry(_back_in_line(task, describe(Preempted(outcome.by, code=outcome.code))), 0.0)
    limit = rules.recovery.retries if task.spec.max_oom_retries is None else task.spec.max_oom_retries
    innocent = [a for a in _counted(task) if _innocent(a)]
    guilty = [a for a in _counted(task) if not _innocent(a)]
    if _innocent(attempt):
        if limit == 0 or len(innocent) > rules.recovery.innocent_retries:
            return GiveUp(_victim(outcome, len(innocent)))
        return Retry(_first(task, attempt, rules), _back_off_s(rules, len(innocent)))
    if not isinstance(outcome, OutOfMemory) or outcome.where != "gpu":
        return GiveUp(outcome)
    if len(guilty) > limit:
        allowed = f"{limit} {'retry is' if limit == 1 else 'retries are'} allowed"
        return GiveUp(_told(outcome, f"ran out of memory {_times(len(guilty))}; {allowed}"))
    return _climb(task.spec.gpus, attempt, outcome, len(guilty), rules, gpus)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _innocent(attempt: Attempt) -> bool:
    """It ended through no fault of its own."""
    return attempt.blame == "neighbour" or isinstance(attempt.outcome, Disrupted) or _squeezed(attempt)


def _squeezed(attempt: Attempt) -> bool:
    """It kept to what was booked for it at first; only its booking had shrunk meanwhile (shrink.py)."""
    outcome, first_mib = attempt.outcome, attempt.placement.booking.placed_mib
    if first_mib is None or not isinstance(outcome, OutOfMemory) or outcome.where != "gpu" or attempt.blame != "own":
        return False
    return (_peak_mib(attempt, outcome) or 0) + (outcome.asked_mib or 0) <= first_mib


def _booked_mib(attempt: Attempt) -> int:
    """What it was launched with."""
    booking = attempt.placement.booking
    return booking.memory_mib if booking.placed_mib is None else booking.placed_mib


def _counted(task: Task) -> list[Attempt]:
    """Attempts that ended in a GPU OOM, or were disrupted, since the user last asked for a retry."""
    return [
        attempt
        for attempt in task.attempts
        if attempt.number > task.counted_from
        and (_innocent(attempt) or (isinstance(attempt.outcome, OutOfMemory) and attempt.outcome.where == "gpu"))
    ]


def _victim(outcome: Outcome, count: int) -> Outcome:
    """The end of a task that was innocent once too often."""
    if isinstance(outcome, Disrupted):
        return Disrupted(f"{outcome.reason}; ended through no fault of its own {_times(count)}; not tried again")
    assert isinstance(outcome, OutOfMemory)
    return _told(outcome, f"a neighbour took the memory {_times(count)}; not tried again")


def _first(task: Task, attempt: Attempt, rules: Rules) -> Plan:
    """As before, and before the others: what recovery had learnt stays."""
    plan = _as_before(task, attempt)
    if rules.recovery.mode == "alone" and isinstance(attempt.outcome, OutOfMemory):
        reason = f"{plan.reason}, alone on a GPU (recovery.mode is alone)"
        return Plan(rung="alone", memory_mib=plan.memory_mib, first=True, reason=reason)
    return plan


def _as_before(task: Task, attempt: Attempt) -> Plan:
    held = show_mib(attempt.placement.booking.memory_mib)
    if _squeezed(attempt):
        whole = show_mib(_booked_mib(attempt))
        reason = f"it grew again after its booking had shrunk from {whole} to {held}; it gets all of it, and goes first"
        return Plan(rung="first", memory_mib=_booked_mib(attempt), first=True, reason=reason)
    if isinstance(attempt.outcome, Disrupted):
        reason = "what it ran under failed; not this task's doing, so it goes first"
    else:
        reason = f"a neighbour held more than its booking; this task kept to its {held} and goes first"
    plan = task.plan
    alone = plan is not None and plan.rung == "alone"
    memory_mib = plan.memory_mib if plan is not None else None
    return Plan(rung="alone" if alone else "first", memory_mib=memory_mib, first=True, reason=reason)


def _back_in_line(task: Task, reason: str) -> Plan:
    """At its old place in the line, with what recovery had learnt."""
    if task.plan is None:
        return Plan(rung="again", memory_mib=None, reason=reason)
    return Plan(rung=task.plan.rung, memory_mib=task.plan.memory_mib, reason=reason)


def _climb(
    wanted: int, attempt: Attempt, outcome: OutOfMemory, count: int, rules: Rules, gpus: tuple[Gpu, ...]
) -> Retry | GiveUp:
    largest = gpus[min(wanted, len(gpus)) - 1].memory_mib if gpus else 0  # the smallest of the best gang
    had_mib = min((gpu.memory_mib for gpu in gpus if gpu.id in attempt.placement.gpus), default=largest)
    if attempt.placement.booking.alone and largest <= had_mib:
        return GiveUp(_told(outcome, f"it had a GPU of {show_mib(had_mib)} alone, and there is none larger"))
    booked = _booked_mib(attempt)
    again = count == 1 and outcome.asked_mib is not None and _peak_mib(attempt, outcome) is not None
    memory = _needed_mib(attempt, outcome, rules, largest, again)
    if attempt.placement.booking.alone:
        memory = max(memory, had_mib + 1)  # it had all of that card, so the next one must be larger
    wait_s = _back_off_s(rules, count)
    at_once = rules.recovery.mode == "alone"
    if at_once or count >= 3 or memory > largest or attempt.placement.booking.alone:
        reason = f"next attempt alone on a GPU ({_held(attempt, outcome)} when memory ran out)"
        return Retry(Plan(rung="alone", memory_mib=min(memory, largest), first=at_once, reason=reason), wait_s)
    if again:
        reason = f"{_wanted(attempt, outcome)}; next attempt where {show_mib(memory)} fit"
        return Retry(Plan(rung="again", memory_mib=memory, reason=reason), wait_s)
    reason = f"booking raised from {show_mib(booked)} to {show_mib(memory)}"
    return Retry(Plan(rung="larger", memory_mib=memory, reason=reason), wait_s)


def _needed_mib(attempt: Attempt, outcome: OutOfMemory, rules: Rules, largest_mib: int, again: bool) -> int:
    """The next booking, never less than the last. `again`: the first retry of one that told what it needed."""
    booked = _booked_mib(attempt)
    # What it held and asked for; one that the watchdog stopped asked for nothing, but holds at least what it held, and
    # of one that asked for all at once nothing may have been seen.
    wanted = (_peak_mib(attempt, outcome) or 0) + (outcome.asked_mib or 0)
    least = wanted + rules.recovery.margin_mib if wanted else 0
    grown = int(booked * rules.recovery.growth)
    if not again:
        return max(least, grown, booked)
    held_back = attempt.blame == "own" and _at_its_limit(attempt, wanted)
    # Growth is a guess: it must not keep the task from sharing a card on which what it asked for fits.
    return max(least, booked, grown if held_back and grown <= largest_mib else 0)


def _wanted(attempt: Attempt, outcome: OutOfMemory) -> str:
    seen = _peak_mib(attempt, outcome)
    if not seen:
        return f"asked for {show_mib(outcome.asked_mib)} at once"
    return f"held {show_mib(seen)} and asked for {show_mib(outcome.asked_mib)} more"


def _held(attempt: Attempt, outcome: OutOfMemory) -> str:
    seen = _peak_mib(attempt, outcome)
    return f"it held {show_mib(seen)}" if seen else "nobody saw what it held"


def _told(outcome: OutOfMemory, story: str) -> OutOfMemory:
    message = f"{outcome.message}; {story}" if outcome.message else story
    return OutOfMemory(outcome.where, outcome.code, outcome.asked_mib, outcome.peak_mib, message)


def _back_off_s(rules: Rules, count: int) -> float:
    doubled: float = rules.recovery.backoff_s * 2.0 ** min(count - 1, 30)
    return min(rules.recovery.backoff_limit_s, doubled)
