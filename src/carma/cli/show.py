"""`carma show`: one task as a card: what, where, memory, attempts, and what happened."""

from __future__ import annotations

import shlex

from carma.cli.verb import json_flag, task_id, verb
from carma.wire.types import AttemptView, StoryLine, TaskView

EXAMPLES = """
carma show 12
carma show 12 --json
"""


@verb("show", examples=EXAMPLES)
@task_id
@json_flag
def command(task: int, as_json: bool) -> None:
    """Everything about one task: what it is, where it runs, its memory, its attempts, what happened."""
    from carma.cli.connect import connect

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
    print_facts([*_what(task), *_when(task, now), ("memory", _memory(task))])
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
    state = f"{task.state} ({task.code})" + (", held" if task.held else "")
    where = ", ".join(f"GPU {index} ({gpu})" for index, gpu in zip(task.gpu_indices, task.gpus, strict=False))
    return [
        ("state", state),
        ("reason", task.reason),
        ("command", shlex.join(task.command)),
        ("directory", task.directory),
        ("user", f"{task.user} (uid {task.uid})"),
        ("wants", wants + (f", priority {task.priority}" if task.priority else "")),
        ("GPUs", where or ", ".join(task.gpus)),
        ("after", ", ".join(task.after)),
        ("comment", task.comment),
    ]


def _when(task: TaskView, now: float) -> list[tuple[str, str]]:
    from carma.cli.output import moment
    from carma.core.units import show_s

    ran = "" if task.started_at is None else f" (for {show_s((task.ended_at or now) - task.started_at)})"
    exit_code = "" if task.exit_code is None else str(task.exit_code)
    return [
        ("submitted", moment(task.submitted_at)),
        ("not before", moment(task.begin_at)),
        ("starts by", moment(task.reserved_start_at)),
        ("started", moment(task.started_at) + ran),
        ("ended", moment(task.ended_at)),
        ("time limit", show_s(task.time_limit_s) if task.time_limit_s else ""),
        ("exit code", exit_code),
    ]


def _memory(task: TaskView) -> str:
    """Declared, estimate, booking, observed: in the order in which they come about."""
    from carma.core.units import show_mib

    parts = []
    if task.gpu_memory_mib is not None:
        parts.append(f"declared {show_mib(task.gpu_memory_mib)}")
    if task.estimate is not None:
        span = show_mib(task.estimate.footprint_mib)
        if task.estimate.upper_mib != task.estimate.footprint_mib:
            span += f" (at most {show_mib(task.estimate.upper_mib)})"
        parts.append(f"estimate {span} by {task.estimate.source}")
    if task.booking_mib is not None:
        parts.append(f"booked {show_mib(task.booking_mib)}")
    if task.observed_mib is not None:
        parts.append(f"observed {show_mib(task.observed_mib)}")
    return " → ".join(parts) or "not known yet"


def _attempt(attempt: AttemptView, now: float) -> list[tuple[str, str]]:
    from carma.cli.output import moment
    from carma.cli.wording import outcome_text
    from carma.core.units import show_mib, show_s

    outcome = outcome_text(attempt.outcome) if attempt.outcome else "runs" if attempt.started_at else "starting"
    began = attempt.started_at or attempt.placed_at
    took = show_s((attempt.ended_at or now) - began)
    memory = f"booked {show_mib(attempt.booking_mib)} ({attempt.booking_source})"
    if attempt.observed_mib is not None:
        memory += f", observed {show_mib(attempt.observed_mib)}"
    return [
        (f"{attempt.number}", f"{outcome}; {moment(began)}, {took}" + (", alone on its GPUs" if attempt.alone else "")),
        ("  blame", attempt.blame or ""),
        ("  memory", memory),
        ("  energy", f"{attempt.energy_j / 3600:.1f} Wh" if attempt.energy_j else ""),
        ("  why there", attempt.decision),
        ("  stdout", attempt.stdout),
        ("  stderr", attempt.stderr if attempt.stderr != attempt.stdout else ""),
    ]
