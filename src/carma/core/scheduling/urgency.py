"""The line as a policy wants it: it may name some whose turn it is before the others (`Policy.urgent`).

Nobody goes before a task of a higher priority, and nobody is overtaken for ever: once the first in line has been passed
by `queue.overtakes` others, the order is that of age until it starts.
"""

from __future__ import annotations

from carma.core.model.values import TaskId
from carma.core.scheduling.fair_order import Turn
from carma.core.scheduling.policy import Waits
from carma.core.state import State


class Order:
    """`line` with the urgent ones, so many of them, before the others."""

    __slots__ = ("first", "line", "urgent")

    def __init__(self, line: list[Turn], urgent: int = 0, first: TaskId | None = None) -> None:
        self.line = line
        self.urgent = urgent
        self.first = first  # by age

    def overtaken_by(self, place: int) -> TaskId | None:
        """Whom the one at that place goes before."""
        return self.first if place < self.urgent and self.line[place][2] != self.first else None


def ordered(state: State, line: list[Turn], now: float) -> Order:
    urgent, rules = state.policy.urgent, state.rules.queue
    if urgent is None or len(line) < 2 or state.overtaken.get(line[0][2], 0) >= rules.overtakes:
        return Order(line)
    window = [turn for turn in line[: rules.backfill_depth] if turn[:2] == line[0][:2]]
    waiting = [_waits(state, turn[2]) for turn in window]
    if not any(waits.alone_s is not None for waits in waiting):
        return Order(line)
    if not urgent(waiting, 0.0, len(state.gpus)):  # the more is still to be done, the fewer are
        return Order(line)
    places = urgent(waiting, _running_s(state, now), len(state.gpus))
    if not places:
        return Order(line)
    first = [window[place] for place in places]
    taken = set(first)
    return Order([*first, *(turn for turn in line if turn not in taken)], len(first), line[0][2])


def out_of_turn(state: State, now: float) -> dict[TaskId, str]:
    """A phrase for those that go before their time, and for the one that they go before."""
    if state.policy.urgent is None or state.lanes is not None:
        return {}
    order = ordered(state, state.line, now)
    ahead = [turn[2] for turn in order.line[: order.urgent]]
    if not ahead or order.first is None or ahead[0] == order.first:
        return {}
    lets = f"policy {state.policy.name} lets"
    return {**dict.fromkeys(ahead, f"{lets} it go first"), order.first: f"{lets} task {ahead[0]} go first"}


def _waits(state: State, task_id: TaskId) -> Waits:
    task = state.tasks.get(task_id)
    if task is None:  # one that is only tried out
        return Waits(1, None)
    return Waits(task.spec.gpus, task.estimate.runtime_s if task.estimate is not None else None)


def _running_s(state: State, now: float) -> float:
    """GPU-seconds that the running tasks would still take alone."""
    total_s = 0.0
    assumed_s = state.rules.queue.assumed_runtime_s
    for key in state.active.values():
        track = state.tracks[key]
        left_s = assumed_s if track.alone_s is None else track.alone_s
        if track.began_at is not None:  # less what it has done by now; spelled out, as all that run are asked
            rate, since_s = track.rate, now - track.paced_at
            left_s -= track.done_s + (rate if rate < 1.0 else 1.0) * (since_s if since_s > 0.0 else 0.0)
        if left_s > 0.0:
            total_s += left_s * len(track.on)
    return total_s
