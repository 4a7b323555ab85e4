"""The figures of simulated runs, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from carma.cli.output import Column, heading, print_json, print_table
from carma.core.model.units import show_count, show_j, show_s
from carma_lab.runs.figures import Figures


class Line(NamedTuple):
    field: str
    label: str
    show: Callable[[Any], str]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


FAILED = Line("failed", "FAILED TASKS", str)  # before all others, where there are any
LINES = (
    Line("makespan_s", "makespan", show_s),
    Line("wait_mean_s", "mean wait", show_s),
    Line("wait_p95_s", "p95 wait", show_s),
    Line("completion_mean_s", "mean completion", show_s),
    Line("completion_p95_s", "p95 completion", show_s),
    Line("slowdown_mean", "mean slowdown", _times),
    Line("slowdown_p95", "p95 slowdown", _times),
    Line("ooms", "out of memory", str),
    Line("innocent_ooms", "of them innocent", str),
    Line("sm_active_mean", "SM activity", _share),
    Line("energy_j", "energy", show_j),
)


def show(trace: str, on: str, found: Mapping[str, Figures], *, as_json: bool) -> None:
    """`on`: the server, which `--gpu a100` does not tell by itself."""
    if as_json:
        values = [{"trace": trace, "policy": name, **msgspec.to_builtins(one)} for name, one in found.items()]
        print_json(values[0] if len(values) == 1 else values)
        return
    heading(f"{trace}: {show_count(max(one.tasks for one in found.values()), 'task')} on {on}")
    columns = [Column(""), *(Column(name, right=True) for name in found)]
    lines = (FAILED, *LINES) if any(figures.failed for figures in found.values()) else LINES
    rows = [[line.label, *(line.show(getattr(figures, line.field)) for figures in found.values())] for line in lines]
    print_table(columns, rows)
