"""Activity inferred from power and engine utilisation (carma/core/telemetry/inferred_activity.py): fitted and judged.

    python -m lab.tools.fit_inferred            fit, judge, simulate; writes lab/results/simulation/inferred.json
    python -m lab.tools.fit_inferred --tables   write the tables of docs/monitoring.md from that file; --check compares

1. Factor and exponent of each metric are fitted on the runs of the data set whose activity was measured on an H200.
2. The caution is what 90 % need, of runs of families that were left out of the fit, or of cards that several tasks
   share, whichever is larger: the gate judges shared cards.
3. Nothing was fitted on the other sets: tasks alone on the H200 (two tables), copies of one task that share it, and
   published tasks alone on an A100.

Where NVML's utilisation was not recorded, GPM's engine activity stands for it. The difference is judged where both
were. Needs scipy.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from carma import __version__
from carma.core.model.settings import Gate
from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import progress_rates
from carma.core.telemetry import inferred_activity
from carma.core.telemetry.inferred_activity import Curve
from carma.core.telemetry.window import METRICS
from carma_lab.simulator.request import Request, recorded
from carma_lab.simulator.simulated_cards import A100_40, H200
from gpumemnet.dataset.table import read
from lab.tools import published
from tools.markdown import placed, renew, table

ROOT = Path(__file__).parents[2]
DATA, MEASURED = ROOT / "gpumemnet/datasets/h200", ROOT / "lab/results/h200"
RESULTS, PAGE = ROOT / "lab/results/simulation/inferred.json", ROOT / "docs/monitoring.md"
FAMILIES = ("cnn", "mlp", "transformer")
LEVEL = 0.9
TOLERANCE = 0.005  # of "below the bound": readings are means of a second
TRACES, POLICIES = ("t1", "t2", "mix", "heavy"), ("magm", "goodput")
SETTINGS: dict[str, dict[str, object]] = {"measured": {}, "inferred": {"monitor.sm_activity": "inferred"}}
WORDS = {
    "cnn": "CNNs, left out of the fit",
    "mlp": "MLPs, left out of the fit",
    "transformer": "transformers, left out of the fit",
    "demands": "training tasks alone",
    "profiles": "models of the traces alone",
    "shared": "two to four tasks sharing the card under MPS",
    "copies": "one to eight copies of a task, MPS or time-sliced",
    "a100": "published tasks on an A100",
}


class Reading(NamedTuple):
    power: float  # share of the range above idle
    engine: float
    sm_active: float
    sm_occupancy: float
    dram_active: float


Sets = dict[str, list[Reading]]


def readings() -> Sets:
    found = {family: _of_dataset(DATA / f"{family}.parquet") for family in FAMILIES}
    with lzma.open(MEASURED / "demands.jsonl.xz", "rt", encoding="utf-8") as file:
        found["demands"] = _of_rows([json.loads(line) for line in file], "gr_active")
    found["profiles"] = _of_rows(_json("profiles.json")["rows"], "gr_active")
    found["shared"] = _of_rows([row for row in groups() if len(row["tasks"]) > 1], "gpu_util")
    found["copies"] = _of_rows(_json("collocation.json")["points"], "gpu_util")
    rows = [row for row in published.rows(ROOT / published.SOLO) if published.works(row) and row["gr_active"]]
    found["a100"] = [
        Reading(
            A100_40.share_of(float(row["power_w"])), float(row["gr_active"]), *(float(row[name]) for name in METRICS)
        )
        for row in rows
    ]
    return found


def _json(name: str) -> Any:
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def groups() -> list[dict[str, Any]]:
    """Tasks alone and groups of tasks that share the card under MPS."""
    rows: list[dict[str, Any]] = _json("interference-mps.json")["rows"]
    return rows


def _of_dataset(path: Path) -> list[Reading]:
    columns = read(path).columns
    names = ("power_w", "gr_active", *METRICS)
    return _of_rows([dict(zip(names, row, strict=True)) for row in zip(*(columns[n] for n in names), strict=True)])


def _of_rows(rows: Sequence[Mapping[str, Any]], engine: str = "gr_active") -> list[Reading]:
    """Rows without one of the figures are left out."""
    names = ("power_w", engine, *METRICS)
    known = [row for row in rows if all(row.get(name) is not None and row[name] == row[name] for name in names)]
    return [Reading(H200.share_of(row["power_w"]), *(float(row[name]) for name in names[1:])) for row in known]


def fit(metric: str, runs: Sequence[Reading]) -> Curve:
    """Factor and exponent, by the mean of the absolute and of the squared errors; no caution yet."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    def loss(values: Sequence[float]) -> float:
        off = np.abs(errors(metric, Curve(float(values[0]), float(values[1]), 0.0), runs))
        return float(np.mean(off) + np.mean(off**2))

    found = minimize(loss, (0.5, 0.5), method="Nelder-Mead").x
    return Curve(round(float(found[0]), 3), round(float(found[1]), 3), 0.0)


def errors(metric: str, curve: Curve, runs: Sequence[Reading]) -> Any:
    """Measured less expected."""
    return np.array([getattr(run, metric) - curve.expected(run.power, run.engine) for run in runs])


def caution(metric: str, curve: Curve, runs: Sequence[Reading]) -> list[float]:
    """What each reading needs, in units of the square root of the expected figure."""
    expected = [curve.expected(run.power, run.engine) for run in runs]
    return [float(off) / max(1e-3, one) ** 0.5 for off, one in zip(errors(metric, curve, runs), expected, strict=True)]


def fitted(metric: str, sets: Sets) -> tuple[Curve, dict[str, Curve]]:
    """The curve that ships, and those by which each set is judged: a family by the curve of the other two."""
    whole = fit(metric, [run for family in FAMILIES for run in sets[family]])
    without = {
        family: fit(metric, [run for other in FAMILIES if other != family for run in sets[other]])
        for family in FAMILIES
    }
    unseen = [one for family in FAMILIES for one in caution(metric, without[family], sets[family])]
    needed = max(np.quantile(unseen, LEVEL), np.quantile(caution(metric, whole, sets["shared"]), LEVEL))
    extra = round(float(needed), 3)
    curves = {name: without.get(name, whole) for name in sets}
    return _with(whole, extra), {name: _with(curve, extra) for name, curve in curves.items()}


def _with(curve: Curve, extra: float) -> Curve:
    return Curve(curve.factor, curve.exponent, extra)


def judged(metric: str, curve: Curve, runs: Sequence[Reading]) -> dict[str, Any]:
    off = errors(metric, curve, runs)
    bounds = [curve.bound(curve.expected(run.power, run.engine), run.engine) for run in runs]
    below = [getattr(run, metric) <= bound + TOLERANCE for run, bound in zip(runs, bounds, strict=True)]
    return {
        "mean": _rounded(fmean(getattr(run, metric) for run in runs)),
        "mean_error": _rounded(np.mean(np.abs(off))),
        "bias": _rounded(np.mean(off)),
        "p90": _rounded(np.quantile(off, LEVEL)),
        "below_bound": _rounded(fmean(below)),
    }


def at_the_gate(curves: Mapping[str, Curve], runs: Sequence[Reading]) -> dict[str, Any]:
    """Whether the gate of the default settings closes by the measured figures and by the bounds."""
    caps = {metric: getattr(Gate(), metric) for metric in METRICS}
    truth = [any(getattr(run, metric) >= cap for metric, cap in caps.items()) for run in runs]
    inferred = [
        any(
            curves[metric].bound(curves[metric].expected(run.power, run.engine), run.engine) >= cap
            for metric, cap in caps.items()
        )
        for run in runs
    ]
    pairs = list(zip(truth, inferred, strict=True))
    return {
        "closed_measured": _rounded(fmean(truth)),
        "closed_inferred": _rounded(fmean(inferred)),
        "open_but_busy": _rounded(fmean(busy and not closed for busy, closed in pairs)),
        "closed_but_free": _rounded(fmean(closed and not busy for busy, closed in pairs)),
    }


def utilisation() -> dict[str, Any]:
    """NVML's utilisation less GPM's engine activity."""
    off = [row["gpu_util"] - row["gr_active"] for row in groups()]
    low, high = np.quantile(off, [0.1, 0.9])
    return {
        "readings": len(off),
        "mean": _rounded(fmean(off)),
        "p10": _rounded(low),
        "p90": _rounded(high),
        "least": _rounded(min(off)),
        "most": _rounded(max(off)),
    }


# -- rates ------------------------------------------------------------------------------------------------------------


def rates() -> dict[str, Any]:
    """The error of the sharing model's rates with demands as they are learned from tasks alone: from measured and from
    inferred activity; and for how many the cautious rate holds."""
    rows = groups()
    alone: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if len(row["tasks"]) == 1 and row["percent"] == [100]:
            alone.setdefault(row["tasks"][0], []).append(row)
    together = [row for row in rows if len(row["tasks"]) > 1 and set(row["percent"]) == {100}]
    return {
        name: _rates(together, {task: learn(found) for task, found in alone.items()})
        for name, learn in (("measured", _measured), ("inferred", _inferred))
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(row[name] for row in rows)


def _measured(rows: Sequence[Mapping[str, Any]]) -> Demand:
    return Demand(*(_mean(rows, name) for name in (*METRICS, "gr_active")))


def _inferred(rows: Sequence[Mapping[str, Any]]) -> Demand:
    engine = _mean(rows, "gpu_util")
    found = inferred_activity.infer(H200.share_of(_mean(rows, "power_w")), engine).expected
    return Demand(*(getattr(found, name) for name in (*METRICS, "gr_active")))


def _rates(together: Sequence[Mapping[str, Any]], demands: Mapping[str, Demand]) -> dict[str, Any]:
    off, holds = [], []
    for row in together:
        group = [demands[task] for task in row["tasks"]]
        true = [rate / alone for rate, alone in zip(row["rates"], row["solo_rates"], strict=True)]
        off += [rate - guess for rate, guess in zip(true, progress_rates(group), strict=True)]
        holds += [rate >= low for rate, low in zip(true, progress_rates(group, cautious=True), strict=True)]
    return {
        "rates": len(off),
        "mean_error": _rounded(np.mean(np.abs(off))),
        "bias": _rounded(np.mean(off)),
        "cautious_holds": _rounded(fmean(holds)),
    }


# -- simulation -------------------------------------------------------------------------------------------------------


def simulated() -> list[dict[str, Any]]:
    """Makespan and slowdown with measured and with inferred activity."""
    return [_run(trace, policy, known) for known in ("measured", "none") for policy in POLICIES for trace in TRACES]


def _run(trace: str, policy: str, known: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"trace": trace, "policy": policy, "demand": known}
    for source, settings in SETTINGS.items():
        figures = recorded(Request(trace=trace, policy=policy, demand=known, settings=settings)).figures
        names = ("makespan_s", "completion_mean_s", "slowdown_mean", "slowdown_p95", "ooms")
        found[source] = {name: _rounded(getattr(figures, name)) for name in names}
    found["makespan_ratio"] = _rounded(found["inferred"]["makespan_s"] / found["measured"]["makespan_s"])
    return found


def _rounded(value: Any) -> float:
    return round(float(value), 4)


def made() -> dict[str, Any]:
    sets = readings()
    curves = {metric: fitted(metric, sets) for metric in METRICS}
    shipped = {metric: curve for metric, (curve, _) in curves.items()}
    with lzma.open(MEASURED / "demands.jsonl.xz", "rt", encoding="utf-8") as file:
        card = json.loads(file.readline())["about"]
    return {
        "about": {
            "command": "python -m lab.tools.fit_inferred",
            "date": datetime.now(UTC).date().isoformat(),
            "seed": "none: the fit draws nothing; the simulations have seed 0",
            "hardware": f"{card['gpu']}, driver {card['driver']}, torch {card['torch']}; a100: published means",
            "versions": f"CARMA {__version__}",
            "data": "gpumemnet/datasets/h200, h200/demands.jsonl.xz, h200/profiles.json, h200/interference-mps.json, "
            "h200/collocation.json, a100/solo.csv",
        },
        "curves": {
            metric: {"factor": one.factor, "exponent": one.exponent, "caution": one.caution}
            for metric, one in shipped.items()
        },
        "sets": [
            {"name": name, "readings": len(runs)}
            | {metric: judged(metric, curves[metric][1][name], runs) for metric in METRICS}
            | {"gate": at_the_gate({metric: curves[metric][1][name] for metric in METRICS}, runs)}
            for name, runs in sets.items()
        ],
        "utilisation_less_engine_activity": utilisation(),
        "rates": rates(),
        "simulated": simulated(),
    }


# -- tables -----------------------------------------------------------------------------------------------------------


def errors_table(found: Mapping[str, Any]) -> str:
    titles = ["readings", "number", "SM activity", "occupancy", "DRAM activity", "gate too open", "gate too closed"]
    rows = [
        (
            WORDS[one["name"]],
            str(one["readings"]),
            *(f"{one[name]['mean_error']:.3f}, {100 * one[name]['below_bound']:.0f} %" for name in METRICS),
            f"{100 * one['gate']['open_but_busy']:.0f} %",
            f"{100 * one['gate']['closed_but_free']:.0f} %",
        )
        for one in found["sets"]
    ]
    return table(titles, rows)


def rates_table(found: Mapping[str, Any]) -> str:
    rows = [
        (f"from {name} activity", f"{one['mean_error']:.3f}", f"{100 * one['cautious_holds']:.0f} %")
        for name, one in found["rates"].items()
    ]
    return table(["demands of tasks alone", "error of a rate, mean", "cautious rate holds"], rows)


def data_text(found: Mapping[str, Any]) -> str:
    runs = sum(one["readings"] for one in found["sets"] if one["name"] in FAMILIES)
    off = found["utilisation_less_engine_activity"]
    return (
        f"The constants were fitted on {runs:,} training runs alone on an H200, with GPM's engine activity for NVML's\n"
        f"utilisation: where both were read ({off['readings']} readings), their difference is {off['mean']:+.3f} on\n"
        f"average, and in eight of ten readings between {off['p10']:+.3f} and {off['p90']:+.3f}."
    )


def simulated_table(found: Mapping[str, Any]) -> str:
    titles = ["policy", "demands", "trace", "makespan, relative", "slowdown, mean", "slowdown, p95"]
    known = {"measured": "known", "none": "unknown"}
    rows = [
        (
            f"`{one['policy']}`",
            known[one["demand"]],
            f"`{one['trace']}`",
            f"{one['makespan_ratio']:.3f}",
            *(
                f"{one['measured'][name]:.2f} → {one['inferred'][name]:.2f}"
                for name in ("slowdown_mean", "slowdown_p95")
            ),
        )
        for one in found["simulated"]
    ]
    return table(titles, rows)


def pages() -> dict[Path, str]:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    tables = (
        ("inferred-data", data_text),
        ("inferred-errors", errors_table),
        ("inferred-rates", rates_table),
        ("inferred-simulated", simulated_table),
    )
    return placed((PAGE, mark, f"\n{make(found)}\n") for mark, make in tables)


def main(arguments: list[str]) -> int:
    if "--tables" in arguments:
        rest = [one for one in arguments if one != "--tables"]
        return renew("lab.tools.fit_inferred --tables", __doc__, rest, pages)
    RESULTS.write_text(json.dumps(made(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
