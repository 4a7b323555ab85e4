"""Fits the constants of predicted demands (carma/trial/demand/constants.json) and measures their errors.

    python -m lab.tools.fit_demand

Fitted on the runs of the data set with measured activity: least squares over step time and the five figures of a
demand, from values that a data sheet suggests (fit_demand_start.json). Judged three ways: runs of shapes, and of
families, that a fit has not seen; and models in use (lab/results/h200/demands.jsonl.xz), on which nothing is fitted.
Each result stands beside the demand of a task of which only the memory is known, and beside the mean. Writes
constants.json, the errors that the simulator draws from (lab/src/carma_lab/simulator/demand_errors.csv) and
lab/results/gpumemnet/demand.json; then the table of docs/goodput.md.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from carma.core.model.values import Demand
from carma.core.scheduling.sharing_model import by_size, progress_rates
from carma.traces.table import shipped_table
from carma.trial.cards import CARDS
from carma.trial.demand.kernel_work import StepWork, work_of
from carma.trial.demand.prediction import CONSTANTS, FIGURES, LEAST_KNOWN, DemandConstants, shown
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import HALF, Described
from carma.trial.layers.kinds import kind_of
from carma_lab.bench.gpu.profile_tasks import TASKS
from carma_lab.simulator import simulated_cards
from gpumemnet.dataset.table import read
from lab.tools import demand_tables
from lab.tools.simulated_table import made_by

DATA, REAL = Path("gpumemnet/datasets/h200"), Path("lab/results/h200/demands.jsonl.xz")
DATA_NAMED = "gpumemnet/datasets/h200 (NVIDIA H200; gpumemnet/datasets/README.md)"
RESULTS, ERRORS = Path("lab/results/gpumemnet/demand.json"), Path("lab/src/carma_lab/simulator/demand_errors.csv")
FOLDS, ROUNDS, PAIRS = 6, 18, 4000
STEP_WEIGHT, PULL, ROBUST = 0.15, 0.1, 0.1  # of the log of a step; towards the start; from where errors count less
Numbers = NDArray[np.float64]
H200, A100 = (next(card for card in CARDS if card.alias == alias) for alias in ("h200", "a100-40gb"))
START = msgspec.json.decode(Path(__file__).with_name("fit_demand_start.json").read_bytes(), type=DemandConstants)


class Run(NamedTuple):
    """A measured run. `truth` has FIGURES and the step in seconds."""

    name: str
    family: str
    shape: str
    memory_mib: float
    work: StepWork
    copied: float
    truth: dict[str, float]


def drawn(folder: Path = DATA) -> list[Run]:
    """Runs of the data set with activity."""
    found: list[Run] = []
    for path in sorted(folder.glob("*.parquet")):
        table = read(path)
        for row in np.flatnonzero(np.isfinite(table["sm_active"])).tolist():
            config, described = table.configs[row], table.described(row)
            figures = {name: float(table[name][row]) for name in (*FIGURES[:4], "power_w", "step_ms")}
            work = work_of(described, tf32=config.precision == "tf32")
            shape = f"{table.family} {config.shape}"
            memory = float(table["footprint_mib"][row])
            copied = float(copied_bytes(described))
            found.append(Run(table.ids[row], table.family, shape, memory, work, copied, _truth(figures)))
    return found


def real(path: Path = REAL) -> tuple[list[Run], dict[str, str], dict[str, Any]]:
    """Runs of models in use; the names of those without a prediction, with the reason; and the conditions."""
    head, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    found, refused = [], {}
    for row in map(json.loads, lines):
        described = msgspec.convert(row["described"], Described, strict=False)
        try:
            work = work_of(described, tf32=row["precision"] == "tf32")
        except CannotTell as why:
            refused[row["name"]] = str(why)
            continue
        if work.known < LEAST_KNOWN:
            refused[row["name"]] = f"{100 * (1 - work.known):.0f} % of it are layers of a kind that is not known"
            continue
        memory = row["reserved_mib"] + 620.0  # and the context
        found.append(Run(row["name"], row["group"], row["family"], memory, work, 0.0, _truth(row)))
    return found, refused, dict(json.loads(head)["about"])


def _truth(row: Mapping[str, float]) -> dict[str, float]:
    figures = {name: float(row[name]) for name in FIGURES[:4]}
    return {**figures, "power": simulated_cards.H200.share_of(row["power_w"]), "step_s": row["step_ms"] / 1000.0}


def copied_bytes(described: Described) -> int:
    """Bytes that a step of a plain loop copies from the host. Words are integers of eight bytes."""
    first = next((layer.kind for layer in described.layers), "")
    each = 8 if kind_of(first) == "embedding" else 2 if described.dtype in HALF else 4
    return math.prod(described.input) * each if described.input else 0


def joined(works: Sequence[StepWork], copied: Sequence[float] = ()) -> StepWork:
    """Several steps as one value, which makes the fit fast. `copied`: bytes that each step copies from the host."""
    arrays = ("kernels", "layers", "tensors", "scaled", "channels_last")
    return StepWork(
        **{name: np.concatenate([getattr(work, name) for work in works]) for name in arrays},
        begins=np.cumsum([0, *(len(work.kernels) for work in works[:-1])]),
        copied_bytes=np.array(copied or [0.0] * len(works), np.float64),
        known=min(work.known for work in works),
    )


def flat(constants: DemandConstants) -> Numbers:
    """Logarithms of all constants, in the order of the fields."""
    parts = [np.ravel(np.array(value, np.float64)) for value in msgspec.structs.astuple(constants)]
    return np.log(np.concatenate(parts))


def shaped(vector: Numbers) -> DemandConstants:
    values, place = {}, 0
    for field, like in msgspec.structs.asdict(START).items():
        size = np.size(like)
        part = np.exp(vector[place : place + size])
        values[field] = part.reshape(np.shape(like)).tolist() if np.shape(like) else float(part[0])
        place += size
    return msgspec.convert(values, DemandConstants)


def fit(runs: Sequence[Run]) -> DemandConstants:
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    batch = joined([run.work for run in runs], [run.copied for run in runs])
    truth = {name: np.array([run.truth[name] for run in runs]) for name in (*FIGURES, "step_s")}
    start = flat(START)

    def off(vector: Numbers) -> Numbers:
        found = shown(batch, shaped(vector), H200)
        parts = [found[name] - truth[name] for name in FIGURES]
        parts.append(STEP_WEIGHT * np.log(found["step_s"] / truth["step_s"]))
        return np.concatenate([*parts, PULL * (vector - start)])

    done = least_squares(off, start, loss="soft_l1", f_scale=ROBUST, max_nfev=ROUNDS, diff_step=1e-3)
    return shaped(done.x)


def predicted(runs: Sequence[Run], constants: DemandConstants, copies: bool = True) -> dict[str, Numbers]:
    return shown(joined([run.work for run in runs], [run.copied if copies else 0.0 for run in runs]), constants, H200)


def left_out(runs: Sequence[Run], groups: Sequence[int]) -> dict[str, Numbers]:
    """Each run by a fit that has not seen its group."""
    found = {name: np.zeros(len(runs)) for name in (*FIGURES, "step_s")}
    for group in sorted(set(groups)):
        inside = [place for place, other in enumerate(groups) if other == group]
        constants = fit([run for run, other in zip(runs, groups, strict=True) if other != group])
        for name, values in predicted([runs[place] for place in inside], constants).items():
            found[name][inside] = values
    return found


def demands(found: Mapping[str, Numbers]) -> list[Demand]:
    return [Demand(*values) for values in zip(*(found[name].tolist() for name in FIGURES), strict=True)]


def errors(runs: Sequence[Run], found: Mapping[str, Numbers]) -> dict[str, Any]:
    """Mean absolute errors; of the step the mean of its factor; and how far the speeds of pairs are off."""
    truth = {name: np.array([run.truth[name] for run in runs]) for name in (*FIGURES, "step_s")}
    sized = [by_size(int(run.memory_mib)) for run in runs]
    prior = {name: np.array([getattr(one, name) for one in sized]) for name in FIGURES}
    mean = {name: np.full(len(runs), truth[name].mean()) for name in FIGURES}
    known_demands = {"predicted": found, "by_size": prior, "mean": mean}
    factor = float(np.exp(np.mean(np.abs(np.log(found["step_s"] / truth["step_s"])))))
    return {
        "runs": len(runs),
        "error": {
            who: {name: _off(values[name] - truth[name]) for name in FIGURES} for who, values in known_demands.items()
        },
        "above_truth": {name: _off(found[name] - truth[name], mean=True) for name in FIGURES},
        "step_factor": round(factor, 2),
        "pairs": pairs(demands(truth), {who: demands(values) for who, values in known_demands.items()}),
    }


def _off(values: Numbers, mean: bool = False) -> float:
    return round(float(np.mean(values if mean else np.abs(values))), 3)


def pairs(truth: Sequence[Demand], known_demands: Mapping[str, Sequence[Demand]]) -> dict[str, Any]:
    """Speeds of both tasks of pairs, by the sharing model, from predicted and from measured demands."""
    every = list(combinations(range(len(truth)), 2))
    chosen = np.random.default_rng(0).permutation(len(every))[:PAIRS].tolist()
    real_rates = np.array([progress_rates([truth[one] for one in every[place]]) for place in chosen])
    found: dict[str, Any] = {"pairs": len(chosen)}
    for who, known in known_demands.items():
        rates = np.array([progress_rates([known[one] for one in every[place]]) for place in chosen])
        over = float(np.mean(1.0 / real_rates > 1.1 / rates))
        found[who] = {"error": _off(rates - real_rates), "slowdown_above_by_a_tenth": round(over, 3)}
    return found


def on_an_a100(runs: Sequence[Run], constants: DemandConstants) -> dict[str, Any]:
    """Published tasks on the other card, whose loaders are in what was published: more may be predicted, not less."""
    table = shipped_table().tasks
    names = {task.name: [name for name in task.trace_names if name in table] for task in TASKS}
    known = [run for run in runs if run.family == "trace" and names.get(run.name)]
    found = demands(shown(joined([run.work for run in known]), constants, A100))
    off: dict[str, list[float]] = {name: [] for name in FIGURES}
    for run, predicted in zip(known, found, strict=True):
        truth = table[names[run.name][0]].demand
        for name in FIGURES:
            if (published := getattr(truth, name)) is not None:
                off[name].append(getattr(predicted, name) - published)
    return {
        "tasks": len(known),
        "above_published": {name: _off(np.array(values), mean=True) for name, values in off.items() if values},
        "less_by_a_tenth": {
            name: _off((np.array(values) < -0.1).astype(np.float64)) for name, values in off.items() if values
        },
    }


def _rounded(constants: DemandConstants) -> Any:
    def cut(value: Any) -> Any:
        return [cut(one) for one in value] if isinstance(value, list | tuple) else float(f"{value:.4g}")

    return {name: cut(value) for name, value in msgspec.structs.asdict(constants).items()}


def errors_text(runs: Sequence[Run], found: Mapping[str, Numbers]) -> str:
    """The table that the simulator draws from."""
    lines = [
        "# What models that people use keep busy on an H200, and what was predicted: python -m lab.tools.fit_demand",
        ",".join((*FIGURES, *(f"predicted_{name}" for name in FIGURES))),
    ]
    for place, run in enumerate(runs):
        values = [*(run.truth[name] for name in FIGURES), *(float(found[name][place]) for name in FIGURES)]
        lines.append(",".join(f"{value:.3f}" for value in values))
    return "\n".join(lines) + "\n"


def main() -> None:
    runs = drawn()
    constants = msgspec.convert(_rounded(fit(runs)), DemandConstants)
    CONSTANTS.write_bytes(msgspec.json.format(msgspec.json.encode(constants), indent=1) + b"\n")
    people, refused, about = real()
    shapes = {shape: place % FOLDS for place, shape in enumerate(sorted({run.shape for run in runs}))}
    families = sorted({run.family for run in runs})
    of_people = predicted(people, constants, copies=False)
    groups = sorted({run.family for run in people})
    known_demands = {
        **made_by("lab.tools.fit_demand"),
        "seed": 0,
        "fitted_on": f"{len(runs)} runs with activity of {DATA_NAMED}",
        "constants": len(flat(START)),
        "fitted": errors(runs, predicted(runs, constants)),
        "shapes_left_out": errors(runs, left_out(runs, [shapes[run.shape] for run in runs])),
        "families_left_out": errors(runs, left_out(runs, [families.index(run.family) for run in runs])),
        "models_that_people_use": {
            "measured": about,
            "from": str(REAL),
            "refused": refused,
            "all": errors(people, of_people),
            **{group: _of_group(people, of_people, group) for group in groups},
        },
    }
    ERRORS.write_text(errors_text(people, of_people), encoding="utf-8")
    known_demands["on_an_a100"] = on_an_a100(people, constants)
    known_demands["simulated"] = demand_tables.simulated()
    RESULTS.write_text(json.dumps(known_demands, indent=1) + "\n", encoding="utf-8")
    demand_tables.main()
    print(json.dumps(known_demands, indent=1))


def _of_group(runs: Sequence[Run], found: Mapping[str, Numbers], group: str) -> dict[str, Any]:
    inside = [place for place, run in enumerate(runs) if run.family == group]
    return errors([runs[place] for place in inside], {name: values[inside] for name, values in found.items()})


if __name__ == "__main__":
    main()
