"""The shipped policy compared with others on traces on which nothing was tuned, with the tables of docs/goodput.md and
the README.

    python -m lab.tools.policy_evaluation
    python -m lab.tools.policy_evaluation --tables      the tables only, from the file of results

1. 50 generated traces with true rates that deviate from the sharing model as was measured (noise 1), and the four
   shipped traces without and with that deviation.
2. Figures relative to exclusive GPUs in the order of arrival on the same trace: geometric means with 95 % intervals
   over the generated traces, and a paired comparison with `magm`.

Constants of `goodput` were chosen on the traces `generate(recipe(seed))` with seeds below 5,100; those here begin at
7,000.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from msgspec.structs import replace
from scipy.stats import t as student  # type: ignore[import-untyped]

from carma.core.policies.exclusive import POLICY as EXCLUSIVE
from carma.core.scheduling.policy import Waits
from carma.traces import Trace, find
from carma.traces.table import shipped_table
from carma_lab.bench.paper.workloads import at_load
from carma_lab.runs.figures import Figures
from carma_lab.simulator.request import Request, simulation
from carma_lab.simulator.setup import Demands
from carma_lab.simulator.simulation import Simulation
from carma_lab.traces.generate import Recipe, generate
from lab.tools.simulated_table import GPUS, about
from tools.markdown import folded, placed, renew, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results" / "simulation" / "policies.json"
GENERATED, FIRST_SEED = 50, 7_000
SHIPPED = ("t1", "t2", "mix", "heavy")
RATIOS = ("makespan_s", "completion_mean_s", "completion_p95_s", "energy_j")
SLOWDOWNS = ("slowdown_mean", "slowdown_p95", "slowdown_max")


class Variant(NamedTuple):
    name: str
    policy: str
    demand: Demands  # what is known before a task runs
    shortest_first: bool = False


VARIANTS = (
    Variant("exclusive, shortest first, run times known", "exclusive", "measured", shortest_first=True),
    Variant("exclusive, shortest first, run times from history", "exclusive", "history", shortest_first=True),
    Variant("`magm`, nothing known", "magm", "none"),
    Variant("`goodput`, nothing known", "goodput", "none"),
    Variant("`goodput`, history", "goodput", "history"),
    Variant("`goodput`, predicted by trial runs", "goodput", "estimate"),
    Variant("`goodput`, all known", "goodput", "measured"),
)
BASELINE = Variant("exclusive", "exclusive", "none")
COMPARED = "`magm`, nothing known"


class Case(NamedTuple):
    trace: str  # a shipped trace, or the seed of a generated one
    noise: float


CASES = (
    *(Case(name, noise) for name in SHIPPED for noise in (0.0, 1.0)),
    *(Case(str(seed), 1.0) for seed in range(FIRST_SEED, FIRST_SEED + GENERATED)),
)


def recipe(seed: int) -> Recipe:
    return Recipe(tasks=60 + 10 * (seed % 4), rate_per_hour=60.0, seed=seed, burst=seed % 2 == 1)


def trace_of(name: str) -> Trace:
    """Work of 2, 2.5 or 3 times what the GPUs do, one task on each, while tasks still arrive."""
    if not name.isdigit():
        return find(name)
    seed = int(name)
    return at_load(generate(recipe(seed), shipped_table()), GPUS, 2.0 + 0.5 * (seed % 3))


def shortest_first(waiting: Sequence[Waits], _running_s: float, _gpus: int) -> list[int]:
    known = [(task.alone_s, place) for place, task in enumerate(waiting) if task.alone_s is not None]
    return [place for _, place in sorted(known)]


def run(case: Case, variant: Variant) -> Figures:
    seed = int(case.trace) if case.trace.isdigit() else 0
    request = Request(trace=case.trace, policy=variant.policy, demand=variant.demand, noise=case.noise, seed=seed)
    made = simulation(request, trace_of(case.trace))
    if variant.shortest_first:
        policy = replace(EXCLUSIVE, name="shortest-first", urgent=shortest_first)
        made = Simulation(made.trace, replace(made.setup, policy=policy))
    return made.run()


def measured(case: Case) -> dict[str, dict[str, float]]:
    """Every variant on one trace, relative to exclusive GPUs."""
    base = run(case, BASELINE)
    found = {}
    for variant in VARIANTS:
        figures = run(case, variant)
        ratios = {name: getattr(figures, name) / getattr(base, name) for name in RATIOS}
        found[variant.name] = {**ratios, **{name: getattr(figures, name) for name in SLOWDOWNS}, "ooms": figures.ooms}
    return {name: {key: round(value, 4) for key, value in row.items()} for name, row in found.items()}


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def geometric(values: Sequence[float]) -> Interval:
    """The geometric mean with its 95 % interval (Student's t of the logarithms)."""
    logs = [log(value) for value in values]
    half = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / len(logs) ** 0.5
    return Interval(*(round(exp(fmean(logs) + part), 4) for part in (0.0, -half, half)))


def summary(rows: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Over the generated traces."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        of = [row[variant.name] for row in rows]
        to_magm = [row[variant.name]["makespan_s"] / row[COMPARED]["makespan_s"] for row in rows]
        found[variant.name] = {
            **{name: geometric([one[name] for one in of])._asdict() for name in RATIOS},
            "makespan_to_magm": None if variant.name == COMPARED else geometric(to_magm)._asdict(),
            "slowdown_mean": round(fmean(one["slowdown_mean"] for one in of), 3),
            "slowdown_p95_highest": max(one["slowdown_p95"] for one in of),
            "slowdown_max": max(one["slowdown_max"] for one in of),
            "ooms": sum(int(one["ooms"]) for one in of),
        }
    return found


def evaluated() -> dict[str, Any]:
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(measured, CASES))
    cases = [{**case._asdict(), "variants": row} for case, row in zip(CASES, rows, strict=True)]
    generated = [row for case, row in zip(CASES, rows, strict=True) if case.trace.isdigit()]
    made_by = {**about("lab.tools.policy_evaluation"), "seeds": f"{FIRST_SEED} to {FIRST_SEED + GENERATED - 1}"}
    return {"about": made_by, "generated": summary(generated), "cases": cases}


def generated_table(found: dict[str, Any]) -> str:
    header = ["policy", "makespan", "to `magm`", "completion, mean", "p95", "energy", "slowdown", "p95", "most"]
    return table(header, [[name, *_cells(row)] for name, row in found["generated"].items()])


def shipped_table_of(found: dict[str, Any]) -> str:
    cases = [case for case in found["cases"] if case["trace"] in SHIPPED]
    header = ["policy", *(f"`{case['trace']}`{', noise' if case['noise'] else ''}" for case in cases)]
    return table(header, [[one.name, *(_shipped(case["variants"][one.name]) for case in cases)] for one in VARIANTS])


def _cells(row: dict[str, Any]) -> list[str]:
    to_magm = row["makespan_to_magm"]
    return [
        _interval(row["makespan_s"]),
        "-" if to_magm is None else _interval(to_magm),
        *(f"{row[name]['mean']:.3f}" for name in RATIOS[1:]),
        *(f"{row[name]:.2f}" for name in ("slowdown_mean", "slowdown_p95_highest", "slowdown_max")),
    ]


def _interval(found: dict[str, float]) -> str:
    return f"{found['mean']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def _shipped(row: dict[str, float]) -> str:
    return f"{row['makespan_s']:.2f} ({row['slowdown_mean']:.2f})"


def headline(found: dict[str, Any]) -> str:
    """The table of the README."""
    said = (
        f"**Makespan and energy.** {GENERATED} simulated traces on four A100s; exclusive GPUs are 1 "
        "([method](docs/goodput.md#evaluation)):"
    )
    names = ("`magm`, nothing known", "`goodput`, nothing known", "`goodput`, all known")
    rows = [(name, found["generated"][name]) for name in names]
    ratios = ("makespan_s", "completion_mean_s", "energy_j")
    lines = [
        [name, *(f"{row[ratio]['mean']:.2f}" for ratio in ratios), f"{row['slowdown_mean']:.2f}"] for name, row in rows
    ]
    return f"{folded(said)}\n\n{table(['policy', 'makespan', 'mean completion', 'energy', 'mean slowdown'], lines)}"


def pages(root: Path = ROOT, results: Path = RESULTS) -> dict[Path, str]:
    found = json.loads(results.read_text(encoding="utf-8"))
    page = root / "docs" / "goodput.md"
    texts = (
        (page, "policy evaluation", generated_table(found)),
        (page, "shipped traces", shipped_table_of(found)),
        (root / "README.md", "makespan", headline(found)),
    )
    return placed((page, mark, f"\n{text}\n") for page, mark, text in texts)


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--tables"]
    if "--tables" not in sys.argv:
        RESULTS.write_text(json.dumps(evaluated(), indent=1) + "\n", encoding="utf-8")
    sys.exit(renew("lab.tools.policy_evaluation", __doc__, arguments, pages))
