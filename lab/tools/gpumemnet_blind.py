"""Judges models and the plain arithmetic on runs that were measured after both were made.

    git worktree add ../before e53b7dd
    python -m lab.tools.gpumemnet_blind ../before > lab/results/gpumemnet/blind.json

The folds of `carma train --evaluate` hide rows from the nets, not from the authors of the arithmetic. The rows judged
here are new: they are in the present data set and not in that of `before`. The models are those of `before`. The
arithmetic is the present one; its later changes were not tuned on these rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from gpumemnet.dataset.table import read
from gpumemnet.serving.model import runtime
from gpumemnet.serving.model_facts import GB_MIB, read_facts
from gpumemnet.training import PUBLISHED_WIDTHS_GB
from gpumemnet.training.ensemble import PLAIN_MIB, at_level
from gpumemnet.training.samples import Numbers, Samples, Wholes, read_table

DATA, MODELS = Path("gpumemnet/datasets/h200"), Path("gpumemnet/src/gpumemnet/serving/data")


def main() -> None:
    before = Path(sys.argv[1])
    found = {family: judged(family, before) for family in PUBLISHED_WIDTHS_GB}
    print(json.dumps({"command": "python -m lab.tools.gpumemnet_blind BEFORE", "families": found}, indent=1))


def judged(family: str, before: Path) -> dict[str, object]:
    samples = read_table(DATA / f"{family}.parquet")
    known = {config.id for config in read(before / DATA / f"{family}.parquet").configs}
    new = np.array([config.id not in known for config in read(DATA / f"{family}.parquet").configs])
    assert len(new) == len(samples)
    seen = samples.take(np.flatnonzero(~new))
    rows = samples.take(np.flatnonzero(new))
    facts = read_facts(before / MODELS / f"{family}-mlp.json")
    session = runtime().InferenceSession(str(before / MODELS / f"{family}-mlp.onnx"))
    quantiles = session.run(["quantiles"], {"scalars": rows.scalars})[0].astype(np.float64)
    answers = {
        "arithmetic": rows.guess_mib + context_mib(seen),
        "median": quantiles[:, facts.quantiles.index(0.5)],
        "operating point": at_level(quantiles, facts.operating_point),
    }
    classes = {
        f"{width} GB": {name: share(mib, rows, width) for name, mib in answers.items()}
        for width in PUBLISHED_WIDTHS_GB[family]
    }
    return {
        "rows": len(rows),
        "median_error": {name: error(mib, rows) for name, mib in answers.items()},
        "classes": classes,
    }


def context_mib(seen: Samples) -> float:
    off = seen.footprint_mib - seen.guess_mib
    return float(np.median(off[np.abs(off) < PLAIN_MIB]))


def error(mib: Numbers, rows: Samples) -> float:
    return round(float(np.median(np.abs(mib / rows.footprint_mib - 1))), 4)


def share(mib: Numbers, rows: Samples, width_gb: int) -> dict[str, float]:
    mine: Wholes = (mib // (width_gb * GB_MIB)).astype(np.int64)
    true: Wholes = (rows.footprint_mib // (width_gb * GB_MIB)).astype(np.int64)
    return {"right": round(float((mine == true).mean()), 4), "too_low": round(float((mine < true).mean()), 4)}


if __name__ == "__main__":
    main()
