"""The figures of simulated runs, side by side."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from carma.cli.output import Column, heading, print_json, print_table
from carma.core.model.units import show_count
from carma_lab.reports.figure_list import LINES, Line, shown
from carma_lab.runs.figures import Figures

SHOWN = (
    *("makespan_s", "wait_mean_s", "wait_p95_s", "completion_mean_s", "completion_p95_s", "slowdown_mean"),
    *("slowdown_p95", "ooms", "innocent_ooms", "sm_active_mean", "energy_j"),
)
FAILED = Line("failed", "FAILED TASKS", str)  # the first line if any task failed


def show(trace: str, on: str, found: Mapping[str, Figures], *, as_json: bool) -> None:
    """`on` names the cards; a short name such as `--gpu a100` does not."""
    if as_json:
        values = [{"trace": trace, "policy": name, **msgspec.to_builtins(one)} for name, one in found.items()]
        print_json(values[0] if len(values) == 1 else values)
        return
    heading(f"{trace}: {show_count(max(one.tasks for one in found.values()), 'task')} on {on}")
    columns = [Column(""), *(Column(name, right=True) for name in found)]
    lines = [line for line in LINES if line.field in SHOWN]
    if any(figures.failed for figures in found.values()):
        lines.insert(0, FAILED)
    rows = [[line.label, *(shown(line, getattr(figures, line.field)) for figures in found.values())] for line in lines]
    print_table(columns, rows)
