"""Scales the tasks measured on an H200 to an A100 40 GB, and prints the difference from published figures.

    python -m lab.tools.profile_tables
    python -m lab.tools.profile_tables --write lab/src/carma_lab/traces/tasks.csv
    python -m lab.tools.profile_tables --check lab/results/simulation/demands.json

Reads lab/results/h200/profiles.json (`python -m carma_lab.bench.gpu.profiles`). The scaling and what it assumes is in
lab/tools/card_scaling.py; how long a step takes on the A100, its loader included, in
lab/src/carma_lab/bench/gpu/profile_tasks.py.

What was published of each task alone on an A100 is in lab/results/a100/solo.csv; `--published` takes another such file,
with the columns name (as in the traces), sm_active, sm_occupancy, dram_active and, where known, gpu (a row for each
GPU), gr_active, power_w and start_s. `--write` puts demands into the table of tasks that all shipped traces refer to:
what was published where there is anything, else what was scaled; its comment lines are for people to write. `--check`
simulates exclusive runs of the shipped traces with that table and holds them, and the scaling, against what was
published (lab/tools/demand_check.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from carma.traces.schema import Trace, TraceTask
from carma.traces.table import SHIPPED, find, read_table
from carma_lab.bench.gpu.profile_tasks import TASKS, Task
from carma_lab.simulator import simulated_cards
from carma_lab.traces.writer import write_table
from lab.tools import published as publishing
from lab.tools.card_scaling import A100_40, H200, Rates, Scaled, Shown, scale
from lab.tools.published import FIGURES, Solo
from tools.markdown import table

PROFILES = Path("lab/results/h200/profiles.json")
RAMP_S = 20.0  # assumed. Published: what 50 such tasks hold 30 s after their first activity is what they hold at 200 s


class Pair(NamedTuple):
    """A task as it was measured, and as it is on the A100."""

    task: Task
    row: Mapping[str, Any]
    scaled: Scaled


def load(path: Path, to: Rates = A100_40) -> tuple[list[Pair], list[str]]:
    """The tasks that were measured, and why others were not."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in measured["rows"]}
    of = H200 if measured["about"].get("idle_w") is None else _with_idle(measured["about"])
    pairs, missing = [], []
    for task in TASKS:
        row = rows.get(task.name, {"error": "it is not in the file"})
        wanting = [name for name in (*FIGURES, "step_ms") if row.get(name) is None]
        if "error" in row or wanting:
            missing.append(f"{task.name}: {row.get('error') or 'without ' + ', '.join(wanting)}")
            continue
        pairs.append(Pair(task, row, scale(shown_of(row), of, to, known_ms=task.step_ms)))
    return pairs, missing


def _with_idle(about: Mapping[str, Any]) -> Rates:
    """The card at hand: its own idle figure and limit, where it reported them."""
    most_w = about.get("power_limit_w") or H200.most_w
    return msgspec.structs.replace(H200, idle_w=float(about["idle_w"]), most_w=float(most_w))


def shown_of(row: Mapping[str, Any]) -> Shown:
    pipes = {name: float(row.get(name) or 0.0) for name in ("tensor_active", "fp32_active")}
    return Shown(step_ms=row["step_ms"], **{name: row[name] for name in FIGURES}, **pipes)


def figures_of(scaled: Scaled) -> dict[str, float]:
    shares = {name: getattr(scaled.demand, name) or 0.0 for name in FIGURES if name != "power_w"}
    return {**shares, "power_w": scaled.power_w}


def averages(trace: Trace, pairs: Iterable[Pair]) -> tuple[dict[str, float], float]:
    """Over the GPUs that do anything, weighted by run time; and the share of that time of which nothing is known."""
    known = {name: pair for pair in pairs for name in pair.task.trace_names}
    sums, seconds, without = dict.fromkeys(FIGURES, 0.0), 0.0, 0.0
    for each in trace.tasks:
        pair = known.get(each.name)
        if pair is None:
            without += each.gpus * each.seconds
            continue
        weight = pair.task.busy_gpus * each.seconds
        seconds += weight
        for name, value in figures_of(pair.scaled).items():
            sums[name] += weight * value
    total = seconds + without
    return {name: value / (seconds or 1.0) for name, value in sums.items()}, without / (total or 1.0)


def errors(pairs: Iterable[Pair], published: Mapping[str, Solo]) -> dict[str, list[float]]:
    """Scaled less published, of every task that is in both; a task of several names counts once, with their mean."""
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for pair in pairs:
        for figure, theirs in published_of(pair.task, published).items():
            found[figure].append(figures_of(pair.scaled)[figure] - theirs)
    return found


def published_of(task: Task, published: Mapping[str, Solo]) -> dict[str, float]:
    """The figures that are known, each a mean over the task's names."""
    solos = [published[name].figures for name in task.trace_names if name in published]
    known = {figure: [one[figure] for one in solos if figure in one] for figure in FIGURES}
    return {figure: fmean(values) for figure, values in known.items() if values}


def print_tasks(pairs: Sequence[Pair]) -> None:
    print(
        "Each task alone. H200: measured, without a loader. A100: scaled; a step as published, its loader included.\n"
    )
    head = ("task", "H200 step ms", "SM", "occ.", "DRAM", "GR", "W", "MiB", "A100 GPU ms", "of a step of", "waits")
    rows = [
        (
            pair.task.name,
            f"{pair.row['step_ms']:.1f}",
            *(f"{pair.row[name]:.2f}" for name in FIGURES[:4]),
            f"{pair.row['power_w']:.0f}",
            str(pair.row.get("used_mib") or "-"),
            f"{pair.scaled.gpu_ms:.1f}",
            f"{pair.scaled.step_ms:.1f}",
            f"{pair.scaled.waits:.2f}" if pair.scaled.gpu_ms <= pair.scaled.step_ms else "none: too slow",
            *(f"{value:.2f}" for name, value in figures_of(pair.scaled).items() if name != "power_w"),
            f"{pair.scaled.demand.power:.2f}",
            f"{pair.scaled.power_w:.0f}",
        )
        for pair in pairs
    ]
    print(table((*head, "SM ", "occ. ", "DRAM ", "GR ", "power", "W "), rows))


def print_averages(pairs: Sequence[Pair]) -> None:
    print("\nMeans over the busy GPUs of an exclusive run, beside what was published for other traces of such tasks.\n")
    rows = []
    for name in SHIPPED:
        values, without = averages(find(name), pairs)
        rows.append((name, *(_beside(values[figure], figure) for figure in publishing.RANGES), f"{without:.0%}"))
    titles = (f"{figure} ({low:g} to {high:g})" for figure, (low, high) in publishing.RANGES.items())
    print(table(("trace", *titles, "unknown"), rows))


def _beside(value: float, figure: str) -> str:
    """The value, and how far it lies outside what was published."""
    low, high = publishing.RANGES[figure]
    off = min(0.0, value - low) + max(0.0, value - high)
    form = ".0f" if figure == "power_w" else ".2f"
    return f"{value:{form}} ({off / (low if off < 0 else high):+.0%})" if off else f"{value:{form}} (within)"


def print_errors(pairs: Sequence[Pair], published: Mapping[str, Solo]) -> None:
    print("\nScaled less published, task by task alone on an A100. The scaling is not blind to such figures, power is")
    print("fitted on them (lab/tools/card_scaling.py).\n")
    rows = [
        (
            figure,
            str(len(found)),
            f"{fmean(found):+.3f}",
            f"{fmean(map(abs, found)):.3f}",
            f"{max(map(abs, found)):.3f}",
        )
        for figure, found in errors(pairs, published).items()
        if found
    ]
    print(table(("figure", "tasks", "mean error", "mean absolute error", "at most"), rows))


def write_demands(pairs: Iterable[Pair], published: Mapping[str, Solo], path: Path) -> tuple[int, int]:
    """Into a table of tasks; how many rows now have published figures, and how many scaled ones."""
    before = read_table(path)
    scaled = {name: pair.scaled.demand for pair in pairs for name in pair.task.trace_names if name not in published}
    tasks = dict(before.tasks)
    for name, task in before.tasks.items():
        if name in published:
            tasks[name] = with_published(task, published[name])
        elif name in scaled:
            places = ("sm_active", "sm_occupancy", "dram_active", "gr_active", "power")
            found = {place: round(getattr(scaled[name], place), 3) for place in places}
            tasks[name] = msgspec.structs.replace(task, **found)
    write_table(msgspec.structs.replace(before, tasks=tasks), path)
    return len(published.keys() & tasks.keys()), len(scaled.keys() & tasks.keys())


def with_published(task: TraceTask, solo: Solo) -> TraceTask:
    """What is known of it takes the place of what stood there; the ramp is assumed for all."""
    found: dict[str, Any] = {figure: round(value, 3) for figure, value in solo.figures.items() if figure != "power_w"}
    if "power_w" in solo.figures:
        found["power"] = round(simulated_cards.A100_40.share_of(solo.figures["power_w"]), 3)
    if solo.start_s is not None:
        found["start_s"] = round(solo.start_s, 1)
    if solo.gpus == task.gpus:
        found["busy_gpus"] = 0 if solo.busy_gpus == solo.gpus else solo.busy_gpus
    return msgspec.structs.replace(task, ramp_s=RAMP_S, **found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.tools.profile_tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--published", type=Path, default=publishing.SOLO, help="what was published of each task")
    parser.add_argument("--write", type=Path, metavar="TABLE", help="put the demands into this table of tasks")
    parser.add_argument("--check", type=Path, metavar="FILE", help="hold all against what was published, and write it")
    args = parser.parse_args(argv)
    pairs, missing = load(args.profiles)
    published = publishing.read(args.published)
    if args.check is not None:
        from lab.tools.demand_check import check  # it builds on this module

        check(pairs, published, args.check)
        return 0
    print_tasks(pairs)
    print_averages(pairs)
    print_errors(pairs, published)
    for why in missing:
        print(f"\nNot measured: {why}")
    if args.write is not None:
        as_published, as_scaled = write_demands(pairs, published, args.write)
        print(f"\n{as_published} tasks written as published and {as_scaled} as scaled into {args.write}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
