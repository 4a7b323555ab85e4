"""Twenty mixed training tasks at once, then the same tasks one after the other: the daemon's records compared with the
truth.

The truth is what each task wrote into its own log (steps, when, how much memory PyTorch reserved) and how busy each is
known to keep the GPU when it runs alone. Gate and warm-up are off, because tasks of a few seconds would mostly wait for
others to settle; bookings, caps and the limit of four on a GPU hold as always.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from carma.wire.api_types import GpuView, TaskView
from carma_lab.bench.gpu.trial_figures import held_against, side_by_side
from carma_lab.bench.gpu.trial_server import Line, Server, Stage, Tables, first, last, summary, unfinished
from carma_lab.bench.gpu.trial_shapes import SHAPES, Solo, solos, training
from carma_lab.bench.machine import cpu_s
from carma_lab.bench.results_file import rounded

POLL_S = 1.0
IDLE_S = 6.0  # before the first task, so that the GPUs' idle energy is known
WINDOW_S = 5.0
EXACT: Tables = {
    "gate": {"enabled": False},
    "warmup": {"enabled": False},
    "window": {"length_s": WINDOW_S},
}


def run(stage: Stage) -> dict[str, Any]:
    """All of them, shared as the server would."""
    mechanism = "auto" if stage.options.virtual else "mps"
    with Server(virtual=stage.options.virtual, settings={**EXACT, "sharing": {"mechanism": mechanism}}) as server:
        return _measured(stage, server)


def exclusive(stage: Stage, shared: dict[str, Any]) -> dict[str, Any]:
    """The same with one task on a GPU; what does not fit into the time is left out. Both side by side."""
    with Server(virtual=stage.options.virtual, settings=EXACT, policy="exclusive") as server:
        alone = _measured(stage, server)
    solo = {
        row["name"]: Solo(row["own"]["steps_per_s"], row["activity"]["sm_active"])
        for row in alone["tasks"]
        if row["own"].get("steps_per_s") and (row["activity"] or {}).get("sm_active") is not None
    }
    from_records = held_against(shared["tasks"], shared["samples"], solo, WINDOW_S)
    return {
        **shared,
        "gpu_against_own_steps": {**shared["gpu_against_own_steps"], "by_exclusive_run": from_records},
        "exclusive": alone,
        "side_by_side": side_by_side(shared, alone),
    }


def shortfalls(shared: dict[str, Any]) -> list[str]:
    """What was to be shown and was not."""
    found = []
    missing = shared["tasks_submitted"] - len(shared["tasks"])
    if missing:
        found.append(f"tasks: {missing} tasks had not ended when the time was over")
    for row in shared["tasks"]:
        if row["outcome"] != "succeeded":
            found.append(f"tasks: {row['name']} ended as {row['outcome']}")
            continue
        absent = [what for what in ("observed_mib", "energy_j", "activity", "mechanism") if row[what] is None]
        if absent:
            found.append(f"tasks: {row['name']} is on record without {', '.join(absent)}")
    return found


def not_compared(found: dict[str, Any]) -> list[str]:
    """The tasks that the run with one task at a time left out; the two runs then cannot be compared as a whole."""
    side, submitted = found["side_by_side"], found["tasks_submitted"]
    if side["complete"]:
        return []
    return [f"exclusive: {submitted - side['tasks']} of {submitted} tasks had not succeeded when the time was over"]


def _measured(stage: Stage, server: Server) -> dict[str, Any]:
    options = stage.options
    time.sleep(IDLE_S * min(1.0, options.scale))
    before, spent_s, began = server.gpus(), cpu_s(server.pid), time.monotonic()
    ids = [
        server.submit(training(shape, virtual=options.virtual, scale=options.scale))
        for shape in SHAPES[: options.tasks]
    ]
    samples = _samples(stage, server, ids)
    took_s, cost_s = time.monotonic() - began, cpu_s(server.pid) - spent_s
    after = server.gpus()
    views = sorted((view for view in server.history() if view.id in ids), key=lambda view: view.id)
    rows = [_row(view, server.log(view.name, len(view.attempts))) for view in views]
    solo = solos(options.table, virtual=options.virtual)
    ended = [view for view in views if (view.outcome or {}).get("kind") == "succeeded"]
    found: dict[str, Any] = rounded(
        {
            "tasks_submitted": len(ids),
            "tasks_succeeded": len(ended),
            "makespan_s": _makespan_s(ended),
            "energy_j": _risen(before, after),
            "energy_of_tasks_j": sum(row["energy_j"] or 0.0 for row in rows),
            "daemon": {"cpu_percent": 100 * cost_s / took_s, "over_s": took_s, "samples": len(samples)},
            "memory_beyond_reserved_mib": _beyond(rows),
            "gpu_against_own_steps": {"by_table": held_against(rows, samples, solo, WINDOW_S)},
            "sm_active_of_records_against_solo": _against_solo(rows, solo),
            "tasks": rows,
            "samples": samples,
        }
    )
    stage.say(
        f"{len(ended)} of {len(ids)} tasks succeeded; makespan {found['makespan_s']} s, energy {found['energy_j']} J, "
        f"the tasks' share {found['energy_of_tasks_j']} J; the daemon took {found['daemon']['cpu_percent']} % of a core"
    )
    return found


def _samples(stage: Stage, server: Server, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Samples of the GPUs until all tasks have ended or the time is over."""
    samples = []
    while (left := unfinished(server.queue(), ids)) and not stage.over:
        samples.append(_sample(server.gpus()))
        stage.say(f"{len(ids) - len(left)} of {len(ids)} tasks ended", every_s=10.0)
        time.sleep(POLL_S)
    return samples


def _row(view: TaskView, lines: Sequence[Line]) -> dict[str, Any]:
    """The record, with its newest attempt's figures in front, and what the task itself knows."""
    about = summary(view)
    newest = about["attempts"][-1] if about["attempts"] else {}
    named = ("mechanism", "guards", "note", "booking_mib", "booking_source", "cap_mib", "observed_mib", "activity")
    return {
        **{name: about[name] for name in ("name", "outcome", "declared_mib", "energy_j")},
        "waited_s": None if view.started_at is None else view.started_at - view.submitted_at,
        "ran_s": newest.get("ran_s"),
        **{name: newest.get(name) for name in named},
        "attempts": len(about["attempts"]),
        "endings": [(attempt["outcome"] or {}).get("kind") for attempt in about["attempts"]],
        "own": _own(view, lines),
    }


def _own(view: TaskView, lines: Sequence[Line]) -> dict[str, Any]:
    """Figures from the task's own log. Times count from its start by the daemon; `progress` is (time of day, steps)."""
    ready, end = first(lines, "ready"), last(lines, "steps", "trained")
    if ready is None or end is None:
        return {}
    span_s = end["at"] - ready["at"]
    progress = [(line["at"], line["steps"]) for line in lines if line["what"] in ("steps", "trained")]
    return {
        "startup_s": None if view.started_at is None else ready["at"] - view.started_at,
        "trained_s": span_s,
        "steps": end["steps"],
        "steps_per_s": end["steps"] / span_s if span_s > 0 else None,
        "reserved_mib": end["reserved_mib"],
        "torch": end["torch"],
        "progress": [(ready["at"], 0), *progress],
    }


def _sample(gpus: Sequence[GpuView]) -> dict[str, Any]:
    """One sample while tasks run: means over all GPUs."""

    def mean(name: str) -> float | None:
        values = [getattr(gpu, name) for gpu in gpus]
        return statistics.fmean(values) if values and None not in values else None

    figures = ("sm_active", "sm_occupancy", "dram_active", "gpu_util", "power_w")
    return {
        "at": time.time(),
        **{name: mean(name) for name in figures},
        "tasks": sum(len(gpu.tasks) for gpu in gpus),
    }


def _makespan_s(ended: Sequence[TaskView]) -> float | None:
    ends = [view.ended_at for view in ended if view.ended_at is not None]
    return max(ends) - min(view.submitted_at for view in ended) if ends else None


def _risen(before: Sequence[GpuView], after: Sequence[GpuView]) -> float | None:
    """The GPUs' own energy counters, idle power included."""
    pairs = [(old.energy_j, new.energy_j) for old, new in zip(before, after, strict=True)]
    known = [new - old for old, new in pairs if old is not None and new is not None]
    return sum(known) if known and len(known) == len(pairs) else None


def _beyond(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Footprint on record less what PyTorch says it reserved: the context and what libraries hold."""
    found = [
        row["observed_mib"] - row["own"]["reserved_mib"]
        for row in rows
        if row["observed_mib"] is not None and row["own"].get("reserved_mib") is not None
    ]
    return {"min": min(found), "median": statistics.median(found), "max": max(found)} if found else None


def _against_solo(rows: Sequence[dict[str, Any]], solo: dict[str, Solo]) -> dict[str, Any] | None:
    """A record's SM activity against the task's solo figure, slowed as the task itself says it was."""
    errors = []
    for row in rows:
        known, active, rate = solo.get(row["name"]), row["activity"], row["own"].get("steps_per_s")
        if known is not None and active is not None and active["sm_active"] is not None and rate:
            errors.append(active["sm_active"] - known.sm_active * rate / known.rate)
    if not errors:
        return None
    return {
        "tasks": len(errors),
        "mean_error": statistics.fmean(errors),
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
    }
