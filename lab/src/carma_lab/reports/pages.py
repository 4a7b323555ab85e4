"""Tables and HTML pages of a run and of a comparison. The terminal prints the same tables.

A page has no external files and no scripts, and is light or dark as the browser requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from carma.core.model.units import show_s
from carma_lab.reports.compare import Comparison
from carma_lab.reports.drawing import Picture, inline
from carma_lab.reports.fairness import Fairness
from carma_lab.reports.figure_list import LINES, conditions, shown, times, title, value_of
from carma_lab.reports.summary import Summary
from gpumemnet.output_file import MARK, write_file

STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --sheet: #fefefe; --grid: #d4d8de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --sheet: #14181f; --grid: #39424e; } }
body { color: var(--ink); background: var(--sheet); font: 15px/1.45 system-ui, sans-serif; margin: 2em auto;
  max-width: 62em; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .9em .25em 0; border-bottom: 1px solid var(--grid); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1em 0; overflow-x: auto; } svg { width: 100%; min-width: 40em; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; } footer { margin-top: 3em; font-size: .85em; }
"""
Table = list[list[str]]  # the first row is the header


def write_text(text: str, path: Path | str) -> Path:
    write_file(str(path), text.encode())
    return Path(path)


def page(heading: str, lead: Iterable[str], sections: Iterable[str]) -> str:
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta name="generator" content="{MARK}">',
        f"<title>{escape(heading)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(heading)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lead if line),
        *sections,
        "<footer>Times are hours:minutes:seconds. Activity, memory and power are means over all GPUs.</footer>",
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def section(heading: str, rows: Table, note: str = "") -> str:
    head, *body = rows
    cells = [
        "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>",
        *("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body),
    ]
    table = "\n".join(['<div class="wide"><table>', *cells, "</table></div>"])
    return f"<h2>{escape(heading)}</h2>\n{table}" + (f"\n<p>{escape(note)}</p>" if note else "")


def picture_section(picture: Picture) -> str:
    return f"<h2>{escape(picture.about)}</h2>\n<figure>{inline(picture)}</figure>"


# Of a run.


def run_page(found: Summary, drawn: list[Picture]) -> str:
    figures = [["figure", "value"], *([line.label, shown(line, value_of(found.figures, line))] for line in LINES)]
    sections = [section("Figures", figures), section("Distributions", spreads(found))]
    if len(found.outcomes) > 1 or len(found.attempts) > 1:
        kinds = dict.fromkeys([*found.outcomes, *found.attempts])
        rows = [
            [kind.replace("_", " "), str(found.outcomes.get(kind, 0)), str(found.attempts.get(kind, 0))]
            for kind in kinds
        ]
        sections.append(section("Outcomes", [["outcome", "tasks", "attempts"], *rows]))
    if found.fairness is not None:
        note = "Wait, completion, slowdown and finish-time fairness are means over the tasks of a user."
        if indices := jain_indices(found.fairness):
            note += f" Jain's index: {indices}."
        sections.append(section("Users", users(found.fairness), note))
    return page(title(found.about), [conditions(found.about)], [*sections, *map(picture_section, drawn)])


def spreads(found: Summary) -> Table:
    rows = [["of tasks", "mean", "p50", "p95", "max", "tasks"]]
    for label, spread, show in (
        ("wait", found.wait_s, show_s),
        ("run", found.run_s, show_s),
        ("completion", found.completion_s, show_s),
        ("slowdown", found.slowdown, times),
    ):
        if spread is None:
            rows.append([label, "-", "-", "-", "-", "0"])
        else:
            values = (spread.mean, spread.p50, spread.p95, spread.max)
            rows.append([label, *map(show, values), f"{spread.count:,}"])
    return rows


def users(fairness: Fairness) -> Table:
    rows = [["user", "tasks", "GPU time", "wait", "completion", "slowdown", "finish-time", "worst"]]
    for user in fairness.users:
        times_s = (user.gpu_s, user.wait_mean_s, user.completion_mean_s)
        ratios = (user.slowdown_mean, user.finish_time_mean, user.finish_time_max)
        shown_ratios = ("-" if value is None else f"{value:.2f}" for value in ratios)
        rows.append([user.user or "-", f"{user.tasks:,}", *map(show_s, times_s), *shown_ratios])
    return rows


def jain_indices(fairness: Fairness) -> str:
    indices = {
        "finish-time": fairness.jain_finish_time,
        "slowdown": fairness.jain_slowdown,
        "GPU time": fairness.jain_service,
    }
    return ", ".join(f"{label} {value:.3f}" for label, value in indices.items() if value is not None)


# Of a comparison.

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
