"""`carma show`: one task as a card: what, where, memory, attempts, and what happened."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import groupby

from carma.cli.verb import json_flag, task_id, verb
from carma.cli.wording import BUSY, WAITING, level_text, many, parts_text, ran_s
from carma.wire.api_types import AttemptView, StoryLine, TaskView

BLAME = {
    "own": "own: it wanted more than it had booked",
    "neighbour": "a neighbour that held more than it had booked",
    "unknown": "not clear: nobody was seen over a booking",
}
EXAMPLES = """
carma show 12
carma show 12 --json
"""


@verb("show", examples=EXAMPLES)
@task_id
@json_flag
def command(task: int, as_json: bool) -> None:
    """Everything about one task: what it is, where it runs, its memory, its attempts, what happened."""
    from carma.cli.connection import connect

    with connect() as client:
        view = client.task(task)
        if as_json:
            from carma.cli.output import print_json

            return print_json(view)
        story = client.story(task)
        now = client.server().now
    return _card(view, story, now)


def _card(task: TaskView, story: list[StoryLine], now: float) -> None:
    from carma.cli.output import heading, print_facts

    heading(f"task {task.id}  {task.name}" + (f"  (array {task.array})" if task.array else ""))
    memory = [("memory", _memory(task)), *_estimate(task)]
    print_facts([*_what(task), *_when(task, now), *memory, ("alone", _alone(task))])
    if task.attempts:
        heading("attempts")
        for attempt in task.attempts:
            print_facts(_attempt(attempt, now), indent=2)
    if story:
        from carma.cli.output import moment

        heading("story")
        print_facts([(moment(line.at), line.text) for line in story], indent=2)


def _what(task: TaskView) -> list[tuple[str, str]]:
    wants = f"{task.gpus_wanted} GPU{'s' if task.gpus_wanted > 1 else ''}" + (", exclusive" if task.exclusive else "")
    wants += f", {task.mechanism_asked}" if task.mechanism_asked else ""
    wants += f", {task.threads_percent} % of the SMs" if task.threads_percent is not None else ""
    wants += f", saves on {_signal_name(task.checkpoint_signal)}" if task.checkpoint_signal is not None else ""
    state = f"{task.state} ({task.code})" + (", held" if task.held else "")
    where = ", ".join(f"GPU {index} ({gpu})" for index, gpu in zip(task.gpu_indices, task.gpus, strict=False))
    placed = task.state not in WAITING  # what a waiting task had before is told with its attempts
    return [
        ("state", state),
        ("reason", task.reason),
        ("command", shlex.join(task.command)),
        ("directory", task.directory),
        ("user", f"{task.user} (uid {task.uid})"),
        ("wants", wants + (f", priority {task.priority}" if task.priority else "")),
        ("GPUs", where or ", ".join(task.gpus) if placed else ""),
        ("after", ", ".join(task.after)),
        ("comment", task.comment),
    ]


def _signal_name(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _when(task: TaskView, now: float) -> list[tuple[str, str]]:
    from carma.cli.output import moment
    from carma.core.model.units import show_s

    started = task.started_at if task.state not in WAITING else None
    ran = "" if started is None else f" (for {show_s(ran_s(task, now))})"
    exit_code = "" if task.exit_code is None else str(task.exit_code)
    return [
        ("submitted", moment(task.submitted_at)),
        ("not before", moment(task.begin_at)),
        ("starts by", moment(task.reserved_start_at)),
        ("started", moment(started) + ran),
        ("ended", moment(task.ended_at)),
        ("time limit", show_s(task.time_limit_s) if task.time_limit_s else ""),
        ("exit code", exit_code),
    ]


def _memory(task: TaskView) -> str:
    """Declared, estimate, booking, observed: in the order in which they come about."""
    from carma.core.model.units import show_mib

    found: list[tuple[str, str]] = []
    if task.gpu_memory_mib is not None:
        found.append(("declared", show_mib(task.gpu_memory_mib)))
    if task.estimate is not None and task.estimate.source != "declared":
        span = show_mib(task.estimate.footprint_mib)
        if task.estimate.upper_mib != task.estimate.footprint_mib:
            span += f" (at most {show_mib(task.estimate.upper_mib)}{level_text(task.estimate.level)})"
        found.append((f"estimated by {task.estimate.source}", span))
    if task.booking_mib is not None:
        found.append(("booked", show_mib(task.booking_mib)))
    if task.observed_mib is not None:
        found.append(("observed", show_mib(task.observed_mib)))
    if task.needs_mib is not None and task.needs_mib != task.booking_mib:
        found.append(("needs", show_mib(task.needs_mib)))
    groups = groupby(found, key=lambda each: each[1])  # a figure that stays the same is said once
    told = [f"{' and '.join(what for what, _ in same)} {figure}" for figure, same in groups]
    return " → ".join(told) or "not known yet"


def _estimate(task: TaskView) -> list[tuple[str, str]]:
    """How the estimate came about: what it is made of, what it rests on, and what to know about it."""
    from carma.core.model.units import show_mib, show_s

    estimate = task.estimate
    if estimate is None or estimate.source == "declared":
        return []
    inner = (("allocated", estimate.allocated_mib), ("reserved", estimate.reserved_mib))
    within = ", ".join(f"{what} {show_mib(mib)}" for what, mib in inner if mib is not None)
    steps = "" if estimate.steps_seen is None else f"a trial run of {many(estimate.steps_seen, 'optimizer step')}"
    took = f"took {show_s(estimate.seconds)}" if estimate.seconds >= 1.0 else ""
    model = f"for {estimate.gpu_model}" if estimate.gpu_model else ""
    return [
        ("  parts", parts_text(estimate.parts_mib)),
        ("  of that", within),
        ("  how", ", ".join(part for part in (steps, model, took) if part)),
        ("  rests on", estimate.rests_on),
        *(("  warning", warning) for warning in estimate.warnings),
    ]


def _shares(attempt: AttemptView) -> str:
    """How, and what holds it: `under MPS; held at 8.0 GiB by MPS's memory limit; the watchdog behind it`."""
    from carma.wire.sharing_text import held, shared

    if attempt.mechanism is None:
        return ""
    nobody = "alone on its GPUs, so " if attempt.alone and not attempt.guards else ""
    note = f" ({attempt.note})" if attempt.note else ""
    return f"{shared(attempt.mechanism)}; {nobody}{held(attempt.guards)}{note}"


def _busy(attempt: AttemptView) -> str:
    """Its own share, on average; what the GPU does not tell is left out."""
    activity = attempt.activity
    return "" if activity is None else ", ".join(_shares_of(lambda name: getattr(activity, name)))


def _shares_of(told: Callable[[str], float | None]) -> list[str]:
    known = [(what, told(name)) for name, what in BUSY.items()]
    return [f"{what} {100 * share:.0f} %" for what, share in known if share is not None]


def _alone(task: TaskView) -> str:
    """How busy it is thought to keep a GPU that it has alone, and for how long: what policies that predict go by."""
    from carma.core.model.units import show_s

    if task.estimate is None:
        return ""
    takes = [] if task.estimate.runtime_s is None else [f"takes {show_s(task.estimate.runtime_s)}"]
    told = ", ".join([*_shares_of(task.estimate.demand.get), *takes])
    return f"{told} (predicted from its trial run)" if task.estimate.demand_predicted else told


def _attempt(attempt: AttemptView, now: float) -> list[tuple[str, str]]:
    from carma.cli.output import moment
    from carma.cli.wording import by, outcome_text
    from carma.core.model.units import show_j, show_mib, show_s

    outcome = outcome_text(attempt.outcome) if attempt.outcome else "runs" if attempt.started_at else "starting"
    began = attempt.started_at or attempt.placed_at
    took = show_s((attempt.ended_at or now) - began)
    memory = f"booked {show_mib(attempt.booking_mib)} ({by(attempt.booking_source)})"
    if attempt.placed_mib is not None:
        memory += f", at first {show_mib(attempt.placed_mib)}"
    if attempt.observed_mib is not None:
        memory += f", observed {show_mib(attempt.observed_mib)}"
    return [
        (f"{attempt.number}", f"{outcome}; {moment(began)}, {took}" + (", alone on its GPUs" if attempt.alone else "")),
        ("  blame", BLAME.get(attempt.blame or "", attempt.blame or "")),
        ("  memory", memory),
        ("  shares", _shares(attempt)),
        ("  busy", _busy(attempt)),
        ("  energy", show_j(attempt.energy_j) if attempt.energy_j is not None else ""),
        ("  why there", attempt.decision),
        ("  stdout", attempt.stdout),
        ("  stderr", attempt.stderr if attempt.stderr != attempt.stdout else ""),
    ]
