"""Parts of a real run that its simulation needs: GPUs, settings, submission options of each task, and measured values
of each attempt. Times count from the start of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from carma.client import Client
from carma.core.model.settings import Rules
from carma.core.model.values import Activity, Demand, Estimate
from carma.errors import CarmaError
from carma.wire import api_types as t
from carma_lab.runs.figures import Asked, Ran
from carma_lab.runs.record import GpuOf, Server

MOST_STORIES = 5_000  # each needs a request; with more tasks the growth of memory is left out
Stories = Mapping[int, Sequence[t.StoryLine]]


def server_of(client: Client, gpus: Sequence[t.GpuView], speed: float, settings: Sequence[t.SettingView]) -> Server:
    period_s = next((float(one.value) for one in settings if one.name == "monitor.period_s"), 1.0)
    return Server(
        gpus=tuple(
            GpuOf(
                gpu=gpu.gpu, index=gpu.index, name=gpu.name, memory_mib=gpu.memory_mib, kind=gpu.kind, idle_w=gpu.idle_w
            )
            for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        ),
        period_s=period_s * speed,
        unfinished=len(client.tasks(user="all")),
    )


def settings_that_count(settings: Sequence[t.SettingView]) -> dict[str, str]:
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


def stories_of(client: Client, views: Sequence[t.TaskView]) -> dict[int, list[t.StoryLine]]:
    found: dict[int, list[t.StoryLine]] = {}
    for view in views if len(views) <= MOST_STORIES else ():
        try:
            found[view.id] = client.story(view.id)
        except CarmaError:  # removed from the archive meanwhile
            continue
    return found


def asked_of(view: t.TaskView, story: Sequence[t.StoryLine]) -> Asked:
    estimated_at = [line.at for line in story if line.event == "task_estimated"]
    return Asked(
        estimate=None if view.estimate is None else _estimate(view.estimate),
        estimated_s=max(0.0, estimated_at[0] - view.submitted_at) if estimated_at else 0.0,
        priority=view.priority,
        exclusive=view.exclusive,
        time_limit_s=view.time_limit_s,
    )


def _estimate(seen: t.EstimateView) -> Estimate:
    return Estimate(
        footprint_mib=seen.footprint_mib,
        upper_mib=seen.upper_mib,
        source=seen.source,
        level=seen.level,
        runtime_s=seen.runtime_s,
        demand=msgspec.convert(seen.demand, Demand) if seen.demand else None,
    )


def unseen(one: t.AttemptView) -> bool:
    """Neither memory nor activity of the attempt was seen on a GPU."""
    return not one.used_s and one.observed_mib is None and one.activity is None


def used_s_of(one: t.AttemptView) -> float | None:
    """Time of use of each of its GPUs; 0 if it was never seen on a GPU."""
    if one.used_s is not None:
        return one.used_s / max(1, len(one.gpus))
    return 0.0 if one.observed_mib is None else None


def ran_of(
    one: t.AttemptView, start: float, index: Mapping[str, int], story: Sequence[t.StoryLine], period_s: float = 0.0
) -> Ran:
    """`period_s`: between two samples; the peak may have been reached so much earlier than it was seen."""
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
