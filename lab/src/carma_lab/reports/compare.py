"""Comparison of runs with the first one as reference. Pure.

Runs of one trace are compared. The label of a run names its policy and the other conditions that differ between the
runs (memory source, mechanism, settings, …). Over several traces the figure of a variant is the geometric mean of its
ratios, as in the published tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from carma.core.model.values import Record
from carma.errors import Usage
from carma_lab.reports.figure_list import LINES, Line, value_of
from carma_lab.runs.figures import TaskRun
from carma_lab.runs.record import About, Run

MOST_TASKS = 5  # with the largest differences
_NOT_IN_LABELS = ("trace", "policy", "settings", "version", "gpu", "simulated", "tasks")  # or with their own rule


class TaskChange(Record, frozen=True, kw_only=True):
    """One task under the first variant and under another."""

    trace: str
    variant: str
    task: int  # its number in the first run
    name: str
    completion_s: float
    other_completion_s: float
    wait_s: float
    other_wait_s: float


class Comparison(Record, frozen=True, kw_only=True):
    """`values[trace][variant][figure]`, and the same as ratios to the first variant. None: not known."""

    variants: tuple[str, ...]  # the first is the reference
    traces: tuple[str, ...]
    values: dict[str, dict[str, dict[str, float | None]]]
    ratios: dict[str, dict[str, dict[str, float | None]]]
    overall: dict[str, dict[str, float | None]]  # over all traces: mean ratios, sums of counts
    tasks: tuple[TaskChange, ...]  # with the largest changes of completion


def compare(runs: Sequence[Run]) -> Comparison:
    """Compares runs; the first is the reference."""
    found, every = _by_trace(runs)
    values = {
        trace: {label: {line.field: value_of(run.figures, line) for line in LINES} for label, run in ran.items()}
        for trace, ran in found.items()
    }
    ratios = {
        trace: {label: _ratios(ran[every[0]], own) for label, own in ran.items()} for trace, ran in values.items()
    }
    return Comparison(
        variants=every,
        traces=tuple(found),
        values=values,
        ratios=ratios,
        overall={label: _overall(label, values, ratios) for label in every},
        tasks=_changes(found, every),
    )


def _by_trace(runs: Sequence[Run]) -> tuple[dict[str, dict[str, Run]], tuple[str, ...]]:
    """The runs by trace and label, and all labels. Refuses runs that cannot be compared."""
    labels = variants([run.about for run in runs])
    found: dict[str, dict[str, Run]] = {run.about.trace: {} for run in runs}
    for run, label in zip(runs, labels, strict=True):
        if label in found[run.about.trace]:
            raise Usage(
                f"two runs of {run.about.trace} have the same settings ({label})",
                "Give each run once; runs with the same settings need different seeds.",
            )
        found[run.about.trace][label] = run
    _check_traces(runs)
    every = tuple(dict.fromkeys(labels))
    if len(every) == 1:
        raise Usage(
            f"these runs are of {len(found)} traces and all under {every[0]}, so there is nothing to compare",
            "Simulate a trace under another policy too; carma run-report RUN shows one run.",
        )
    lacking = [trace for trace in found if every[0] not in found[trace]]
    if lacking:
        raise Usage(
            f"there is no run of {lacking[0]} under {every[0]}, the reference of the other runs",
            f"Each trace needs a run under the first variant: simulate {lacking[0]} under {every[0]} too.",
        )
    return found, every


def _check_traces(runs: Sequence[Run]) -> None:
    """Refuses different traces with the same name."""
    seen: dict[str, str] = {}
    for about in (run.about for run in runs if run.about.tasks):
        if seen.setdefault(about.trace, about.tasks) != about.tasks:
            raise Usage(
                f"the runs of {about.trace} have different tasks, so their traces differ",
                "Give the traces different names, or simulate one of them under both policies.",
            )


def variants(abouts: Sequence[About]) -> list[str]:
    """Labels: the policy and the other differences of these runs, such as `magm, memory none, gate.enabled no`."""
    fields = [name for name in About.__struct_fields__ if name not in _NOT_IN_LABELS]
    differing = [name for name in fields if len({getattr(about, name) for about in abouts}) > 1]
    named = sorted({name for about in abouts for name in about.settings})
    set_apart = [name for name in named if len({about.settings.get(name) for about in abouts}) > 1]
    real = len({about.simulated for about in abouts}) > 1
    labels = []
    for about in abouts:
        parts = [about.policy]
        if real:
            parts.append("simulated" if about.simulated else "real")
        parts += [f"{name} {value}" for name in differing if (value := getattr(about, name)) != ""]
        parts += [f"{name} {about.settings[name]}" for name in set_apart if name in about.settings]
        labels.append(", ".join(parts))
    return labels


def _ratios(first: Mapping[str, float | None], own: Mapping[str, float | None]) -> dict[str, float | None]:
    pairs = {line.field: (first[line.field], own[line.field]) for line in LINES if not line.counted}
    return {field: new / old if old and new is not None else None for field, (old, new) in pairs.items()}


def geo_mean(values: Sequence[float | None]) -> float | None:
    """None if a value is not known or 0: means over different traces cannot be compared."""
    known = [value for value in values if value is not None and value > 0.0]
    if not known or len(known) < len(values):
        return None
    return math.exp(math.fsum(math.log(value) for value in known) / len(known))


def _overall(
    label: str,
    values: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    ratios: Mapping[str, Mapping[str, Mapping[str, float | None]]],
) -> dict[str, float | None]:
    def of(line: Line) -> float | None:
        if not line.counted:
            return geo_mean([ran[label][line.field] if label in ran else None for ran in ratios.values()])
        counts = [ran[label][line.field] if label in ran else None for ran in values.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    return {line.field: of(line) for line in LINES}


def _changes(found: Mapping[str, Mapping[str, Run]], every: Sequence[str]) -> tuple[TaskChange, ...]:
    changes = []
    for label in every[1:]:
        of_variant = [
            change
            for trace, ran in found.items()
            if label in ran
            for change in _between(trace, label, ran[every[0]].tasks, ran[label].tasks)
        ]
        of_variant.sort(key=lambda change: (-abs(change.other_completion_s - change.completion_s), change.task))
        changes += of_variant[:MOST_TASKS]
    return tuple(changes)


def _between(trace: str, label: str, first: Sequence[TaskRun], other: Sequence[TaskRun]) -> list[TaskChange]:
    """Matches tasks by name, and tasks of one name by their order of arrival, so real and simulated runs match."""
    found = _numbered(other)
    return [
        TaskChange(
            trace=trace,
            variant=label,
            task=task.task,
            name=task.name,
            completion_s=task.ended_s - task.arrival_s,
            other_completion_s=found[key].ended_s - found[key].arrival_s,
            wait_s=task.wait_s,
            other_wait_s=found[key].wait_s,
        )
        for key, task in _numbered(first).items()
        if key in found
    ]


def _numbered(tasks: Sequence[TaskRun]) -> dict[tuple[str, int], TaskRun]:
    seen = Counter[str]()
    found = {}
    for task in sorted(tasks, key=lambda task: (task.arrival_s, task.task)):
        seen[task.name] += 1
        found[task.name, seen[task.name]] = task
    return found
