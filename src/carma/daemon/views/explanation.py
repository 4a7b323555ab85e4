"""Decisions as the API shows them: of a waiting task, of a running one, and of one that has ended."""

from __future__ import annotations

from collections.abc import Sequence

from carma.core.model.decision import Refusal, Verdict
from carma.core.model.status import Finished, Running, Starting
from carma.core.model.task import Attempt, Task
from carma.core.model.values import GpuId
from carma.core.scheduling.eligibility import ask_of
from carma.core.scheduling.explanation import explain
from carma.core.state import State
from carma.core.telemetry.inferred_activity import source_of
from carma.daemon.views.task_views import ViewContext, task_views
from carma.wire import api_types as t

_NOT_CHOSEN = Refusal("NotChosen", "another GPU was chosen")
_NEVER_PLACED = Refusal("Finished", "the task ended before a GPU was chosen")


def explain_entries(verdicts: Sequence[Verdict], state: State) -> tuple[t.ExplainEntry, ...]:
    return tuple(_entry(verdict, state) for verdict in verdicts)


def _entry(verdict: Verdict, state: State) -> t.ExplainEntry:
    refusal, gpu, live = verdict.refusal, state.gpus.get(verdict.gpu), state.live.get(verdict.gpu)
    return t.ExplainEntry(
        gpu=verdict.gpu,
        index=gpu.index if gpu is not None else -1,
        accepted=refusal is None,
        reason=refusal.sentence if refusal is not None else "chosen" if verdict.chosen else "could take it",
        code=refusal.code if refusal is not None else "",
        score=verdict.parts[0].value if verdict.parts else None,
        parts={part.name: part.value for part in verdict.parts},
        chosen=verdict.chosen,
        activity_source="none" if gpu is None else source_of(gpu, live.window.newest if live is not None else None),
    )


def explanation(task: Task, context: ViewContext) -> t.Explanation:
    """Why a task waits or runs where it does; for a finished task, how it ended and its last attempt's decision."""
    state, status = context.state, task.status
    view = next(task_views([task], context))
    shown = task.attempts[-1] if task.attempts and isinstance(status, Starting | Running | Finished) else None
    if isinstance(status, Finished):  # the stored decision, because the GPUs have changed since
        reason, decided = view.reason, shown.decision if shown is not None else ""
        verdicts = _verdicts(shown, state)
    else:
        decision = explain(state, task.id, context.now)
        reason, decided = decision.reason or view.reason, decision.reason if shown is not None else ""
        verdicts = decision.verdicts
        if task.paused is not None:
            reason = view.reason
    needs = shown.placement.booking if shown is not None else ask_of(task, state)
    return t.Explanation(
        task=task.id,
        policy=state.policy.name,
        state=view.state,
        reason=reason,
        entries=explain_entries(verdicts, state),
        needs_mib=needs.memory_mib,
        needs_source=needs.source,
        reserved_start_at=view.reserved_start_at,
        attempt=shown.number if shown is not None else None,
        decision=decided,
    )


def _verdicts(attempt: Attempt | None, state: State) -> tuple[Verdict, ...]:
    """One for every GPU. A bounded number of them is stored with the attempt."""
    stored: dict[GpuId, Verdict] = {}
    if attempt is not None:
        stored = {gpu: Verdict(gpu, chosen=True) for gpu in attempt.placement.gpus}
        stored |= {verdict.gpu: verdict for verdict in attempt.verdicts}
    other = _NOT_CHOSEN if attempt is not None else _NEVER_PLACED
    removed = [gpu for gpu in stored if gpu not in state.gpus]
    present = sorted(state.gpus, key=lambda gpu: state.gpus[gpu].index)
    return tuple(stored.get(gpu) or Verdict(gpu, other) for gpu in (*removed, *present))
