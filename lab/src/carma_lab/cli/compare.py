"""`carma compare`: runs side by side; the first one is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from carma.cli.verb import verb
from carma_lab.cli.report_output import ReportOutput, report_flags

if TYPE_CHECKING:
    from carma_lab.reports.compare import Comparison

EXAMPLES = """
carma compare exclusive.json magm.json
carma compare t1-exclusive.json t1-magm.json mix-exclusive.json mix-magm.json    two traces
carma compare real.json simulated.json --json
carma compare exclusive.json magm.json lug.json --out pictures
"""
NAMED = 14  # minimum width of the names of tasks and traces


@verb("compare", examples=EXAMPLES)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN RUN...")
@report_flags
def command(files: tuple[Path, ...], output: ReportOutput) -> None:
    """Compare runs of carma simulate --out and carma run-report --save.

    The first run is the reference for each trace; each other run has its figure and the ratio to the reference. With
    several traces the last table has the geometric means. Then follow the tasks whose completion differs most.
    """
    from carma_lab.reports.compare import compare
    from carma_lab.reports.compare_pictures import NAMES, pictures
    from carma_lab.reports.pages import comparison_page
    from carma_lab.runs.record import read

    if len(files) < 2:
        raise click.UsageError("at least two runs are needed; carma run-report RUN reports one")
    output.check(NAMES)
    found = compare([read(file) for file in files])
    drawn = pictures(found)
    output.write(found, drawn, lambda: comparison_page(found, drawn), lambda: _show(found))


def _show(found: Comparison) -> None:
    from carma.cli.output import Column, print_facts, print_table
    from carma_lab.reports.pages import CHANGES, changes, overall, side_by_side

    tables = [side_by_side(found, trace) for trace in found.traces]
    if len(found.traces) > 1:
        tables.append(overall(found))
    tables.append(changes(found))
    named = 2 if len(found.traces) > 1 else 1  # columns of the last table that may be cut: task and trace
    # Labels that leave no room for figures are listed first, and replaced by numbers.
    if not all(map(_fits, tables[:-1])) or not _fits(tables[-1], named):
        numbered = {label: f"run {place}" for place, label in enumerate(found.variants, 1)}
        print_facts([(number, label) for label, number in numbered.items()])
        print()
        tables = [[[numbered.get(cell, cell) for cell in row] for row in table] for table in tables]
    for head, *rows in tables:
        cut = named if head[0] == CHANGES else 0
        columns = [Column(title, right=place >= max(1, cut), flexible=place < cut) for place, title in enumerate(head)]
        print_table(columns, rows)
        print()


def _fits(table: Sequence[Sequence[str]], flexible: int = 0) -> bool:
    """`flexible`: number of columns at the beginning that may be cut."""
    from carma.cli.output import terminal_width

    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    widths = [min(width, NAMED) if place < flexible else width for place, width in enumerate(widths)]
    return sum(widths) - 2 <= terminal_width()
