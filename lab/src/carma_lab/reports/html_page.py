"""One HTML page of a run with tables and pictures, without external files and scripts. Light or dark as the browser
requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from carma.core.model.units import show_s
from carma_lab.reports.drawing import Picture, inline
from carma_lab.reports.fairness import Fairness
from carma_lab.reports.figure_list import LINES, conditions, shown, title, value_of
from carma_lab.reports.pictures import pictures
from carma_lab.reports.summary import Spread, Summary
from carma_lab.runs.record import Run
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
Table = Sequence[Sequence[str]]  # the first row is the header


def write(run: Run, found: Summary, path: Path | str) -> Path:
    text = page(title(run.about), [conditions(run.about)], [*_tables(found), *_pictures(pictures(run))])
    return write_text(text, path)


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


def _pictures(drawn: Sequence[Picture]) -> list[str]:
    return [picture_section(picture) for picture in drawn]


def picture_section(picture: Picture) -> str:
    return f"<h2>{escape(picture.about)}</h2>\n<figure>{inline(picture)}</figure>"


def _tables(summary: Summary) -> list[str]:
    figures = [["figure", "value"], *([line.label, shown(line, value_of(summary.figures, line))] for line in LINES)]
    spreads = [
        ["of tasks", "mean", "p50", "p95", "max", "tasks"],
        _spread("wait", summary.wait_s, seconds=True),
        _spread("run", summary.run_s, seconds=True),
        _spread("completion", summary.completion_s, seconds=True),
        _spread("slowdown", summary.slowdown, seconds=False),
    ]
    sections = [section("Figures", figures), section("Distributions", spreads)]
    if len(summary.outcomes) > 1 or len(summary.attempts) > 1:
        rows = [["outcome", "tasks", "attempts"]]
        for kind in dict.fromkeys([*summary.outcomes, *summary.attempts]):
            rows.append(
                [kind.replace("_", " "), str(summary.outcomes.get(kind, 0)), str(summary.attempts.get(kind, 0))]
            )
        sections.append(section("Outcomes", rows))
    if summary.fairness is not None:
        sections.append(_users(summary.fairness))
    return sections


def _spread(label: str, spread: Spread | None, *, seconds: bool) -> list[str]:
    if spread is None:
        return [label, "-", "-", "-", "-", "0"]
    values = (spread.mean, spread.p50, spread.p95, spread.max)
    return [label, *(show_s(value) if seconds else f"{value:.2f} x" for value in values), f"{spread.count:,}"]


def _users(fairness: Fairness) -> str:
    rows = [["user", "tasks", "GPU time", "mean wait", "mean completion", "slowdown", "finish-time fairness", "worst"]]
    for user in fairness.users:
        ratios = (user.slowdown_mean, user.finish_time_mean, user.finish_time_max)
        rows.append(
            [
                user.user or "-",
                f"{user.tasks:,}",
                show_s(user.gpu_s),
                show_s(user.wait_mean_s),
                show_s(user.completion_mean_s),
                *("-" if value is None else f"{value:.2f}" for value in ratios),
            ]
        )
    indices = [
        f"{label} {value:.3f}"
        for label, value in (
            ("finish-time fairness", fairness.jain_finish_time),
            ("slowdown", fairness.jain_slowdown),
            ("GPU time", fairness.jain_service),
        )
        if value is not None
    ]
    return section("Users", rows, f"Jain's index: {', '.join(indices)}." if indices else "")
