"""`carma explain`: the decision as it was taken, GPU by GPU."""

from __future__ import annotations

from carma.cli.verb import json_flag, task_id, verb
from carma.wire.api_types import ExplainEntry, Explanation

EXAMPLES = """
carma explain 12          why it waits, or why it runs where it runs
carma explain 12 --json   one entry a GPU
"""


@verb("explain", examples=EXAMPLES)
@task_id
@json_flag
def command(task: int, as_json: bool) -> None:
    """Why a task is where it is: what it needs, and each GPU with its score or the reason why not."""
    from carma.cli.connection import connect

    with connect() as client:
        explanation = client.explain(task)
    if as_json:
        from carma.cli.output import print_json

        return print_json(explanation.entries)
    return _card(explanation)


def _card(explanation: Explanation) -> None:
    from carma.cli.output import heading, moment, print_facts
    from carma.cli.wording import by
    from carma.core.model.units import show_mib

    heading(f"task {explanation.task}  {explanation.state}")
    over = explanation.state == "finished"
    source = f" ({by(explanation.needs_source)})" if explanation.needs_source else ""
    needs = (
        f"{show_mib(explanation.needs_mib)} on each GPU{source}" if explanation.needs_mib is not None else "not known"
    )
    print_facts(
        [
            ("policy", explanation.policy),
            ("needed" if over else "needs", needs),
            ("ended" if over else "reason", explanation.reason),
            ("starts by", moment(explanation.reserved_start_at)),
            (f"attempt {explanation.attempt}" if over else "", explanation.decision if over else ""),
        ]
    )
    if not over or explanation.attempt is not None:  # else no GPU was ever chosen
        print_entries(explanation.entries)


def print_entries(entries: tuple[ExplainEntry, ...]) -> None:
    """One row a GPU. The reason may be long and is what people came for: it wraps, it is not cut."""
    from rich.table import Table
    from rich.text import Text

    from carma.cli.output import print_plain, safe
    from carma.cli.wording import figure

    if not entries:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("GPU", "VERDICT"):
        table.add_column(title, no_wrap=True)
    table.add_column("SCORE", no_wrap=True)
    table.add_column("WHY", overflow="fold")
    for entry in entries:
        verdict, style = _verdict(entry)
        figures = [figure(name, value) for name, value in entry.parts.items()]
        gpu = str(entry.index) if entry.index >= 0 else entry.gpu
        why = entry.reason if not entry.accepted else ", ".join(figures[1:])  # the verdict says the rest
        table.add_row(Text(gpu), Text(verdict, style), Text(safe("".join(figures[:1]) or "-")), Text(safe(why)))
    print_plain(table)


def _verdict(entry: ExplainEntry) -> tuple[str, str]:
    if entry.chosen:
        return "chosen", "green"
    return ("possible", "") if entry.accepted else ("refused", "red")
