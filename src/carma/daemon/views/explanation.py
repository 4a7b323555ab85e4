"""A decision as the API tells it: of a task that waits, of one that runs, and looking back at one that has ended."""

from __future__ import annotations

from carma.core.model.status import Finished, Running, Starting
from carma.core.model.task import Attempt, Task
from carma.core.model.values import Gpu, GpuId
from carma.core.scheduling.decision import Decision, Refusal, Verdict
from carma.core.scheduling.queue_order import ask_of, explain
from carma.core.state import State
from carma.daemon.views.task_views import Lens, task_views
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


def explanation(task: Task, lens: Lens) -> t.Explanation:
    """Why it is where it is; of a finished task how it ended, and the decision of its last attempt."""
    state = lens.state
    view = task_views([task], lens)[0]
    if isinstance(task.status, Finished):
        return _looking_back(task, view, state)
    decision = explain(state, task.id, lens.now)
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


def _looking_back(task: Task, view: t.TaskView, state: State) -> t.Explanation:
    """The GPUs have moved on, so what was decided then is told. Also of a task that has left memory for the archive."""
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
    """Every GPU: as it was kept with the attempt, which holds a bounded number of them."""
    kept: dict[GpuId, Verdict] = {}
    if attempt is not None:
        kept = {gpu: Verdict(gpu, chosen=True) for gpu in attempt.placement.gpus}
        kept |= {verdict.gpu: verdict for verdict in attempt.verdicts}
    other = _NOT_CHOSEN if attempt is not None else _NEVER_PLACED
    gone = [gpu for gpu in kept if gpu not in state.gpus]
    here = sorted(state.gpus, key=lambda gpu: state.gpus[gpu].index)
    return tuple(kept.get(gpu) or Verdict(gpu, other) for gpu in (*gone, *here))
