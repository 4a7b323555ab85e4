"""Decisions as the API shows them: of a waiting task, of a running one, and of one that has ended."""

from __future__ import annotations

from carma.core.model.status import Finished, Running, Starting
from carma.core.model.task import Attempt, Task
from carma.core.model.values import Gpu, GpuId
from carma.core.scheduling.decision import Decision, Refusal, Verdict
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.explanation import explain
from carma.core.state import State
from carma.daemon.views.task_views import ViewContext, task_views
from carma.wire import api_types as t

_NOT_CHOSEN = Refusal("NotChosen", "another GPU was chosen")
_NEVER_PLACED = Refusal("Finished", "the task ended before a GPU was chosen")


def explain_entries(decision: Decision, state: State) -> tuple[t.ExplainEntry, ...]:
    return tuple(_entry(verdict, state.gpus.get(verdict.gpu)) for verdict in decision.verdicts)


def _entry(verdict: Verdict, gpu: Gpu | None) -> t.ExplainEntry:
    refusal = verdict.refusal
    return t.ExplainEntry(
        gpu=verdict.gpu,
        index=gpu.index if gpu is not None else -1,
        accepted=refusal is None,
        reason=refusal.sentence if refusal is not None else "chosen" if verdict.chosen else "could take it",
        code=refusal.code if refusal is not None else "",
        score=verdict.parts[0].value if verdict.parts else None,
        parts={part.name: part.value for part in verdict.parts},
        chosen=verdict.chosen,
    )


def explanation(task: Task, context: ViewContext) -> t.Explanation:
    """Why a task waits or runs where it does; for a finished task, how it ended and its last attempt's decision."""
    state = context.state
    view = task_views([task], context)[0]
    if isinstance(task.status, Finished):
        return _of_finished(task, view, state)
    decision = explain(state, task.id, context.now)
    ask = ask_of(task, state)
    placed = task.status.placement.booking if isinstance(task.status, Starting | Running) else None
    return t.Explanation(
        task=task.id,
        policy=state.policy.name,
        state=view.state,
        reason=decision.reason or view.reason,
        entries=explain_entries(decision, state),
        needs_mib=placed.memory_mib if placed is not None else ask.memory_mib,
        needs_source=placed.source if placed is not None else ask.source,
        reserved_start_at=view.reserved_start_at,
        attempt=task.key.attempt if placed is not None else None,
        decision=decision.reason if placed is not None else "",
    )


def _of_finished(task: Task, view: t.TaskView, state: State) -> t.Explanation:
    """The stored decision, because the GPUs have changed since. The task may have left memory for the archive."""
    ask = ask_of(task, state)
    last = task.attempts[-1] if task.attempts else None
    return t.Explanation(
        task=task.id,
        policy=state.policy.name,
        state=view.state,
        reason=view.reason,
        entries=tuple(_entry(verdict, state.gpus.get(verdict.gpu)) for verdict in _verdicts(last, state)),
        needs_mib=last.placement.booking.memory_mib if last is not None else ask.memory_mib,
        needs_source=last.placement.booking.source if last is not None else ask.source,
        attempt=last.number if last is not None else None,
        decision=last.decision if last is not None else "",
    )


def _verdicts(attempt: Attempt | None, state: State) -> tuple[Verdict, ...]:
    """One for every GPU. A bounded number of them is stored with the attempt."""
    stored: dict[GpuId, Verdict] = {}
    if attempt is not None:
        stored = {gpu: Verdict(gpu, chosen=True) for gpu in attempt.placement.gpus}
        stored |= {verdict.gpu: verdict for verdict in attempt.verdicts}
    other = _NOT_CHOSEN if attempt is not None else _NEVER_PLACED
    gone = [gpu for gpu in stored if gpu not in state.gpus]
    present = sorted(state.gpus, key=lambda gpu: state.gpus[gpu].index)
    return tuple(stored.get(gpu) or Verdict(gpu, other) for gpu in (*gone, *present))
