"""`carma explain`: the decision as it was taken, GPU by GPU."""

from __future__ import annotations

from carma.cli.verb import json_flag, task_id, verb
from carma.wire.types import ExplainEntry, Explanation

EXAMPLES = """
carma explain 12          why it waits, or why it runs where it runs
carma explain 12 --json   one entry a GPU
"""


@verb("explain", examples=EXAMPLES)
@task_id
@json_flag
def command(task: int, as_json: bool) -> None:
    """Why a task is where it is: what it needs, and each GPU with its score or the reason why not."""
    from carma.cli.connect import connect

    with connect() as client:
        explanation = client.explain(task)
    if as_json:
        from carma.cli.output import print_json

        return print_json(explanation.entries)
    return _card(explanation)


def _card(explanation: Explanation) -> None:
    from carma.cli.output import heading, moment, print_facts
    from carma.core.units import show_mib

    heading(f"task {explanation.task}  {explanation.state}")
    source = f" ({explanation.needs_source})" if explanation.needs_source else ""
    needs = (
        f"{show_mib(explanation.needs_mib)} on each GPU{source}" if explanation.needs_mib is not None else "not known"
    )
    print_facts(
        [
            ("policy", explanation.policy),
            ("needs", needs),
            ("reason", explanation.reason),
            ("starts by", moment(explanation.reserved_start_at)),
        ]
    )
    print_entries(explanation.entries)


def print_entries(entries: tuple[ExplainEntry, ...]) -> None:
    """One row a GPU. The reason may be long and is what people came for: it wraps, it is not cut."""
    from rich.table import Table
    from rich.text import Text

    from carma.cli.output import print_plain, safe

    if not entries:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("GPU", "VERDICT"):
        table.add_column(title, no_wrap=True)
    table.add_column("SCORE", no_wrap=True, justify="right")
    table.add_column("WHY", overflow="fold")
    for entry in entries:
        verdict, style = _verdict(entry)
        score = "-" if entry.score is None else f"{entry.score:.4g}"
        table.add_row(Text(str(entry.index)), Text(verdict, style), Text(score), Text(safe(_why(entry))))
    print_plain(table)


def _verdict(entry: ExplainEntry) -> tuple[str, str]:
    if entry.chosen:
        return "chosen", "green"
    return ("possible", "") if entry.accepted else ("refused", "red")


def _why(entry: ExplainEntry) -> str:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in entry.parts.items())
    return "; ".join(text for text in (entry.reason, parts) if text)
