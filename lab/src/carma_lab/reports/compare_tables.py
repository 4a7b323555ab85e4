"""A comparison as tables for the terminal and the HTML page. The first row is the header."""

from __future__ import annotations

from carma.core.model.units import show_s
from carma_lab.reports.compare import Comparison
from carma_lab.reports.drawing import Picture
from carma_lab.reports.figure_list import LINES, shown
from carma_lab.reports.html_page import Table, page, picture_section, section

CHANGES = "most different"


def comparison_page(found: Comparison, drawn: list[Picture]) -> str:
    tables = [section(trace, side_by_side(found, trace)) for trace in found.traces]
    if len(found.traces) > 1:
        note = "Ratios are geometric means over the traces; counts are sums."
        tables.append(section("Over all traces", overall(found), note))
    tables.append(section("Tasks whose completion differs most", changes(found)))
    lead = f"Ratios are relative to {found.variants[0]}. Below 1 means shorter, or less energy."
    heading = f"{', '.join(found.variants[:-1])} and {found.variants[-1]}"
    return page(heading, [lead], [*tables, *map(picture_section, drawn)])


def side_by_side(found: Comparison, trace: str) -> Table:
    """Figures of one trace, with the ratio to the first variant."""
    ran = [label for label in found.variants if label in found.values[trace]]
    head = [trace, *(cell for place, label in enumerate(ran) for cell in ([label, "ratio"] if place else [label]))]
    rows = []
    for line in LINES:
        values = [found.values[trace][label][line.field] for label in ran]
        if all(value is None for value in values):
            continue
        cells = [line.label]
        for place, (label, value) in enumerate(zip(ran, values, strict=True)):
            cells.append(shown(line, value))
            if place:
                cells.append("" if line.counted else _ratio(found.ratios[trace][label][line.field]))
        rows.append(cells)
    return [head, *rows]


def overall(found: Comparison) -> Table:
    """Over all traces: geometric means of ratios, sums of counts."""
    rows = []
    for line in LINES:
        values = [found.overall[label][line.field] for label in found.variants]
        if any(value is not None for value in values):
            show = (lambda value, line=line: shown(line, value)) if line.counted else _ratio
            rows.append([line.label, *(show(value) for value in values)])
    return [[f"{len(found.traces)} traces", *found.variants], *rows]


def changes(found: Comparison) -> Table:
    """Tasks whose completion differs most from the first variant's."""
    several = len(found.traces) > 1
    rows = [[CHANGES, *(["trace"] if several else []), "under", "completion", "first run", "waited", "first run"]]
    for one in found.tasks:
        times_s = (one.other_completion_s, one.completion_s, one.other_wait_s, one.wait_s)
        trace = [one.trace] if several else []
        rows.append([f"{one.task} {one.name}", *trace, one.variant, *map(show_s, times_s)])
    return rows


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
