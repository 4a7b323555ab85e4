"""`carma show`: details of one task."""

from __future__ import annotations

import shlex
from itertools import groupby

from carma.cli.connection import connect
from carma.cli.output import heading, moment, print_facts, print_json
from carma.cli.verb import json_flag, task_id, verb
from carma.cli.wording import (
    WAITING,
    activity_text,
    level_text,
    outcome_text,
    parts_text,
    progress_text,
    ran_s,
    slowdown_phrase,
    source_text,
)
from carma.core.model.units import show_count, show_j, show_mib, show_s
from carma.launch.exit_outcome import name_of
from carma.wire.api_types import AttemptView, StoryLine, TaskView
from carma.wire.sharing_text import guards_phrase, mechanism_phrase

BLAME = {
    "own": "own: the task wanted more memory than its booking",
    "neighbour": "neighbour: another task on the GPU held more memory than its booking",
    "unknown": "unknown: no task was observed above its booking",
}
NOT_MEASURED = "not measured"
EXAMPLES = """
carma show 12
carma show 12 --json
"""
Facts = list[tuple[str, str]]


@verb("show", examples=EXAMPLES)
@task_id
@json_flag
def command(task: int, as_json: bool) -> None:
    """Details of one task: properties, GPUs, memory, attempts and history of events."""
    with connect() as client:
        view = client.task(task)
        if as_json:
            return print_json(view)
        return _print(view, client.story(task), client.server().now)


def _print(task: TaskView, story: list[StoryLine], now: float) -> None:
    heading(f"task {task.id}  {task.name}" + (f"  (array {task.array})" if task.array else ""))
    memory = [("memory", memory_text(task)), *_estimate(task)]
    print_facts([*_properties(task), *_times(task, now), *memory, ("alone", _demand(task))])
    if task.attempts:
        heading("attempts")
        for attempt in task.attempts:
            print_facts(attempt_facts(attempt, now), indent=2)
    if task.attempts and task.state == "finished":
        heading("efficiency")
        print_facts(efficiency_facts(task), indent=2)
    if story:
        heading("story")
        print_facts([(moment(line.at), line.text) for line in story], indent=2)


def _properties(task: TaskView) -> Facts:
    where = ", ".join(f"GPU {index} ({gpu})" for index, gpu in zip(task.gpu_indices, task.gpus, strict=False))
    placed = task.state not in WAITING  # the earlier GPUs of a waiting task are listed with its attempts
    return [
        ("state", f"{task.state} ({task.code})" + (", held" if task.held else "")),
        ("reason", task.reason),
        ("command", shlex.join(task.command)),
        ("directory", task.directory),
        ("user", f"{task.user} (uid {task.uid})"),
        ("wants", _wants(task)),
        ("GPUs", where or ", ".join(task.gpus) if placed else ""),
        ("after", ", ".join(task.after)),
        ("comment", task.comment),
    ]


def _wants(task: TaskView) -> str:
    parts = (
        show_count(task.gpus_wanted, "GPU"),
        "exclusive" if task.exclusive else "",
        task.mechanism_asked or "",
        "" if task.threads_percent is None else f"{task.threads_percent} % of the SMs",
        "" if task.checkpoint_signal is None else f"checkpoint on {name_of(task.checkpoint_signal)}",
        f"priority {task.priority}" if task.priority else "",
    )
    return ", ".join(part for part in parts if part)


def _times(task: TaskView, now: float) -> Facts:
    started = task.started_at if task.state not in WAITING else None
    ran = "" if started is None else f" (for {show_s(ran_s(task, now))})"
    return [
        ("submitted", moment(task.submitted_at)),
        ("not before", moment(task.begin_at)),
        ("starts by", moment(task.reserved_start_at)),
        ("started", moment(started) + ran),
        ("ended", moment(task.ended_at)),
        ("time limit", show_s(task.time_limit_s) if task.time_limit_s else ""),
        ("exit code", "" if task.exit_code is None else str(task.exit_code)),
    ]


def memory_text(task: TaskView) -> str:
    """Declared, estimated, booked, observed and needed memory. Equal figures in a row are joined."""
    estimate = task.estimate
    found: list[tuple[str, int | None, str]] = [("declared", task.gpu_memory_mib, "")]
    if estimate is not None and estimate.source != "declared":
        bound = f" (at most {show_mib(estimate.upper_mib)}{level_text(estimate.level)})"
        has_bound = estimate.upper_mib != estimate.footprint_mib
        found.append((f"estimated by {estimate.source}", estimate.footprint_mib, bound if has_bound else ""))
    found += [("booked", task.booking_mib, ""), ("observed", task.observed_mib, "")]
    if task.needs_mib != task.booking_mib:
        found.append(("needed", task.needs_mib, ""))
    texts = [(what, show_mib(mib) + more) for what, mib, more in found if mib is not None]
    groups = groupby(texts, key=lambda each: each[1])
    return ", ".join(f"{text} {' and '.join(what for what, _ in same)}" for text, same in groups) or "not known yet"


def _estimate(task: TaskView) -> Facts:
    """The parts of the estimate, its origin and its warnings."""
    estimate = task.estimate
    if estimate is None or estimate.source == "declared":
        return []
    inner = (("allocated", estimate.allocated_mib), ("reserved", estimate.reserved_mib))
    steps = "" if estimate.steps_seen is None else f"a trial run of {show_count(estimate.steps_seen, 'optimizer step')}"
    took = f"took {show_s(estimate.seconds)}" if estimate.seconds >= 1.0 else ""
    model = f"for {estimate.gpu_model}" if estimate.gpu_model else ""
    return [
        ("  parts", parts_text(estimate.parts_mib)),
        ("  of that", ", ".join(f"{what} {show_mib(mib)}" for what, mib in inner if mib is not None)),
        ("  how", ", ".join(part for part in (steps, model, took) if part)),
        ("  based on", estimate.rests_on),
        *(("  warning", warning) for warning in estimate.warnings),
    ]


def _demand(task: TaskView) -> str:
    """Estimated activity and run time of the task alone on a GPU."""
    estimate = task.estimate
    if estimate is None:
        return ""
    takes = "" if estimate.runtime_s is None else f"takes {show_s(estimate.runtime_s)}"
    text = ", ".join(part for part in (activity_text(estimate.demand.get), takes) if part)
    return f"{text} (predicted from its trial run)" if estimate.demand_predicted else text


def efficiency_facts(task: TaskView) -> Facts:
    """How well a finished task used its GPUs."""
    used = "" if task.observed_mib is None else f"{show_mib(task.observed_mib)} used"
    if used and task.observed_mib and task.booking_mib:
        used += f" ({100 * task.observed_mib / task.booking_mib:.0f} %)"
    activity = "" if task.sm_active is None else f"SM activity {100 * task.sm_active:.0f} %"
    figures = (
        ("memory", f"{show_mib(task.booking_mib)} booked, {used or NOT_MEASURED}"),
        ("activity", activity),
        ("sharing", slowdown_phrase(task.progress)),
        ("energy", "" if task.energy_j is None else show_j(task.energy_j)),
        ("waiting", "" if task.waited_s is None else show_s(task.waited_s)),
    )
    return [*((what, text or NOT_MEASURED) for what, text in figures), ("advice", task.advice)]


def attempt_facts(attempt: AttemptView, now: float) -> Facts:
    outcome = outcome_text(attempt.outcome) if attempt.outcome else "runs" if attempt.started_at else "starting"
    began = attempt.started_at or attempt.placed_at
    took = show_s((attempt.ended_at or now) - began)
    took += f", of that {show_s(attempt.paused_s)} paused" if attempt.paused_s else ""
    return [
        (f"{attempt.number}", f"{outcome}; {moment(began)}, {took}" + (", alone on its GPUs" if attempt.alone else "")),
        ("  blame", BLAME.get(attempt.blame or "", attempt.blame or "")),
        ("  memory", _attempt_memory(attempt)),
        ("  shares", _sharing(attempt)),
        ("  activity", _attempt_activity(attempt)),
        ("  progress", progress_text(attempt.progress, now)),
        ("  energy", show_j(attempt.energy_j) if attempt.energy_j is not None else ""),
        ("  decision", attempt.decision),
        ("  stdout", attempt.stdout),
        ("  stderr", attempt.stderr if attempt.stderr != attempt.stdout else ""),
    ]


def _attempt_activity(attempt: AttemptView) -> str:
    if attempt.activity is None:
        return ""
    text = activity_text(lambda name: getattr(attempt.activity, name))
    return f"{text} (inferred from power and utilisation)" if text and attempt.activity_inferred else text


def _attempt_memory(attempt: AttemptView) -> str:
    memory = f"booked {show_mib(attempt.booking_mib)} ({source_text(attempt.booking_source)})"
    memory += "" if attempt.placed_mib is None else f", at first {show_mib(attempt.placed_mib)}"
    return memory + ("" if attempt.observed_mib is None else f", observed {show_mib(attempt.observed_mib)}")


def _sharing(attempt: AttemptView) -> str:
    """`under MPS; limited to 8.0 GiB by MPS's memory limit; the watchdog checks it too`."""
    if attempt.mechanism is None:
        return ""
    alone = "alone on its GPUs, so " if attempt.alone and not attempt.guards else ""
    note = f" ({attempt.note})" if attempt.note else ""
    return f"{mechanism_phrase(attempt.mechanism)}; {alone}{guards_phrase(attempt.guards)}{note}"
