"""The sharing model against measurements that had no part in its fit: for lab/tools/sharing_fit.py.

- `h200_collocation`: 2 to 8 copies of two tasks that are not among the 25, on the same H200 (lab/results/h200). Engine
  activity, SM activity and power of one copy alone are known.
- `gavel_v100`: pairs on a V100 (Gavel's table `simulation`). Only the speeds of the jobs are known, not whether
  MPS was on, so that both ways of sharing are tried. `from_half_the_pairs` takes each job's engine activity and power
  from half of the pairs, with the model's constants as they are, and judges the other half: it says whether the
  model's shape fits another card. `from_own_pair` takes them from the pair of the job with itself alone, along the
  line on which the 25 tasks lie. `from_profiles` takes them from profiles of the same models on an H200, scaled to a
  V100, and the job's own speed alone. `unknown` knows nothing.
- `miso_a100`: speed on slices of an A100 (MIG) against copies that share a whole one. Not the same thing: slices
  isolate. It says whether the model knows which tasks lose.
- `lucid`: mean speed of pairs by their summed GPU utilisation, published for an RTX 3090, beside what the model says of
  all pairs of the 25 tasks.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from msgspec.structs import replace
from scipy.optimize import least_squares  # type: ignore[import-untyped]
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from carma.core.model.values import Demand
from carma.core.scheduling import sharing_model as sharing
from carma.core.scheduling.sharing_model import Mechanism, progress_rates
from lab.tools.card_scaling import Rates, Shown, scale
from lab.tools.sharing_data import FOLDER, IDLE_W, LIMIT_W, MPS, demands_of, load
from lab.tools.sharing_forms import Array

Pair = tuple[str, str]
SEED = 0

# A V100 by its data sheet. It has no TF32: what ran on the H200's tensor cores runs on fp32 lanes here.
V100 = Rates(sms=80, clock_mhz=1530, fp32_tflops=15.7, tensor_tflops=15.7, dram_gbs=900, idle_w=40.0, most_w=300.0)
SAME = {f"ResNet-18 (batch size {size})": f"resnet18-cifar-b{size}" for size in (32, 64, 128)} | {
    f"ResNet-50 (batch size {size})": f"resnet50-b{size}" for size in (32, 64, 128)
}
SLICES = {2: ("3g.20gb", "4g.20gb"), 3: ("2g.10gb", "2g.10gb", "3g.20gb")}  # that share out a card
MISO_IDLE_W, MISO_LIMIT_W = 34.0, 250.0  # an A100 PCIe: no task of the table draws more than 247 W
LUCID = ((0.0, 0.6, 1.01), (0.6, 1.0, 0.98), (1.0, 1.2, 0.93), (1.2, 1.5, 0.86), (1.5, 1.8, 0.75), (1.8, 2.01, 0.68))


def validation(data: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"h200_collocation": collocation(), "lucid": lucid()}
    if data is not None:
        pairs, alone = gavel(data / "gavel_pairs_tidy.csv")
        found["gavel_v100"] = {mechanism: of_gavel(pairs, alone, mechanism) for mechanism in ("mps", "timeslice")} | {
            "exactly_1": round(mean(rate == 1.0 for rate in pairs.values()), 3)
        }
        found["miso_a100"] = miso(data)
    return found


def judged(predicted: Sequence[float], cautious: Sequence[float], was: Sequence[float]) -> dict[str, Any]:
    off = np.array(predicted) - np.array(was)
    return {
        "rates": len(off),
        "mean_abs": round(float(np.abs(off).mean()), 4),
        "p95": round(float(np.quantile(np.abs(off), 0.95)), 4),
        "signed": round(float(off.mean()), 4),
        "kept_to_cautious": round(float(np.mean(np.array(was) >= np.array(cautious))), 4),
    }


# The same card, other tasks.


def collocation() -> dict[str, Any]:
    points = json.loads((FOLDER / "collocation.json").read_text())["points"]
    found: dict[str, Any] = {}
    for mechanism in ("mps", "timeslice"):
        for task in ("small", "large"):
            rows = {one["copies"]: one for one in points if (one["task"], one["mechanism"]) == (task, mechanism)}
            found[f"{mechanism} {task}"] = _copies(rows, mechanism)
    return found


def _copies(rows: dict[int, dict[str, Any]], mechanism: Mechanism) -> dict[str, Any]:
    alone = rows[1]
    power = (alone["power_w"] - IDLE_W) / (LIMIT_W - IDLE_W)
    demand = Demand(alone["sm_active"], alone["sm_occupancy"], alone["dram_active"], alone["gr_active"], power)
    predicted: list[float] = []
    cautious: list[float] = []
    was: list[float] = []
    total: dict[str, list[float]] = {}
    for copies, row in sorted(rows.items()):
        if copies == 1:
            continue
        rates = progress_rates([demand] * copies, mechanism)
        measured = [min(1.0, each / alone["images_per_s"]) for each in row["each_images_per_s"]]
        predicted += rates
        cautious += progress_rates([demand] * copies, mechanism, cautious=True)
        was += measured
        total[str(copies)] = [round(sum(rates), 3), round(sum(measured), 3)]
    return judged(predicted, cautious, was) | {"total_predicted_and_measured": total}


# Gavel's pairs.


def gavel(path: Path) -> tuple[dict[Pair, float], dict[str, float]]:
    """Speeds of the first of a pair against alone, where the pair fits, and steps per second alone."""
    pairs: dict[Pair, float] = {}
    alone: dict[str, float] = {}
    for row in _rows(path):
        if (row["table"], row["gpu_type"], row["gpus_a"]) != ("simulation", "v100", "1"):
            continue
        alone[row["job_a"]] = float(row["steps_per_s_a_alone"])
        if row["norm_a"] and float(row["norm_a"]) > 0.0:
            pairs[row["job_a"], row["job_b"]] = min(1.0, float(row["norm_a"]))
    return pairs, alone


def of_gavel(pairs: dict[Pair, float], alone: dict[str, float], mechanism: Mechanism) -> dict[str, Any]:
    own = {one: rate for (one, other), rate in pairs.items() if one == other}
    lined = {job: matched(rate, mechanism) for job, rate in own.items()}
    profiled = dict(from_profiles(alone))
    odd = "Recommendation"
    others = {pair: rate for pair, rate in pairs.items() if pair[0] != pair[1] and set(pair) <= set(lined)}
    plain = {pair: rate for pair, rate in others.items() if not any(job.startswith(odd) for job in pair)}
    same = {pair: rate for pair, rate in pairs.items() if set(pair) <= set(profiled)}
    return {
        "from_half_the_pairs": from_half(pairs, mechanism),
        "from_own_pair": _of(others, lined, mechanism),
        "from_own_pair_without_recommendation": _of(plain, lined, mechanism),
        "as_fast_as_beside_itself": _level({pair: own[pair[0]] for pair in others}, others),
        "from_profiles": _of(same, profiled, mechanism),
        "unknown": _of(pairs, {}, mechanism),
        "mean_of_all": _level(dict.fromkeys(pairs, mean(pairs.values())), pairs),
    }


def _of(pairs: dict[Pair, float], demands: dict[str, Demand], mechanism: Mechanism) -> dict[str, Any]:
    groups = [[demands.get(job) for job in pair] for pair in pairs]
    predicted = [progress_rates(group, mechanism)[0] for group in groups]
    cautious = [progress_rates(group, mechanism, cautious=True)[0] for group in groups]
    return judged(predicted, cautious, list(pairs.values()))


def _level(predicted: dict[Pair, float], was: dict[Pair, float]) -> dict[str, Any]:
    """A guess without a model, for comparison."""
    guesses = list(predicted.values())
    return {key: value for key, value in judged(guesses, guesses, list(was.values())).items() if "cautious" not in key}


def from_half(pairs: dict[Pair, float], mechanism: Mechanism) -> dict[str, Any]:
    """Beside it, on the same halves, a sum of what each job loses and what it costs: as many numbers for each job."""
    sets = sorted({frozenset(pair) for pair in pairs}, key=sorted)
    learnt = set(np.random.default_rng(SEED).permutation(len(sets))[: len(sets) // 2].tolist())
    first = {pair: rate for pair, rate in pairs.items() if sets.index(frozenset(pair)) in learnt}
    second = {pair: rate for pair, rate in pairs.items() if pair not in first}
    jobs = sorted({job for pair in pairs for job in pair})
    was: Array = np.array(list(first.values()))

    def demands(values: Array) -> dict[str, Demand]:
        engine, power = np.clip(values, 0.0, 1.0).reshape(2, -1)
        return {job: replace(on_the_line(float(engine[at])), power=float(power[at])) for at, job in enumerate(jobs)}

    def off(values: Array) -> Array:
        known = demands(values)
        predicted = [progress_rates([known[one], known[two]], mechanism)[0] for one, two in first]
        return np.subtract(predicted, was)

    found = least_squares(off, np.full(2 * len(jobs), 0.6), bounds=(0.0, 1.0), loss="soft_l1", f_scale=0.1, max_nfev=60)
    columns = np.zeros((len(pairs), 2 * len(jobs)))
    for row, (one, two) in enumerate(pairs):
        columns[row, jobs.index(one)] = columns[row, len(jobs) + jobs.index(two)] = 1.0
    taught = np.array([pair in first for pair in pairs])
    weights = np.linalg.lstsq(columns[taught], was, rcond=None)[0]
    summed = dict(zip(second, np.clip(columns[~taught] @ weights, 0.0, 1.0).tolist(), strict=True))
    return _of(second, demands(found.x), mechanism) | {"a_sum_instead": _level(summed, second)}


def on_the_line(engine: float) -> Demand:
    """A task as those of the table are that keep the engine so busy; power and DRAM follow from SM activity."""
    sm = max(0.0, engine - sharing.ENGINE_ABOVE_SM * (1.0 - engine) / 0.5) if engine > 0.5 else 0.5 * engine
    dram = 0.3 * sm
    return Demand(sm, 0.4 * sm, dram, engine, min(1.0, sharing.POWER_OF_SM * sm + sharing.POWER_OF_DRAM * dram))


def matched(rate: float, mechanism: Mechanism) -> Demand:
    """The demand on the line with which two copies run at that rate; the most there is where they are slower still."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        if progress_rates([on_the_line(middle)] * 2, mechanism)[0] > rate:
            low = middle
        else:
            high = middle
    return on_the_line(high)


def from_profiles(alone: dict[str, float]) -> Iterator[tuple[str, Demand]]:
    rows = {row["name"]: row for row in json.loads((FOLDER / "profiles.json").read_text())["rows"]}
    for job, name in SAME.items():
        row = rows[name]
        shown = Shown(**{field: row[field] for field in Shown.__struct_fields__})
        yield job, scale(shown, to=V100, known_ms=1000.0 / alone[job]).demand


# MISO's slices, and Lucid's pairs.


def miso(data: Path) -> dict[str, Any]:
    steps: dict[Pair, dict[str, float]] = {}
    for row in _rows(data / "miso_mig_step_times.csv"):
        steps.setdefault((row["model"], row["batch_size"]), {})[row["mig_slice"]] = float(row["median_step_s"])
    found: dict[str, Any] = {}
    for size, slices in SLICES.items():
        predicted, cautious, was = [], [], []
        for row in _rows(data / "miso_profile_a100_40g.csv"):
            took = steps.get((row["model"], row["batch_size"]), {})
            if set(slices) <= set(took) and "7g.40gb" in took:
                group = [_shown(row)] * size
                predicted.append(progress_rates(group)[0])
                cautious.append(progress_rates(group, cautious=True)[0])
                was.append(min(1.0, mean(took["7g.40gb"] / took[one] for one in slices)))
        found[str(size)] = judged(predicted, cautious, was) | {
            "rank_correlation": round(float(spearmanr(predicted, was)[0]), 3)
        }
    return found


def _shown(row: dict[str, str]) -> Demand:
    """SM utilisation there is the share of time with any kernel. SM activity is not known, and taken to lie below it as
    far as it does for the 25 tasks."""
    engine = float(row["sm_util_pct"]) / 100.0
    power = (float(row["power_w"]) - MISO_IDLE_W) / (MISO_LIMIT_W - MISO_IDLE_W)
    sm = max(0.0, engine - sharing.ENGINE_ABOVE_SM)
    return Demand(sm, 0.4 * sm, float(row["mem_util_pct"]) / 100.0, engine, min(1.0, max(0.0, power)))


def lucid() -> list[dict[str, Any]]:
    """Of the 25 tasks only engine activity says in which part a pair belongs."""
    known = demands_of(load(MPS))
    found = []
    for low, high, published in LUCID:
        pairs = [
            pair for pair in combinations(known.values(), 2) if low <= sum(one.gr_active or 0.0 for one in pair) < high
        ]
        predicted = [mean(progress_rates(pair)) for pair in pairs]
        found.append(
            {
                "from": low,
                "to": high,
                "pairs": len(pairs),
                "predicted": round(mean(predicted), 3),
                "published": published,
            }
        )
    return found


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)
