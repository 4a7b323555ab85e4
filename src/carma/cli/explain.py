"""`carma explain`: scheduling decision for a task, GPU by GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carma.cli.connection import ask
from carma.cli.output import facts_table, heading, moment, print_json, print_rich, wrapped_table
from carma.cli.verb import json_flag, task_id, verb
from carma.cli.wording import score_text, source_text
from carma.core.model.units import show_mib
from carma.wire.api_types import ExplainEntry, Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLES = """
carma explain 12          why the task waits, or why it runs on its GPUs
carma explain 12 --json   one entry for each GPU
"""


@verb("explain", examples=EXAMPLES)
@task_id
@json_flag
def command(task: int, as_json: bool) -> None:
    """Scheduling decision for a task: its needs, and for each GPU the score or the reason for the refusal."""
    explanation = ask(lambda client: client.explain(task))
    if as_json:
        return print_json(explanation.entries)
    heading(f"task {explanation.task}  {explanation.state}")
    for table in tables(explanation):
        print_rich(table)
    return None


def tables(explanation: Explanation) -> list[RenderableType]:
    """The decision as a whole, and for each GPU."""
    over = explanation.state == "finished"
    source = f" ({source_text(explanation.needs_source)})" if explanation.needs_source else ""
    needs = "not known" if explanation.needs_mib is None else f"{show_mib(explanation.needs_mib)} on each GPU{source}"
    facts = [
        ("policy", explanation.policy),
        ("needed" if over else "needs", needs),
        ("ended" if over else "reason", explanation.reason),
        ("starts by", moment(explanation.reserved_start_at)),
        (f"attempt {explanation.attempt}", explanation.decision if over else ""),
        ("activity", "" if over else _inferred(explanation.entries)),
    ]
    chosen = not over or explanation.attempt is not None  # otherwise no GPU was ever chosen
    return [facts_table(facts), *(entries_table(explanation.entries) if chosen else [])]


def _inferred(entries: tuple[ExplainEntry, ...]) -> str:
    """The GPUs whose activity is inferred, with the consequence; empty if there are none."""
    names = ", ".join(str(entry.index) for entry in entries if entry.activity_source == "inferred")
    how = "inferred from power and utilisation; the margin for the error makes the GPU look busier than it is"
    return f"GPU {names}: {how}" if names else ""


def entries_table(entries: tuple[ExplainEntry, ...]) -> list[RenderableType]:
    """One row for each GPU. Reasons wrap and are never cut. Empty without GPUs."""
    if not entries:
        return []
    rows = []
    for entry in entries:
        accepted = ("chosen", "green") if entry.chosen else ("possible", "")
        verdict = accepted if entry.accepted or entry.chosen else ("refused", "red")
        score, *rest = [score_text(name, value) for name, value in entry.parts.items()] or ["-"]
        gpu = str(entry.index) if entry.index >= 0 else entry.gpu
        rows.append((gpu, verdict, score, ", ".join(rest) if entry.accepted else entry.reason))
    has_reasons = any(row[-1] for row in rows)
    titles = ("GPU", "VERDICT", "SCORE", "WHY")
    return [wrapped_table(rows if has_reasons else [row[:-1] for row in rows], titles if has_reasons else titles[:-1])]
