"""Fits core/scheduling/sharing_model.py on tables of `carma bench interference`, and judges it on tasks left out.

    python -m lab.tools.fit_sharing --out lab/results/h200/sharing.json

A task's rate is predicted by a model that was fitted without any group that contains the task. For comparison: a
constant and a log-linear fit on the summed SM activity of the other tasks, on the same folds. Needs scipy; `python -m
lab.tools.sharing_fit` compares more forms.
"""

from __future__ import annotations

import argparse
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from carma.core.scheduling import sharing_model as sharing
from lab.tools.sharing_data import FOLDER, MPS, MPS_FIRST, SLICES, mps_and_slices, proxies, without
from lab.tools.sharing_forms import Array, Form, Rates, fair, fit, left_out, log_linear, pressed, table

AT_ONCE = Form(pressed, (0.6, 2.7, 2.3), "")
IN_SLICES = Form(fair, (0.9,), "")
LOG_LINEAR = Form(log_linear, (log(0.95), 0.01, -0.3), "")


def unseen(form: Form, rates: Rates, judged: Rates | None = None) -> dict[str, Any]:
    """Errors of every task's rate in `judged` (default: the same groups), fitted on the groups without that task."""
    shown = rates if judged is None else judged
    errors = left_out(form, rates, judged=shown) - shown.was
    by_task = {str(task): _mean(np.abs(errors[shown.task == task])) for task in np.unique(rates.task)}
    sizes = np.abs(errors)
    p90 = round(float(np.quantile(sizes, 0.9)), 4)
    return {"rates": len(errors), "mae": _mean(sizes), "p90": p90, "bias": _mean(errors), "by_task": by_task}


def _mean(values: Array) -> float:
    return round(float(values.mean()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the sharing model on the tables in lab/results/h200.")
    parser.add_argument("--out", type=Path, default=FOLDER / "sharing.json")
    out: Path = parser.parse_args().out
    groups, earlier_groups, slice_groups = mps_and_slices()
    rates, earlier, slices, both = map(table, (groups, earlier_groups, slice_groups, [*groups, *earlier_groups]))
    constant = Form(lambda constants, rates: np.full(len(rates.was), constants[0]), (float(rates.was.mean()),), "")
    shipped = {"press": sharing.PRESS, "crowd": sharing.CROWD, "width": sharing.WIDTH}
    found: dict[str, Any] = {
        "command": f"python -m lab.tools.fit_sharing --out {out}",
        "tables": [MPS, MPS_FIRST, SLICES],
        "error": "of a task's rate, fitted without every group that holds the task",
        "mps": {
            "groups": len(groups),
            "shipped": shipped,
            "fitted_on_both": [round(abs(value), 3) for value in fit(AT_ONCE, both).tolist()],
            "this": unseen(AT_ONCE, rates),
            "this_fitted_here_judged_on_the_earlier_table": unseen(AT_ONCE, rates, earlier),
            "this_on_both_tables": unseen(AT_ONCE, both),
            "log_linear_on_sm_activity": unseen(LOG_LINEAR, rates),
            "constant": unseen(constant, rates),
            "this_without_engine_activity_and_power": unseen(AT_ONCE, rates, table(list(map(without, groups)))),
        },
        "timeslice": {
            "groups": len(slice_groups),
            "shipped": sharing.SLICES,
            "fitted": [round(value, 3) for value in fit(IN_SLICES, slices).tolist()],
            "this": unseen(IN_SLICES, slices),
            "constant": unseen(constant, slices),
        },
        "guesses": proxies(groups),
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    for mechanism in ("mps", "timeslice"):
        for name, errors in found[mechanism].items():
            if isinstance(errors, dict) and "mae" in errors:
                print(f"{mechanism:10s} {name:46s} MAE {errors['mae']:.3f}  p90 {errors['p90']:.3f}")
    print(found["mps"]["fitted_on_both"], found["timeslice"]["fitted"], found["guesses"])


if __name__ == "__main__":
    main()
