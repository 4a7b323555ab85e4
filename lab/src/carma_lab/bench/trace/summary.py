"""What the runs of `carma bench trace` show: one row for each policy, home and settings. Pure.

Repetitions are averaged; parts of a run are joined first. A ratio whose other side was not measured is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from carma_lab.bench.results_file import shown as text_of
from carma_lab.bench.trace.records import FRESH, NO_MANAGER, Results, Shown, TaskRow, TraceRun, total, weighted

COLUMNS = (
    *("policy", "home", "runs", "makespan", "of exclusive", "of no manager", "energy", "of exclusive"),
    *("completion", "slowdown, mean", "worst", "OOMs", "failed", "SM activity", "occupancy", "memory", "power"),
)
NARROW = (  # the same for a terminal
    *("policy", "home", "runs", "makespan", "/excl", "/none", "energy", "/excl"),
    *("compl", "slow", "worst", "OOM", "fail", "SM", "occ", "memory", "power"),
)
MEANS = ("sm_active", "sm_occupancy", "dram_active", "gpu_util", "memory_mib", "power_w")


def rows_of(results: Results) -> list[dict[str, Any]]:
    """In the order in which the cases were first run, those for comparison first and last."""
    cases: dict[Any, list[TraceRun]] = {}
    for run in whole(results.runs):
        cases.setdefault(run.case, []).append(run)
    alone_s = results.alone_s()
    rows = [_row(runs, alone_s) for _, runs in sorted(cases.items(), key=_rank)]
    return [_compared(row, rows) for row in rows]


def _rank(case: tuple[Any, Sequence[TraceRun]]) -> int:
    policy = case[1][0].policy
    return 0 if policy == "exclusive" else 2 if policy == NO_MANAGER else 1


def whole(runs: Iterable[TraceRun]) -> list[TraceRun]:
    """Complete runs. One in parts counts when all of its parts are there."""
    found: dict[Any, list[TraceRun]] = {}
    for run in runs:
        found.setdefault((run.case, run.repetition, run.parts), []).append(run)
    complete = [sorted(parts, key=lambda run: run.part) for parts in found.values() if len(parts) == parts[0].parts]
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in complete]


def _joined(parts: Sequence[TraceRun]) -> TraceRun:
    """One after another. A later part ran with the arrivals less the time of the parts before it."""
    tasks: list[TaskRow] = []
    before_s = 0.0
    for part in parts:
        tasks += [_later(row, before_s) for row in part.tasks]
        before_s += part.makespan_s
    return replace(parts[0], parts=1, makespan_s=before_s, tasks=tuple(tasks), shown=_shown([p.shown for p in parts]))


def _later(row: TaskRow, by_s: float) -> TaskRow:
    """Arrivals on record are those of the whole run."""
    started_s = None if row.started_s is None else row.started_s + by_s
    return replace(row, started_s=started_s, ended_s=row.ended_s + by_s)


def _shown(parts: Sequence[Shown]) -> Shown:
    energies = [part.energy_j for part in parts]
    tops = [part.memory_max_mib for part in parts]
    return Shown(
        seconds=sum(part.seconds for part in parts),
        energy_j=total(energies),
        memory_max_mib=None if None in tops else max(top for top in tops if top is not None),
        **{name: weighted([(getattr(part, name), part.seconds) for part in parts]) for name in MEANS},
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else None


def _row(runs: Sequence[TraceRun], alone_s: dict[str, float]) -> dict[str, Any]:
    makespans = [run.makespan_s for run in runs]
    tasks = [row for run in runs for row in run.tasks]
    slowdowns = [slowdown for row in tasks if (slowdown := slowdown_of(row, alone_s)) is not None]
    return {
        "policy": runs[0].policy,
        "home": runs[0].home,
        "settings": runs[0].settings,
        "runs": len(runs),
        "tasks": len(runs[0].tasks),
        "makespan_s": fmean(makespans),
        "makespan_range_s": [min(makespans), max(makespans)],
        "energy_j": _mean(run.shown.energy_j for run in runs),
        "completion_mean_s": fmean(row.completion_s for row in tasks),
        "slowdown_mean": fmean(slowdowns) if slowdowns else None,
        "slowdown_max": max(slowdowns, default=None),
        "ooms": sum(row.ooms for row in tasks),
        "failed": sum(row.outcome != "succeeded" for row in tasks),
        **{name: _mean(getattr(run.shown, name) for run in runs) for name in MEANS},
        "memory_max_mib": max((mib for run in runs if (mib := run.shown.memory_max_mib) is not None), default=None),
    }


def slowdown_of(row: TaskRow, alone_s: dict[str, float]) -> float | None:
    """Time taken / time alone; None if the task did not succeed or was not measured alone."""
    if row.outcome != "succeeded" or row.ran_s is None or row.name not in alone_s:
        return None
    return row.ran_s / alone_s[row.name]


def _compared(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    exclusive = next((one for one in rows if one["policy"] == "exclusive" and one["home"] == FRESH), {})
    unmanaged = next((one for one in rows if one["policy"] == NO_MANAGER), {})
    return {
        **row,
        "makespan_of_exclusive": _ratio(row["makespan_s"], exclusive.get("makespan_s")),
        "energy_of_exclusive": _ratio(row["energy_j"], exclusive.get("energy_j")),
        "makespan_of_no_manager": _ratio(row["makespan_s"], unmanaged.get("makespan_s")),
    }


def _ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    low, high = row["makespan_range_s"]
    spread = f" ({low:.0f} to {high:.0f})" if row["runs"] > 1 else ""
    pairs = "".join(f", {name}={value}" for name, value in row["settings"].items())
    return (
        "no manager" if row["policy"] == NO_MANAGER else f"{row['policy']}{pairs}",
        "-" if row["policy"] == NO_MANAGER else row["home"],
        str(row["runs"]),
        f"{row['makespan_s']:.0f} s{spread}",
        text_of(row["makespan_of_exclusive"]),
        text_of(row["makespan_of_no_manager"]),
        _unit(row["energy_j"], 1e-3, ".1f", "kJ"),
        text_of(row["energy_of_exclusive"]),
        f"{row['completion_mean_s']:.0f} s",
        text_of(row["slowdown_mean"]),
        text_of(row["slowdown_max"]),
        str(row["ooms"]),
        str(row["failed"]),
        _unit(row["sm_active"], 100.0, ".0f", "%"),
        _unit(row["sm_occupancy"], 100.0, ".0f", "%"),
        _unit(row["memory_mib"], 1 / 1024, ".1f", "GiB"),
        _unit(row["power_w"], 1.0, ".0f", "W"),
    )


def _unit(value: float | None, factor: float, form: str, unit: str) -> str:
    return "-" if value is None else f"{value * factor:{form}} {unit}"
