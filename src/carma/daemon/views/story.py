"""Events as sentences, one for each durable event: in the stream of events, and in the story of one task.

What only the owner may read (a program's output, the reason that a user gave) is included only if `whole` is set. The
end of an attempt that was stopped names the cause of the stop, not the signal that ended its process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from msgspec.structs import replace

from carma.core import checkpoint_request as saving
from carma.core.model import events as e
from carma.core.model import outcome as o
from carma.core.model.status import Ending, Preempting, effective_ending
from carma.core.model.task import Task
from carma.core.model.units import show_count, show_mib, show_s
from carma.core.model.values import Booking, Confinement, Gpu, GpuId, Placement, TaskId, tag_of
from carma.core.pausing import CARMA
from carma.wire.api_types import StoryLine
from carma.wire.sharing_text import guards_phrase, mechanism_phrase

Gpus = dict[GpuId, Gpu]
# In a reason that launch/exit_outcome.py gives, the rest is the program's output, or the path that did not answer.
_QUOTE = re.compile(r": | \(")
_FIXED_TEXTS: dict[type[e.Durable], str] = {
    e.RecoveryDue: "back in the queue",
    e.TaskHeld: "held",
    e.IdleOver: "no longer counts as an idle holder",
    e.TaskReleased: "released",
    e.TaskRestored: "restored from the archive",
    e.PreemptionMissed: "did not end within the grace period; it keeps running",
}


def story(events: Iterable[e.Durable], gpus: Gpus, *, whole: bool) -> list[StoryLine]:
    """The lines of one task's story. The memory of an attempt is stored often: consecutive observations are one
    line."""
    lines: list[StoryLine] = []
    seen: list[e.MemoryObserved] = []
    for event in _with_endings(events):
        if seen and not (isinstance(event, e.MemoryObserved) and event.key == seen[0].key):
            lines.append(_grown(seen, gpus, whole))
            seen = []
        if isinstance(event, e.MemoryObserved):
            seen.append(event)
        else:
            lines.append(StoryLine(at=event.at, event=tag_of(event), text=event_text(event, gpus, whole=whole)))
    return [*lines, _grown(seen, gpus, whole)] if seen else lines


def _with_endings(events: Iterable[e.Durable]) -> Iterable[e.Durable]:
    """The same events, with the recorded outcomes of attempts."""
    ending: Ending | None = None
    asked: Preempting | None = None
    for event in events:
        match event:
            case e.TaskPlaced() | e.PreemptionMissed():
                ending = asked = None
            case e.PreemptionRequested():
                asked = asked or saving.request_of(event)
            case e.StopRequested():
                ending = effective_ending(ending, event.ending)
            case e.AttemptEnded() if ending is not None:
                event = replace(event, outcome=ending)
                ending = None
            case e.AttemptEnded() if asked is not None:
                event = replace(event, outcome=saving.outcome_after(asked, event))
            case _:
                pass
        yield event


def _grown(seen: Sequence[e.MemoryObserved], gpus: Gpus, whole: bool) -> StoryLine:
    """Consecutive observations as one line: how the peak grew, and when it was reached."""
    first, most = seen[0], max(seen, key=lambda event: event.peak_mib)  # the first one with that peak
    begun, reached = show_mib(first.peak_mib), show_mib(most.peak_mib)
    if begun == reached:
        return StoryLine(at=first.at, event=tag_of(first), text=event_text(first, gpus, whole=whole))
    text = f"attempt {first.key.attempt}: grew from {begun} to {reached} in {show_s(max(1.0, most.at - first.at))}"
    return StoryLine(at=most.at, event=tag_of(most), text=text)


def as_on_record(event: e.Durable, tasks: Mapping[TaskId, Task]) -> e.Durable:
    """The event as it is recorded: the end of an attempt gets the outcome that the state has for it."""
    task = tasks.get(event.key.task) if isinstance(event, e.AttemptEnded) else None
    if not isinstance(event, e.AttemptEnded) or task is None:
        return event
    found = next((one.outcome for one in task.attempts if one.number == event.key.attempt), None)
    return event if found is None else replace(event, outcome=found)


def sentence(event: e.Durable, gpus: Gpus) -> str:
    """One line that stands alone and that every user may read."""
    task = e.task_of(event)
    text = event_text(event, gpus, whole=False)
    return text if task is None else f"task {task}: {text}"


def event_text(event: e.Durable, gpus: Gpus, *, whole: bool) -> str:
    if isinstance(event, e.GpuEvent):
        return _of_gpus(event, gpus)
    if isinstance(event, e.AttemptEvent):
        return f"attempt {event.key.attempt}: {_of_attempt(event, gpus, whole)}"
    return _of_task(event, whole)


def _of_gpus(event: e.GpuEvent, gpus: Gpus) -> str:
    match event:
        case e.GpusFound(gpus=found):
            return f"{show_count(len(found), 'GPU')} found"
        case e.GpuDrained(gpu=gpu, reason=reason):
            return f"{_place(gpu, gpus)} drained" + (f": {reason}" if reason else "")
        case e.GpuResumed(gpu=gpu):
            return f"{_place(gpu, gpus)} takes new tasks again"
        case e.UseNoted(attempts=attempts):
            return f"recorded the usage of the GPUs and of {show_count(len(attempts), 'running task')}"
        case _:
            assert_never(event)


def _of_attempt(event: e.AttemptEvent, gpus: Gpus, whole: bool) -> str:
    match event:
        case e.TaskPlaced(placement=placement, why=why):
            return _placed(placement, gpus) + (_because(why) if why and whole else "")
        case e.AttemptStarted(pid=pid, confinement=confinement):
            return f"started as process {pid}" + ("" if confinement is None else _confined(confinement, whole))
        case e.MemoryObserved(peak_mib=peak_mib):
            return f"holds {show_mib(peak_mib)}"
        case e.BookingShrunk(from_mib=from_mib, to_mib=to_mib, peak_mib=peak_mib):
            return f"booking {show_mib(from_mib)} → {show_mib(to_mib)}: its memory had settled at {show_mib(peak_mib)}"
        case e.AttemptEnded(outcome=outcome, peak_mib=peak_mib, over_booking=over):
            parts = [_ended(outcome, whole)]
            if peak_mib is not None:
                parts.append(f"peak memory {show_mib(peak_mib)}")
            if over:
                parts.append("above its booking at that moment: task " + ", ".join(str(key.task) for key in over))
            return "; ".join(parts)
        case _:
            assert_never(event)


def _of_task(event: e.TaskEvent, whole: bool) -> str:
    match event:
        case e.TaskSubmitted(owner=owner, held=held):
            return f"submitted by {owner.name}" + (", held" if held else "")
        case e.TaskEstimated():
            return _estimated(event, whole)
        case e.RecoveryPlanned(plan=plan, until=until, at=at):
            return f"{plan.reason}; back in the queue in {show_s(until - at)}"
        case e.TaskFinished(outcome=outcome):
            return f"finished: {_ended(outcome, whole)}"
        case e.StopRequested(ending=ending, signal=signal):
            return f"{_stopped(ending)} with signal {signal}: {_ended(ending, whole)}"
        case e.TaskWarned(signal=signal):
            return f"warned with signal {signal}: its time limit is near"
        case e.PreemptionRequested():
            return _asked_to_save(event, whole)
        case e.TaskPaused():
            return f"paused by {event.by}{_for_owner(event, whole)}" + _at_most(event.at, event.until)
        case e.TaskUnpaused():
            return f"continued by {event.by}{_for_owner(event, whole)}"
        case e.TaskRetried(fresh=fresh):
            return "queued again on request" + ("; the booking that recovery had found is discarded" if fresh else "")
        case e.TaskChanged():
            return _changed(event, whole)
        case e.IdleNoted(since=since, action=action):
            then = {"show": "", "pack": "; others are placed as if it used none", "end": "; it is to be ended"}[action]
            return f"has held GPU memory for {show_s(event.at - since)} without using the SMs{then}"
        case e.NoticeDue():
            return "has waited for long; a notice is due"
        case e.NoticeSent(kind=kind, sent_to=sent_to, problems=problems):
            failed = "; ".join(problems) if whole else show_count(len(problems), "target") + " failed"
            parts = ([f"sent by {' and '.join(sent_to)}"] if sent_to else []) + ([failed] if problems else [])
            return f"notice ({kind}): " + "; ".join(parts or ["there was no target"])
        case e.RecoveryDue() | e.IdleOver() | e.TaskHeld() | e.TaskReleased() | e.TaskRestored() | e.PreemptionMissed():
            return _FIXED_TEXTS[type(event)]
        case _:
            assert_never(event)


def _asked_to_save(event: e.PreemptionRequested, whole: bool) -> str:
    reason = f" ({event.reason})" if event.reason and (whole or event.room_for is not None) else ""
    held = "; held afterwards" if event.hold else ""
    what = f"signal {event.signal}, to save a checkpoint and end within {show_s(event.grace_s)}"
    return f"preemption requested by {event.by}{reason}: {what}{held}"


def _for_owner(event: e.TaskPaused | e.TaskUnpaused, whole: bool) -> str:
    """The reason: one that a user wrote is for the owner only."""
    return f": {event.reason}" if event.reason and (whole or event.by == CARMA) else ""


def _at_most(at: float, until: float | None) -> str:
    return "" if until is None else f"; for at most {show_s(until - at)}"


def _estimated(event: e.TaskEstimated, whole: bool) -> str:
    if event.estimate is not None:
        return f"estimated at up to {show_mib(event.estimate.upper_mib)} on each GPU ({event.estimate.source})"
    if not whole or not event.refusals:
        return "its memory is unknown"
    reasons = "; ".join(f"{refusal.source}: {refusal.reason}" for refusal in event.refusals)
    return f"its memory is unknown ({reasons})"


def _changed(event: e.TaskChanged, whole: bool) -> str:
    changes: list[str] = []
    if event.name is not None:
        changes.append(f"name {event.name}")
    if event.priority is not None:
        changes.append(f"priority {event.priority}")
    if event.gpu_memory_mib is not None:
        changes.append(f"GPU memory {show_mib(event.gpu_memory_mib)}")
    if event.time_limit_s is not None:
        changes.append(f"time limit {show_s(event.time_limit_s)}")
    if event.comment is not None:
        changes.append(f"comment {event.comment!r}" if whole else "comment")
    return "changed: " + ", ".join(changes)


def _confined(confinement: Confinement, whole: bool) -> str:
    note = f" ({confinement.note})" if confinement.note and whole else ""
    return f" {mechanism_phrase(confinement.mechanism)}{note}, {guards_phrase(confinement.guards)}"


def _stopped(ending: Ending) -> str:
    match ending:
        case o.OutOfMemory():
            return "stopped by the watchdog, to protect the memory that others have booked,"
        case o.Disrupted():
            return "stopped, because its MPS server or GPU failed,"
        case o.Cancelled() | o.TimedOut():
            return "stop requested"
        case _:
            assert_never(ending)


def _ended(outcome: o.Outcome, whole: bool) -> str:
    return o.describe(outcome if whole else without_words(outcome))


def without_words(outcome: o.Outcome) -> o.Outcome:
    """The outcome without the program's last output, which may show what it does, and without the reason that a user
    gave."""
    match outcome:
        case o.Failed() | o.OutOfMemory():
            return replace(outcome, message="")
        case o.Cancelled() | o.Preempted():
            return replace(outcome, reason="")
        case o.Disrupted(reason=reason) | o.LaunchFailed(reason=reason):
            return replace(outcome, reason=_QUOTE.split(reason, maxsplit=1)[0])
        case _:
            return outcome


def _placed(placement: Placement, gpus: Gpus) -> str:
    booking = placement.booking
    return f"placed on {_names(placement.gpus, gpus)}, {booked(booking)}"


def booked(booking: Booking) -> str:
    """`12.4 GiB booked (history), alone`."""
    source = "memory unknown" if booking.source == "unknown" else booking.source
    return f"{show_mib(booking.memory_mib)} booked ({source})" + (", alone" if booking.alone else "")


def _because(why: str) -> str:
    """The sentence of the decision, without the GPUs, which the line already contains."""
    gpus, colon, reason = why.partition(": ")
    return f"; {reason if colon and gpus.startswith('placed on GPU') else why}"


def _names(ids: Sequence[GpuId], gpus: Gpus) -> str:
    return "GPU " + ", ".join(str(gpus[gpu].index) if gpu in gpus else gpu for gpu in ids)


def _place(gpu: GpuId | None, gpus: Gpus) -> str:
    return "the server" if gpu is None else _names((gpu,), gpus)
