"""Writes lab/src/carma_lab/simulator/trial_ratios.csv: ratios of the trial run's estimate and bound to the measured
memory, run by run.

    python -m lab.tools.trial_ratios

From lab/results/h200/memory/estimators.json, `judged`: training runs on an H200, each estimated by a model that did not
know its family. The simulator's memory source `trace` draws from it
(lab/src/carma_lab/simulator/estimate_sources.py). One run was refused, for a
broken installation of torchvision, and is left out.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "lab" / "results" / "h200" / "memory" / "estimators.json"
TABLE = ROOT / "lab" / "src" / "carma_lab" / "simulator" / "trial_ratios.csv"
HEAD = """\
# The trial run's estimate and bound, each divided by what the run took: {count} training runs on an H200, families
# unknown to the model. Made by `python -m lab.tools.trial_ratios` from lab/results/h200/memory/estimators.json.
estimate,bound
"""


def text(path: Path = MEASURED) -> str:
    found = [row for row in json.loads(path.read_text())["judged"] if row["estimator"] == "trace" and row["bound_mib"]]
    ratios = sorted(
        (row["bound_mib"] / row["measured_mib"], row["estimated_mib"] / row["measured_mib"]) for row in found
    )
    lines = [f"{estimate:.4f},{bound:.4f}\n" for bound, estimate in ratios]
    return HEAD.format(count=len(lines)) + "".join(lines)


if __name__ == "__main__":
    TABLE.write_text(text())
