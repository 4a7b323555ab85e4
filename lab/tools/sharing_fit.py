"""Fits core/scheduling/sharing_model.py, compares it with other forms on tasks left out, and gives its errors on other
data.

    python -m lab.tools.sharing_fit --data ../shared/data/interference

Fitted on the tables of `carma bench interference` in lab/results/h200: pairs, triples and quadruples of 25 tasks, under
MPS (two tables) and in time slices. A form is judged on tasks whose every group was left out of its fit; the one that
is best there is kept. From its errors on left-out tasks come the band (CAUTION) and the spread of the simulator's truth
(SPREAD). What observed steps add is judged by a replay (sharing_online.py). Then the model is held against measurements
that had no part in the fit (sharing_outside.py). `--data` is the folder with the public tables of Gavel and MISO, which
do not come with CARMA; without it what needs them is left as it stands in the file. Needs the extra `report`; about a
minute. Then `python -m lab.tools.sharing_tables` puts the figures into docs/simulation.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize  # type: ignore[import-untyped]
from scipy.stats import norm  # type: ignore[import-untyped]

from carma.core.model.values import Demand
from carma.core.scheduling import sharing_model as sharing
from lab.tools import sharing_forms as forms
from lab.tools import sharing_online as online
from lab.tools import sharing_outside as outside
from lab.tools.sharing_data import MPS, MPS_FIRST, SLICES, Group, demands_of, mps_and_slices, proxies, without
from lab.tools.sharing_forms import Array, Form, Rates, fit, left_out, table
from lab.tools.sharing_picture import draw

OUT = Path("lab/results/simulation/sharing.json")
QUANTILE = 0.1  # of tasks, that are slower than a cautious rate says
SEED = 0
DRAWS = 400


def errors(predicted: Array, rates: Rates) -> dict[str, Any]:
    """Errors, predicted minus measured speed: over all, and for each number of tasks."""
    sizes = {"all": rates.size > 0} | {str(size): rates.size == size for size in (2, 3, 4)}
    return {name: error_of((predicted - rates.was)[rows]) for name, rows in sizes.items() if rows.any()}


def error_of(off: Array) -> dict[str, float]:
    return {
        "rates": len(off),
        "mean_abs": _short(np.abs(off).mean()),
        "p95": _short(np.quantile(np.abs(off), 0.95)),
        "signed": _short(off.mean()),
    }


def family(task: str) -> str:
    """`resnet18-cifar-b32` and `resnet50-224-b32` are akin."""
    return task.split("-")[0].rstrip("0123456789") or task


def compared(candidates: dict[str, Form], rates: Rates) -> tuple[str, dict[str, Any], dict[str, Array]]:
    """The form that is best on tasks left out, all forms with their errors, and the rates that each predicts for tasks
    left out."""
    figures: dict[str, Any] = {}
    unseen: dict[str, Array] = {}
    for name, form in candidates.items():
        constants = fit(form, rates)
        unseen[name] = left_out(form, rates)
        figures[name] = {
            "what": form.what,
            "constants": [_short(value) for value in constants],
            "fit": errors(form.says(constants, rates), rates),
            "left_out": errors(unseen[name], rates),
            "left_out_family": error_of(left_out(form, rates, family) - rates.was),
        }  # fmt: skip
    best = min(
        candidates,
        key=lambda name: (round(figures[name]["left_out"]["all"]["mean_abs"], 3), len(candidates[name].start)),
    )
    for name in candidates:
        figures[name]["worse_than_kept"] = _difference(unseen[name], unseen[best], rates)
    return best, figures, unseen


def _difference(one: Array, other: Array, rates: Rates) -> list[float]:
    """Range of the difference of the mean errors, in nine of ten draws of groups."""
    more = np.abs(one - rates.was) - np.abs(other - rates.was)
    random = np.random.default_rng(SEED)
    count = int(rates.group.max()) + 1
    sums, sizes = np.bincount(rates.group, more, count), np.bincount(rates.group, minlength=count)
    drawn = random.integers(0, count, (DRAWS, count))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return [_short(value) for value in np.quantile(means, (0.05, 0.95))]


# The band: how far one task in ten lies below its predicted rate, and the spread of the true rates, both as functions
# of the predicted rate.


def caution(predicted: Array, rates: Rates) -> tuple[float, float]:
    """a and b, so that one task in ten is slower than predicted * exp(-(a + b * (1 - predicted))). Quantile
    regression."""
    log, away = np.log(rates.was / predicted), 1.0 - predicted

    def loss(pair: Array) -> float:
        above = log + abs(pair[0]) + abs(pair[1]) * away
        return float(np.where(above >= 0.0, QUANTILE * above, (QUANTILE - 1.0) * above).mean())

    starts = [(0.1, 0.2), (0.1, 0.8), (0.2, 0.0)]
    found: Any = min((minimize(loss, start, method="Nelder-Mead") for start in starts), key=lambda one: one.fun)
    return abs(float(found.x[0])), abs(float(found.x[1]))


def widened(pair: tuple[float, float], predicted: Array, rates: Rates) -> tuple[float, float]:
    """Widens the band until it holds for pairs, for triples and for quadruples."""
    for more in np.arange(1.0, 2.0, 0.01):
        wider = (pair[0] * more, pair[1] * more)
        if min(kept_to(wider, predicted, rates).values()) >= 1.0 - QUANTILE:
            break
    return wider


def kept_to(pair: tuple[float, float], predicted: Array, rates: Rates) -> dict[str, float]:
    """The share of tasks that are at least as fast as the cautious rate."""
    holds = rates.was >= predicted * np.exp(-(pair[0] + pair[1] * (1.0 - predicted)))
    found = {"all": _short(holds.mean())}
    return found | {str(size): _short(holds[rates.size == size].mean()) for size in (2, 3, 4)}


def kept_to_unseen(predicted: Array, rates: Rates) -> float:
    """The same, each task judged by a band that was made without it."""
    holds = np.zeros(len(predicted), bool)
    for task in np.unique(rates.task):
        rows = rates.task == task
        others = rates.only(~rows)
        least, slope = widened(caution(predicted[~rows], others), predicted[~rows], others)
        holds[rows] = rates.was[rows] >= predicted[rows] * np.exp(-(least + slope * (1.0 - predicted[rows])))
    return _short(holds.mean())


def spread(predicted: Array, rates: Rates) -> tuple[float, float]:
    """c and d: the log of measured over predicted is spread by c + d * (1 - predicted). Most likely values; a speed
    that was measured as 1 stands for 1 or more, as in the simulator, where no task is faster than alone."""
    log, away, cut = np.log(rates.was / predicted), 1.0 - predicted, rates.was >= 1.0

    def loss(pair: Array) -> float:
        sigma = abs(pair[0]) + abs(pair[1]) * away + 1e-3
        return -float(np.where(cut, norm.logsf(-np.log(predicted), 0.0, sigma), norm.logpdf(log, 0.0, sigma)).sum())

    found: Any = minimize(loss, (0.1, 0.2), method="Nelder-Mead")
    return abs(float(found.x[0])), abs(float(found.x[1]))


def band(predicted: Array, blind: Array, rates: Rates) -> dict[str, Any]:
    known, guessed = (widened(caution(each, rates), each, rates) for each in (predicted, blind))
    guessed = (max(known[0], guessed[0]), max(known[1], guessed[1]))  # never less caution when less is known
    return {
        "caution": {
            "known": [_short(value) for value in known],
            "guessed": [_short(value) for value in guessed],
            "kept_to": kept_to(known, predicted, rates),
            "kept_to_by_a_band_made_without_the_task": kept_to_unseen(predicted, rates),
            "kept_to_where_guessed": kept_to(guessed, blind, rates),
        },
        "spread": {
            str(size): [_short(value) for value in spread(predicted[rows], rates.only(rows))]
            for size in (2, 3, 4)
            if (rows := rates.size == size).any()
        },
    }


def study(candidates: dict[str, Form], groups: Sequence[Group]) -> tuple[dict[str, Any], tuple[Array, Rates]]:
    """The figures of a mechanism, and the rates predicted by the kept form, each with its task left out."""
    rates = table(groups)
    best, all_forms, unseen = compared(candidates, rates)
    blind_rates = table([without(group) for group in groups])
    blind = left_out(candidates[best], rates, judged=blind_rates)
    figures = {
        "groups": {str(size): sum(len(group.tasks) == size for group in groups) for size in (2, 3, 4)},
        "rates": len(rates.was),
        "kept": best,
        "forms": all_forms,
        "left_out_where_engine_activity_and_power_are_guessed": errors(blind, rates),
        "of_the_cautious": band(unseen[best], blind, rates),
    }
    return figures, (unseen[best], rates)


def repeated(one: Sequence[Group], other: Sequence[Group]) -> dict[str, Any]:
    """The same group in both tables: what no model can know."""
    first = {tuple(sorted(group.tasks)): dict(zip(group.tasks, group.rates, strict=True)) for group in one}
    off = [
        first[key][task] - rate
        for group in other
        if (key := tuple(sorted(group.tasks))) in first and len(set(key)) == len(key)
        for task, rate in zip(group.tasks, group.rates, strict=True)
    ]
    return error_of(np.array(off))


def unknown(groups: Sequence[Group]) -> dict[str, Any]:
    """Nothing known: engine activity and power that nine in ten tasks have at most, and SM activity with which a task
    is no faster than the worst tenth, whatever the others draw."""
    known = demands_of(groups)
    shown = np.array([forms.row_of(demand) for demand in known.values()])
    high = np.quantile(shown, 1.0 - QUANTILE, axis=0)
    for width in np.arange(1.0, 0.0, -0.01):
        one = Demand(float(width), 0.0, 0.0, float(high[forms.ENGINE]), 0.0)
        if all(_own(one, power) <= np.quantile([_own(each, power) for each in known.values()], QUANTILE)
               for power in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)):  # fmt: skip
            break
    return {
        "tasks": len(known),
        "sm_active": _short(width),
        "sm_occupancy": _short(high[forms.OCCUPANCY]),
        "dram_active": _short(high[forms.DRAM]),
        "gr_active": _short(high[forms.ENGINE]),
        "power": _short(high[forms.POWER]),
    }


def _own(demand: Demand, power: float) -> float:
    """Rate of the task beside two tasks that draw that power together."""
    return sharing.progress_rates([demand, *[Demand(0.5, 0.2, 0.2, 0.5, power / 2)] * 2])[0]


def _short(value: Any) -> float:
    return round(float(value), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the sharing model, compare forms, and judge it on other data.")
    parser.add_argument("--data", type=Path, help="folder with gavel_pairs_tidy.csv and the tables of MISO")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    later, earlier, slices = mps_and_slices()
    before = json.loads(given.out.read_text())["validation"] if given.out.exists() else {}
    both = [*later, *earlier]
    mps, mps_predicted = study(forms.MPS, both)
    guessed = left_out(forms.MPS[mps["kept"]], mps_predicted[1], judged=table(list(map(without, both))))
    timeslice, timeslice_predicted = study(forms.SLICES, slices)
    found: dict[str, Any] = {
        "command": "python -m lab.tools.sharing_fit --data FOLDER",
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
        "tables": [f"lab/results/h200/{name}" for name in (MPS, MPS_FIRST, SLICES)],
        "error": "predicted less measured speed of a task (1: as fast as alone)",
        "mps": mps,
        "timeslice": timeslice,
        "online": {
            "known": online.replayed(later, earlier, *mps_predicted),
            "guessed": online.replayed(later, earlier, guessed, mps_predicted[1], guessed=True),
        },
        "same_group_measured_twice": repeated(later, earlier),
        "guesses": proxies(later),
        "unknown": unknown(later),
        "validation": before | outside.validation(given.data),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    draw({"mps": mps_predicted, "timeslice": timeslice_predicted}, given.out.parent)
    show(found)


def show(found: dict[str, Any]) -> None:
    for mechanism in ("mps", "timeslice"):
        print(f"{mechanism}: kept {found[mechanism]['kept']}")
        for name, form in found[mechanism]["forms"].items():
            for when in ("fit", "left_out"):
                sizes = "  ".join(
                    f"{size}: {one['mean_abs']:.3f} p95 {one['p95']:.3f} {one['signed']:+.3f}"
                    for size, one in form[when].items()
                )
                print(f"  {name:34} {when:8} {sizes}")
        print(f"  {found[mechanism]['of_the_cautious']}")
    for name in ("online", "same_group_measured_twice", "guesses", "unknown", "validation"):
        print(name, json.dumps(found[name], indent=1))


if __name__ == "__main__":
    main()
