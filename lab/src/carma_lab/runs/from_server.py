"""The history of a server as a run, in the format of a simulated one. Values that were not measured are None.

Activity, energy and memory are known for each attempt, as means, sums and peaks since its first use of a GPU. The
course over time spreads them evenly, so it does not show variations within an attempt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from carma.client import MOST_LISTED, Client
from carma.core.model.settings import Rules
from carma.core.model.values import Activity, Demand, Estimate
from carma.errors import CarmaError, NotFound
from carma.traces import Trace
from carma.wire.api_types import AttemptView, EstimateView, GpuView, SettingView, StoryLine, TaskView
from carma.wire.report_types import Report
from carma_lab.runs.figures import Asked, Ran, TaskRun, figures, mean
from carma_lab.runs.record import About, GpuOf, Point, Run, Server

MOST_STORIES = 5_000  # each needs a request; with more tasks the growth of memory is left out
Stories = Mapping[int, Sequence[StoryLine]]
DAY_S = 86400.0
POINTS = 500
ACTIVITY = ("sm_active", "sm_occupancy", "dram_active")
UNMEASURED = 0.05  # maximum share of the attempts' time without a figure, which then counts as 0; above, None


class Piece(NamedTuple):
    """A value that holds over a span."""

    begin_s: float
    end_s: float
    value: float | None


def recorded(client: Client, since: float | None, trace: Trace | None = None) -> Run:
    """The tasks of all users that ended since then (default: one day). `trace`: their durations alone, by name."""
    server = client.server()
    since = server.now - DAY_S if since is None else since
    views = [view for view in client.history(user="all", since=since, limit=MOST_LISTED) if view.ended_at is not None]
    if not views:
        raise NotFound(
            "no task has ended since then", "Use an earlier start, such as --since 7d. carma queue shows running tasks."
        )
    gpus, settings = client.gpus(), client.settings()
    about = About(
        simulated=False,
        trace="server" if trace is None else trace.name.removesuffix(".csv"),
        policy=server.policy,
        memory="",
        mechanism=mechanism_of(views, server.mechanism),
        gpu=", ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        gpus=len(_indices(views, gpus)),
        settings=settings_that_count(settings),
        version=server.version,
    )
    idle_w = idle_w_of(client.report(since=since))
    noted = server_of(client, gpus, server.speed, settings)
    return real_run(views, gpus, about, alone_by_name(trace), idle_w, noted, stories_of(client, views))


def mechanism_of(views: Iterable[TaskView], wanted: str) -> str:
    """The mechanism in use; `auto` if the settings say so and no attempt has a mechanism."""
    seen = Counter(one.mechanism for view in views for one in view.attempts if one.mechanism is not None)
    return seen.most_common(1)[0][0] if wanted == "auto" and seen else wanted


def alone_by_name(trace: Trace | None) -> dict[str, float]:
    """Durations by name. Names with several different durations are left out."""
    found: dict[str, set[float]] = {}
    for task in trace.tasks if trace is not None else ():
        found.setdefault(task.name, set()).add(task.seconds)
    return {name: min(seconds) for name, seconds in found.items() if len(seconds) == 1}


def real_run(
    views: Sequence[TaskView],
    gpus: Sequence[GpuView],
    about: About,
    alone: Mapping[str, float],
    idle_w: float | None = None,
    server: Server | None = None,
    stories: Stories | None = None,
) -> Run:
    """Pure. Times count from the first submission. `idle_w`: power of an idle GPU. `stories`: events of the tasks."""
    views = sorted(views, key=lambda view: (view.submitted_at, view.id))
    start = views[0].submitted_at
    index = _indices(views, gpus)
    events, period_s = stories or {}, 0.0 if server is None else server.period_s
    tasks = tuple(_task(view, start, index, alone.get(view.name), events.get(view.id, ()), period_s) for view in views)
    course = _course(tasks, _measured(views, start), about.gpus, idle_w)
    means = {name: _over(course, name) for name in (*ACTIVITY, "memory_mib")}
    power_w = _over(course, "power_w")
    made = figures(
        tasks,
        took_s=None,
        energy_j=None if power_w is None else power_w * course[-1].at_s * about.gpus,
        power_w_mean=power_w,
        **{f"{name}_mean": value for name, value in means.items()},
    )
    return Run(about=about, figures=made, tasks=tasks, course=course, server=server)


def _indices(views: Iterable[TaskView], gpus: Iterable[GpuView]) -> dict[str, int]:
    """Indices of the present GPUs, followed by those that are gone."""
    found = {gpu.gpu: gpu.index for gpu in gpus}
    gone = sorted({gpu for view in views for one in view.attempts for gpu in one.gpus} - set(found))
    first = 1 + max(found.values(), default=-1)
    return {**found, **{gpu: first + place for place, gpu in enumerate(gone)}}


def _task(
    view: TaskView,
    start: float,
    index: Mapping[str, int],
    alone_s: float | None,
    story: Sequence[StoryLine],
    period_s: float,
) -> TaskRun:
    assert view.ended_at is not None
    return TaskRun(
        task=view.id,
        name=view.name,
        user=view.user,
        gpus=view.gpus_wanted,
        arrival_s=view.submitted_at - start,
        ended_s=view.ended_at - start,
        alone_s=alone_s,
        outcome=str((view.outcome or {}).get("kind", "")),
        attempts=tuple(ran_of(one, start, index, story, period_s) for one in view.attempts if one.ended_at is not None),
        asked=asked_of(view, story),
    )


def _measured(views: Iterable[TaskView], start: float) -> dict[str, list[Piece]]:
    """Measured values of attempts, summed over the GPUs of each. Power is above the idle power.

    If the server sees processes on its GPUs, an attempt without any process there used no GPU: it failed before, or
    needs none. If no process was ever seen, nothing is known.
    """
    views = list(views)
    sees = any(one.observed_mib is not None for view in views for one in view.attempts)
    found: dict[str, list[Piece]] = {name: [] for name in (*ACTIVITY, "memory_mib", "power_w")}
    for view in views:
        for one in view.attempts:
            if one.ended_at is None or one.ended_at <= one.placed_at or (sees and unseen(one)):
                continue
            values: dict[str, float | None] = {name: getattr(one.activity, name, None) for name in ACTIVITY}
            values["memory_mib"] = one.observed_mib
            summed = {name: None if value is None else value * len(one.gpus) for name, value in values.items()}
            used_s = used_s_of(one) or one.ended_at - one.placed_at
            begin = max(one.placed_at, one.ended_at - used_s)
            power_w = None if one.energy_j is None else one.energy_j / (one.ended_at - begin)
            for name, value in {**summed, "power_w": power_w}.items():
                found[name].append(Piece(begin - start, one.ended_at - start, value))
    return found


def idle_w_of(report: Report) -> float | None:
    """Mean idle power of a GPU by the hourly records; None if the records of a GPU have no energy."""
    watched_s = sum(gpu.watched_s for gpu in report.gpus if gpu.energy_j is not None)
    if not watched_s or any(gpu.energy_j is None for gpu in report.gpus if gpu.watched_s or gpu.index is not None):
        return None
    return sum(gpu.idle_j for gpu in report.gpus) / watched_s


def _course(
    tasks: Sequence[TaskRun], measured: Mapping[str, Sequence[Piece]], gpus: int, idle_w: float | None
) -> tuple[Point, ...]:
    end_s = max(max(task.ended_s for task in tasks), 1e-6)
    edges = [end_s * place / POINTS for place in range(POINTS + 1)]
    present = binned([Piece(task.arrival_s, task.ended_s, 1.0) for task in tasks], edges)
    ran = binned([Piece(one.placed_at, one.ended_at, 1.0) for task in tasks for one in task.attempts], edges)
    assert present is not None
    assert ran is not None
    seen = {name: binned(pieces, edges) for name, pieces in measured.items()}
    above = {"power_w": idle_w or 0.0}
    if idle_w is None:
        seen["power_w"] = None
    return tuple(
        Point(
            at_s=edges[place + 1],
            running=ran[place],
            waiting=max(0.0, present[place] - ran[place]),
            **{
                name: None if values is None else values[place] / gpus + above.get(name, 0.0)
                for name, values in seen.items()
            },
        )
        for place in range(POINTS)
    )


def binned(pieces: Sequence[Piece], edges: Sequence[float]) -> list[float] | None:
    """Mean of the sum of the pieces between each two edges. None if too much of it is not known."""
    whole_s = sum(piece.end_s - piece.begin_s for piece in pieces)
    unknown_s = sum(piece.end_s - piece.begin_s for piece in pieces if piece.value is None)
    if unknown_s > UNMEASURED * whole_s:
        return None
    known = [piece for piece in pieces if piece.value is not None]
    changes = sorted(
        [(piece.begin_s, piece.value or 0.0) for piece in known]
        + [(piece.end_s, -(piece.value or 0.0)) for piece in known]
    )
    means, place, level, now = [], 0, 0.0, edges[0]
    for begin_s, end_s in itertools.pairwise(edges):
        area, now = 0.0, begin_s
        while place < len(changes) and changes[place][0] <= end_s:
            at_s, change = changes[place]
            area += level * (at_s - now)
            now, level, place = max(now, at_s), level + change, place + 1
        means.append(max(0.0, area + level * (end_s - now)) / (end_s - begin_s))
    return means


def _over(course: Sequence[Point], name: str) -> float | None:
    """Mean over the run; all steps have the same length."""
    values = [value for point in course if (value := getattr(point, name)) is not None]
    return mean(values) if values else None


# What a simulation of the run needs: its GPUs and settings, and the submission options and attempts of each task.


def server_of(client: Client, gpus: Sequence[GpuView], speed: float, settings: Sequence[SettingView]) -> Server:
    period_s = next((float(one.value) for one in settings if one.name == "monitor.period_s"), 1.0)
    return Server(
        gpus=tuple(
            msgspec.convert(gpu, GpuOf, from_attributes=True) for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        ),
        period_s=period_s * speed,
        unfinished=len(client.tasks(user="all")),
    )


def settings_that_count(settings: Sequence[SettingView]) -> dict[str, str]:
    """Settings with an effect on decisions and without their default, as `--set` takes them; the policy is stored
    separately."""
    sections = Rules.__struct_fields__
    return {
        one.name: _spelled(one.value)
        for one in settings
        if one.origin != "default" and one.name.split(".")[0] in sections and one.name != "placement.policy"
    }


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def stories_of(client: Client, views: Sequence[TaskView]) -> dict[int, list[StoryLine]]:
    found: dict[int, list[StoryLine]] = {}
    for view in views if len(views) <= MOST_STORIES else ():
        try:
            found[view.id] = client.story(view.id)
        except CarmaError:  # removed from the archive meanwhile
            continue
    return found


def asked_of(view: TaskView, story: Sequence[StoryLine]) -> Asked:
    estimated_at = [line.at for line in story if line.event == "task_estimated"]
    return Asked(
        estimate=None if view.estimate is None else _estimate(view.estimate),
        estimated_s=max(0.0, estimated_at[0] - view.submitted_at) if estimated_at else 0.0,
        priority=view.priority,
        exclusive=view.exclusive,
        time_limit_s=view.time_limit_s,
    )


def _estimate(seen: EstimateView) -> Estimate:
    return Estimate(
        footprint_mib=seen.footprint_mib,
        upper_mib=seen.upper_mib,
        source=seen.source,
        level=seen.level,
        runtime_s=seen.runtime_s,
        demand=msgspec.convert(seen.demand, Demand) if seen.demand else None,
    )


def unseen(one: AttemptView) -> bool:
    """Neither memory nor activity of the attempt was seen on a GPU."""
    return not one.used_s and one.observed_mib is None and one.activity is None


def used_s_of(one: AttemptView) -> float | None:
    """Time of use of each of its GPUs; 0 if it was never seen on a GPU."""
    if one.used_s is not None:
        return one.used_s / max(1, len(one.gpus))
    return 0.0 if one.observed_mib is None else None


def ran_of(
    one: AttemptView, start: float, index: Mapping[str, int], story: Sequence[StoryLine], period_s: float = 0.0
) -> Ran:
    """The attempt as a simulated run has it. `period_s`: time between two samples, by which the peak may precede its
    observation."""
    assert one.ended_at is not None
    outcome, seen = one.outcome or {}, one.activity
    made = Ran(
        gpus=tuple(index[gpu] for gpu in one.gpus),
        placed_at=one.placed_at - start,
        ended_at=one.ended_at - start,
        outcome=str(outcome.get("kind", "")),
        blame=one.blame or "",
        started_at=None if one.started_at is None else one.started_at - start,
        used_s=used_s_of(one),
        memory_mib=one.observed_mib,
        asked_mib=outcome.get("asked_mib"),
        activity=None if seen is None else msgspec.convert(seen, Activity, from_attributes=True),
        energy_j=one.energy_j,
    )
    grown = [line.at for line in story if line.event == "memory_observed" and one.placed_at <= line.at <= one.ended_at]
    if not grown or made.used_s is None:
        return made
    return msgspec.structs.replace(made, ramp_s=max(0.0, grown[-1] - period_s - start - made.first_use))
