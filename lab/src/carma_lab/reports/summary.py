"""Summary of a run beyond its figures: distributions, outcomes and fairness. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from carma.core.model.values import Record
from carma_lab.reports.fairness import Fairness, fairness
from carma_lab.runs.figures import Figures, TaskRun, mean, quantile
from carma_lab.runs.record import About, Point, Run


class Spread(Record, frozen=True, kw_only=True):
    """Distribution of one figure over tasks. `count` is the number of tasks that have it."""

    count: int
    mean: float
    p50: float
    p95: float
    max: float


class Summary(Record, frozen=True, kw_only=True):
    """The output of `carma run-report RUN --json`. None: not known."""

    about: About
    figures: Figures
    wait_s: Spread | None
    run_s: Spread | None  # the last attempt of tasks that succeeded
    completion_s: Spread | None
    slowdown: Spread | None
    outcomes: dict[str, int]  # of tasks, the most frequent first
    attempts: dict[str, int]  # outcomes of attempts
    fairness: Fairness | None  # None: fewer than two users


def summary(run: Run) -> Summary:
    tasks = run.tasks
    return Summary(
        about=run.about,
        figures=run.figures,
        wait_s=spread(waits(tasks)),
        run_s=spread([task.ran_s for task in tasks if task.outcome == "succeeded"]),
        completion_s=spread(completions(tasks)),
        slowdown=spread(slowdowns(tasks)),
        outcomes=_counted([task.outcome for task in tasks]),
        attempts=_counted([one.outcome for task in tasks for one in task.attempts]),
        fairness=fairness(tasks, run.about.gpus),
    )


def waits(tasks: Sequence[TaskRun]) -> list[float]:
    return [max(0.0, task.wait_s) for task in tasks]


def completions(tasks: Sequence[TaskRun]) -> list[float]:
    return [task.ended_s - task.arrival_s for task in tasks]


def slowdowns(tasks: Sequence[TaskRun]) -> list[float]:
    return [task.slowdown for task in tasks if task.slowdown is not None]


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(
        count=len(values),
        mean=mean(values),
        p50=quantile(values, 0.5),
        p95=quantile(values, 0.95),
        max=max(values),
    )


def thinned(course: Sequence[Point], most: int) -> list[Point]:
    """The course with at most `most` points, each the mean over its part of the run; None if not known in the whole
    part."""
    size = -(-len(course) // most) if course else 1
    return [_joined(course[place : place + size]) for place in range(0, len(course), size)]


def _joined(points: Sequence[Point]) -> Point:
    values: dict[str, float | None] = {}
    for name in Point.__struct_fields__:
        known = [value for point in points if (value := getattr(point, name)) is not None]
        values[name] = mean(known) if known else None
    return Point(**{**values, "at_s": points[-1].at_s})  # type: ignore[arg-type]


def _counted(words: Sequence[str]) -> dict[str, int]:
    counts = Counter(words)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))
