"""Writes the table of `carma bench trace` into lab/results/h200/README.md: `python -m lab.tools.trace_table`.

`--check` writes nothing and exits with 1 if the page is not up to date. Without results the page has no such section;
the section is added with the first results.
"""

from __future__ import annotations

import sys
from pathlib import Path

from carma_lab.bench.trace.records import FILE, Results, read
from carma_lab.bench.trace.summary import COLUMNS, cells, rows_of
from tools.markdown import filled, renew, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "lab" / "results" / "h200" / "README.md"
FOLDER = PAGE.parent / "trace"
MARK = "trace"
SECTION = """
## Whole tasks that arrive as in a trace

Training scripts under each policy, by `carma bench trace` ([what it does](../../../docs/benches.md#trace)).
`trace/trace.json` has every run and every task, `trace/run-*.json` what the daemon recorded. Slowdown is the time of a
task relative to the same task alone.

<!-- trace: made by `python -m lab.tools.trace_table` -->
<!-- end -->
"""


def pages(page: Path = PAGE, folder: Path = FOLDER) -> dict[Path, str]:
    text = page.read_text(encoding="utf-8")
    if not (folder / FILE).exists():
        return {page: text}
    if f"<!-- {MARK}:" not in text:
        text += SECTION
    return {page: filled(text, MARK, f"\n{made(read(folder))}\n")}


def made(results: Results) -> str:
    return table(COLUMNS, [cells(row) for row in rows_of(results)])


if __name__ == "__main__":
    sys.exit(renew("lab.tools.trace_table", __doc__, sys.argv[1:], pages))
