"""The figures of a run with their names and units, for all tables and pictures; tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from carma.core.model.units import show_j, show_mib, show_s
from carma_lab.runs.figures import Figures
from carma_lab.runs.record import About


class Line(NamedTuple):
    field: str  # of Figures
    label: str
    show: Callable[[Any], str]
    counted: bool = False  # a count, which may be 0 and has no ratio


def times(value: float) -> str:
    return f"{value:.2f} x"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _watts(value: float) -> str:
    return f"{value:.0f} W"


LINES = (
    Line("makespan_s", "makespan", show_s),
    Line("wait_mean_s", "mean wait", show_s),
    Line("wait_p95_s", "p95 wait", show_s),
    Line("completion_mean_s", "mean completion", show_s),
    Line("completion_p95_s", "p95 completion", show_s),
    Line("run_mean_s", "mean run", show_s),
    Line("slowdown_mean", "mean slowdown", times),
    Line("slowdown_p95", "p95 slowdown", times),
    Line("slowdown_max", "worst slowdown", times),
    Line("failed", "not succeeded", str, counted=True),
    Line("ooms", "out of memory", str, counted=True),
    Line("innocent_ooms", "of them innocent", str, counted=True),
    Line("wasted_gpu_s", "wasted GPU time", show_s, counted=True),
    Line("sm_active_mean", "SM activity", share),
    Line("sm_occupancy_mean", "SM occupancy", share),
    Line("dram_active_mean", "DRAM activity", share),
    Line("memory_mib_mean", "memory on a GPU", show_mib),
    Line("power_w_mean", "power of a GPU", _watts),
    Line("energy_j", "energy", show_j),
)


def value_of(figures: Figures, line: Line) -> float | None:
    value: float | None = getattr(figures, line.field)
    return value


def shown(line: Line, value: float | None) -> str:
    return "-" if value is None else line.show(value)


def title(about: About) -> str:
    """`t1 under magm: 4 x NVIDIA A100-SXM4-40GB, simulated`."""
    how = "simulated" if about.simulated else "real"
    return f"{about.trace} under {about.policy}: {about.gpus} x {about.gpu}, {how}"


def conditions(about: About) -> str:
    """The other conditions of a run: memory source, knowledge of demand and run time, mechanism, seed, settings."""
    parts = [f"memory: {about.memory}" if about.memory else ""]
    parts.append(f"demand: {about.demand}" if about.demand else "")
    parts.append(f"mechanism: {about.mechanism}")
    if about.noise:
        parts.append(f"noise {about.noise:g}")
    if about.noise or about.seed:
        parts.append(f"seed {about.seed}")
    parts += [f"{name} = {value}" for name, value in about.settings.items()]
    return ", ".join(part for part in parts if part)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """Escaped: a bar would end the cell, a newline the row."""
    return " ".join(text.split()).replace("|", "\\|")


def figure(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
