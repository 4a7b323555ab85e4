"""What a server did over a time span, from its tasks and from what was recorded of its GPUs. Reads and adds up only.

It contains users, times, outcomes and energy, which `history` shows to everyone, and nothing of what a task runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

from carma.core.model.status import Finished
from carma.core.model.task import Attempt, Task
from carma.core.model.units import show_count, show_s
from carma.core.model.values import Gpu, GpuId, GpuUsage, tag_of
from carma.core.state import State
from carma.core.telemetry.attribution import measured_idle_w
from carma.core.telemetry.usage import add_up, not_noted
from carma.daemon.views.task_views import mirrored
from carma.wire.report_types import GpuWork, Report, UserWork, Work

HOUR_S = 3600.0
DEFAULT_SPAN_S = 24 * HOUR_S
_UNWATCHED_SHARE = 0.02  # a smaller unwatched part of the span is the time between two samples


def full_hour(at: float) -> float:
    """The beginning of the hour: GPUs are recorded by the hour, and tasks must cover the same time."""
    return at // HOUR_S * HOUR_S


@dataclass
class _Sum:
    """The fields of Work, while they are added up."""

    ended: Counter[str] = field(default_factory=Counter)
    running: int = 0
    started: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    attempts: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0
    energy_j: float = 0.0
    unmeasured: int = 0

    def work(self) -> Work:
        return mirrored(Work, self, ended=dict(sorted(self.ended.items(), key=lambda entry: (-entry[1], entry[0]))))


class Totals:
    """What tasks did within a span, added up: of all users, and by user."""

    def __init__(self, since: float, until: float) -> None:
        self.since = since
        self.until = until
        self.total = _Sum()
        self.users: dict[int, tuple[str, _Sum]] = {}

    def add(self, tasks: Iterable[Task], state: State | None = None) -> None:
        """Tasks in memory need the state. Archived tasks do not, and may be added in another thread."""
        for task in tasks:
            if not task.attempts and not isinstance(task.status, Finished):
                continue
            _, own = self.users.setdefault(task.owner.uid, (task.owner.name, _Sum()))
            for into in (self.total, own):
                self._add(into, task, state)

    def _add(self, into: _Sum, task: Task, state: State | None) -> None:
        since, until, status = self.since, self.until, task.status
        if isinstance(status, Finished) and since <= status.at <= until:
            into.ended[tag_of(status.outcome)] += 1
        into.running += state is not None and task.id in state.active
        first = task.attempts[0].started_at if task.attempts else None
        if first is not None and since <= first <= until:
            waited_s = max(0.0, first - task.submitted_at)
            into.started += 1
            into.waited_s += waited_s
            into.longest_wait_s = max(into.longest_wait_s, waited_s)
        for attempt in task.attempts:
            self._add_attempt(into, task, attempt, state)

    def _add_attempt(self, into: _Sum, task: Task, attempt: Attempt, state: State | None) -> None:
        """An attempt that extends beyond the span counts with its part; its energy as if spent evenly."""
        since, until = self.since, self.until
        running = state is not None and state.active.get(task.id) == task.key and attempt.number == task.key.attempt
        ended_at = until if running else attempt.ended_at
        if attempt.started_at is None or ended_at is None or ended_at < since or attempt.started_at > until:
            return
        whole_s = max(0.0, ended_at - attempt.started_at)
        within_s = max(0.0, min(ended_at, until) - max(attempt.started_at, since))
        into.attempts += 1
        into.run_s += within_s
        into.gpu_s += within_s * len(attempt.placement.gpus)
        track = state.tracks.get(task.key) if running and state is not None else None
        energy_j = attempt.own_energy_j if track is None or track.energy_j is None else track.energy_j
        if energy_j is None:
            into.unmeasured += 1
        else:
            into.energy_j += energy_j * (within_s / whole_s if whole_s else 1.0)


def report(totals: Totals, usage: Sequence[GpuUsage], state: State) -> Report:
    """`totals` are of all tasks that may have run within the span, in memory or archived."""
    since, until, unmeasured = totals.since, totals.until, totals.total.unmeasured
    not_stored_yet = [row for row in not_noted(state) if since <= row.hour * HOUR_S <= until]
    rows = [*usage, *not_stored_yet]
    gpus = _gpus(rows, state)
    most_gpu_time_first = sorted(totals.users.items(), key=lambda entry: (-entry[1][1].gpu_s, entry[0]))
    return Report(
        since=since,
        until=until,
        total=totals.total.work(),
        users=tuple(
            UserWork(user=name, uid=uid, work=own.work()) for uid, (name, own) in most_gpu_time_first if own != _Sum()
        ),
        gpus=gpus,
        notes=(
            *_unwatched_notes(gpus, until - since),
            *_assumed_idle_notes(rows, gpus, state),
            *([f"the energy of {show_count(unmeasured, 'attempt')} is unknown and counts as 0"] if unmeasured else []),
        ),
    )


def _gpus(usage: Sequence[GpuUsage], state: State) -> tuple[GpuWork, ...]:
    """The present GPUs in their order, then former ones."""
    rows: dict[GpuId, list[GpuUsage]] = {gpu.id: [] for gpu in sorted(state.gpus.values(), key=lambda gpu: gpu.index)}
    for row in usage:
        rows.setdefault(row.gpu, []).append(row)
    return tuple(_gpu(gpu, found, state.gpus.get(gpu)) for gpu, found in rows.items())


def _gpu(gpu: GpuId, rows: Sequence[GpuUsage], known: Gpu | None) -> GpuWork:
    total = reduce(add_up, rows, GpuUsage(gpu=gpu, hour=0))
    watched_s, energy_j = total.watched_s, total.energy_j
    capabilities = known.capabilities if known is not None else None
    has_sm = watched_s > 0 and (capabilities is None or "sm_active" in capabilities.metrics)
    has_energy = watched_s > 0 and (capabilities is None or capabilities.energy)
    return mirrored(
        GpuWork,
        total,
        index=known.index if known is not None else None,
        name=known.name if known is not None else "",
        sm_active=total.sm_s / watched_s if has_sm else None,
        energy_j=energy_j if has_energy else None,
        power_w=energy_j / watched_s if has_energy else None,
    )


def _unwatched_notes(gpus: Sequence[GpuWork], span_s: float) -> list[str]:
    """The daemon was down, or the GPU did not answer. GPUs with the same time share a note."""
    missed: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu.watched_s < span_s * (1 - _UNWATCHED_SHARE):
            missed.setdefault(show_s(gpu.watched_s), []).append(_name(gpu))
    return [
        f"GPU {', '.join(names)}: observed for {watched} of {show_s(span_s)}; nothing is known of the rest"
        for watched, names in missed.items()
    ]


def _assumed_idle_notes(rows: Sequence[GpuUsage], gpus: Sequence[GpuWork], state: State) -> list[str]:
    """GPUs that were in use before they had been seen empty (attribution.py says what is assumed then)."""
    assumed_s = dict.fromkeys((gpu.gpu for gpu in gpus), 0.0)
    for row in rows:
        assumed_s[row.gpu] += row.guessed_s
    notes: list[str] = []
    for gpu in gpus:
        if assumed_s[gpu.gpu] <= 0:
            continue
        if measured_idle_w(state, GpuId(gpu.gpu)) is None:
            what = f"GPU {_name(gpu)} was never seen without tasks: its idle power"
        else:
            what = f"for {show_s(assumed_s[gpu.gpu])}, GPU {_name(gpu)} had not been seen without tasks: its idle power"
        notes.append(f"{what} is assumed, and so is the energy of tasks on it")
    return notes


def _name(gpu: GpuWork) -> str:
    return gpu.gpu if gpu.index is None else str(gpu.index)
