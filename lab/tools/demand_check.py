"""Compares the demands of the shipped traces' tasks with published figures, and writes the differences.

    python -m lab.tools.profile_tables --check lab/results/simulation/demands.json

Three things: what GPUs show over active samples of an exclusive run of each shipped trace, beside the published means
of such runs; what MAGM with measured memory makes of the same traces, beside what was published of that; and how far
the tasks measured on an H200 and scaled to an A100 are from what was published of them there. The published runs are of
other traces (Philly, Saturn, Venus) with other shares of the same tasks, so no figure has to agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

from carma.traces.table import SHIPPED, find
from carma_lab.runs.figures import Figures, quantile
from carma_lab.simulator import simulated_cards
from carma_lab.simulator.request import Request, simulation
from carma_lab.simulator.simulation import Simulation
from lab.tools import fit_power
from lab.tools.profile_tables import Pair, figures_of, published_of
from lab.tools.published import EXCLUSIVE, FIGURES, RANGES, Solo
from lab.tools.simulated_table import made_by
from tools.markdown import filled, table

SHOWN = ("sm_active", "sm_occupancy", "dram_active", "power_w")
# MAGM with the measured peak over exclusive runs (published.EXCLUSIVE). `run` is a mean over the three.
MAGM = {
    "philly": {"makespan": 0.733, "energy": 0.858},
    "saturn": {"makespan": 0.682, "energy": 0.858},
    "venus": {"makespan": 0.721, "energy": 0.879},
}
MAGM_RUN = 1.785
WRITTEN, PAGE = Path("lab/results/simulation/demands.json"), Path("docs/traces.md")
RATIOS = ("makespan", "run", "energy")


def check(pairs: Sequence[Pair], published: Mapping[str, Solo], path: Path) -> None:
    found = worked_out(pairs, published, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(found)))
    print(f"\nWritten to {path}.")
    if path == WRITTEN:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
        print(f"The tables of {PAGE} are these now.")


def worked_out(pairs: Sequence[Pair], published: Mapping[str, Solo], path: str) -> dict[str, Any]:
    tasks = [_distance(pair, published) for pair in pairs]
    makespan = prod(one["makespan"] for one in MAGM.values()) ** (1 / len(MAGM))
    return {
        "about": {
            **made_by(f"lab.tools.profile_tables --check {path}"),
            "gpu": "a100-40, simulated",
            "published": "GitHub ehsanyousefzadehasl/AEGIS; lab/results/a100/solo.csv for tasks alone",
        },
        "exclusive": {"published": EXCLUSIVE, **{name: _exclusive(name) for name in SHIPPED}},
        "magm_over_exclusive": {
            "published": {**MAGM, "run_mean": MAGM_RUN, "makespan_geometric_mean": round(makespan, 3)},
            **{name: _ratios(name) for name in SHIPPED},
        },
        "power_fit": _power_fit(),
        "most_power_of_solo_profiles_w": {
            name: round(most_power_w(one["sm_active"], fit_power.published_points()), 1)
            for name, one in EXCLUSIVE.items()
        },
        "scaled_less_published": {figure: _spread(tasks, figure) for figure in FIGURES},
        "tasks": tasks,
    }


def _exclusive(name: str) -> dict[str, float]:
    """Active is a GPU from a task's first use of it on; the published rule (memory, activity, power) is about that."""
    made = simulation(Request(trace=name, policy="exclusive", demand="none"))
    return _shown_while_active(made, made.run())


def _shown_while_active(made: Simulation, figures: Figures) -> dict[str, float]:
    """Alone on its GPUs a task takes what its row says. All other time a GPU shows nothing and draws its idle power."""
    all_s = figures.makespan_s * made.setup.gpus
    active_s = sum(row.working_gpus * row.work_s for row in made.trace.tasks)
    idle_j = made.setup.card.idle_w * (all_s - active_s)
    means = {name: getattr(figures, f"{name}_mean") * all_s / active_s for name in SHOWN if name != "power_w"}
    means["power_w"] = ((figures.energy_j or 0.0) - idle_j) / active_s
    return {name: round(value, 3 if name != "power_w" else 1) for name, value in means.items()}


def _ratios(name: str) -> dict[str, float]:
    trace = find(name)
    requests = [Request(trace=name, policy=policy, demand="none") for policy in ("exclusive", "magm")]
    alone, shared = (simulation(request, trace).run() for request in requests)
    return {
        "makespan": round(shared.makespan_s / alone.makespan_s, 3),
        "run": round(shared.run_mean_s / alone.run_mean_s, 3),
        "energy": round((shared.energy_j or 0.0) / (alone.energy_j or 1.0), 3),
        "ooms": shared.ooms,
    }


def _power_fit() -> dict[str, Any]:
    points = fit_power.published_points()
    off = [abs(error) for error in fit_power.errors(points, simulated_cards.A100_40)]
    return {
        "points": len(points),
        "mean_error_w": round(fmean(off), 1),
        "most_error_w": round(max(off), 1),
        "curve": {name: getattr(simulated_cards.A100_40, name) for name in simulated_cards.A100_40.__struct_fields__},
    }


def most_power_w(sm_active: float, points: Sequence[fit_power.Point]) -> float:
    """Maximum mean power of any mix of those tasks, idle time included, with that mean SM activity."""
    known = [(0.0, simulated_cards.A100_40.idle_w), *((point.sm_active, point.power_w) for point in points)]
    below = [one for one in known if one[0] <= sm_active]
    above = [one for one in known if one[0] > sm_active]
    return max(
        low[1] + (high[1] - low[1]) * (sm_active - low[0]) / (high[0] - low[0]) for low in below for high in above
    )


def _distance(pair: Pair, published: Mapping[str, Solo]) -> dict[str, Any]:
    scaled, theirs = figures_of(pair.scaled), published_of(pair.task, published)
    return {
        "task": pair.task.name,
        **{figure: {"scaled": round(scaled[figure], 3), "published": round(theirs[figure], 3)} for figure in theirs},
    }


def _spread(tasks: Iterable[Mapping[str, Any]], figure: str) -> dict[str, float]:
    """Spread of the absolute distance, and of the distance as a share of the published figure."""
    known = [task[figure] for task in tasks if figure in task]
    off = [abs(one["scaled"] - one["published"]) for one in known]
    shares = [each / one["published"] for each, one in zip(off, known, strict=True) if one["published"] > 0]
    return {
        "tasks": len(off),
        "median": round(median(off), 3),
        "p90": round(quantile(off, 0.9), 3),
        "median_share": round(median(shares), 3),
        "p90_share": round(quantile(shares, 0.9), 3),
    }


# The page.


def with_tables(text: str, found: Mapping[str, Any]) -> str:
    """The page with its tables replaced, between two marks."""
    return filled(text, "demands", "\n" + "\n".join(page(found)) + "\n\n")


def page(found: Mapping[str, Any]) -> list[str]:
    """The tables of docs/traces.md, line by line."""
    shown = table(("exclusive, while active", *SHOWN), _shown_rows(found["exclusive"]))
    ratios = table(("MAGM over exclusive", *RATIOS), _ratio_rows(found["magm_over_exclusive"]))
    far = table(("scaled less published", "tasks", "median", "p90", "median, share", "p90, share"), _far_rows(found))
    return [*shown.splitlines(), "", *ratios.splitlines(), "", *far.splitlines()]


def _shown_rows(exclusive: Mapping[str, Any]) -> list[tuple[str, ...]]:
    published = (f"{_text(low, name)} to {_text(high, name)}" for name, (low, high) in RANGES.items())
    return [
        ("published", *published),
        *((name, *(_text(exclusive[name][figure], figure) for figure in SHOWN)) for name in SHIPPED),
    ]


def _ratio_rows(ratios: Mapping[str, Any]) -> list[tuple[str, ...]]:
    theirs = ratios["published"]

    def span(figure: str) -> str:
        values = [theirs[name][figure] for name in MAGM]
        return f"{min(values):.2f} to {max(values):.2f}"

    rows: list[tuple[str, ...]] = [("published", span("makespan"), f"{theirs['run_mean']:.2f}", span("energy"))]
    return rows + [(name, *(f"{ratios[name][figure]:.2f}" for figure in RATIOS)) for name in SHIPPED]


def _far_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            figure,
            str(far["tasks"]),
            _text(far["median"], figure),
            _text(far["p90"], figure),
            f"{far['median_share']:.0%}",
            f"{far['p90_share']:.0%}",
        )
        for figure, far in found["scaled_less_published"].items()
    ]


def _text(value: float, figure: str) -> str:
    return f"{value:.0f} W" if figure == "power_w" else f"{value:.3f}"
