"""One HTML page with tables and pictures, without external files and scripts. Light or dark as the browser requests."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from carma_lab.reports.drawing import Picture, inline
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
