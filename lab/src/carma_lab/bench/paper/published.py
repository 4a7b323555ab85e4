"""What was published of CARMA's policies, policy by policy: all that this study puts beside its own figures.

Source: GitHub ehsanyousefzadehasl/AEGIS, its reports final_representative_evaluation_analysis,
estimator_sensitivity_analysis, or_placement_sensitivity, runtime_pressure_threshold_ablation and
dcgmi_resource_energy_evidence. Three traces of 60 tasks each (Philly, Saturn, Venus), 4 x A100 40 GB, one run of each;
exclusive GPUs = 1, geometric means over the traces, OOMs of all 180 tasks. None: not published.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma_lab.bench.paper.cases import Ratio

NEAR = 0.03  # of the makespan of exclusive GPUs
MANY = 5  # OOMs
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OF_ALL: str = TABLE["of_all"]
SOURCE: str = TABLE["source"]


def why(name: str, mean: Ratio, traces: Mapping[str, Ratio], tasks: int) -> str:
    theirs = PUBLISHED[name]
    told = []
    if abs(mean.makespan - theirs.makespan) > NEAR:
        heavy = traces["heavy"].makespan if "heavy" in traces else mean.makespan
        told.append(TABLE["reasons"].get(name, "not known").format(heavy=heavy))
    expected = None if theirs.ooms is None else theirs.ooms * tasks / TASKS
    if expected is not None and abs(mean.ooms - expected) >= MANY:
        told.append(f"OOMs: {mean.ooms} in {tasks} tasks, {expected:.0f} would be as many as theirs; not known")
    return "; ".join(told)


TASKS = 180
ENERGY = (0.85, 0.88)  # 12 to 15 % less than with exclusive GPUs
RUN = (1.45, 1.79)  # mean run time of the MAGM variants
ARRIVALS = {"t1": 0.59, "t2": 0.63, "mix": 0.37, "heavy": 0.33}  # the bound by arrivals alone, derived from the traces


class Published(Record, frozen=True, kw_only=True):
    makespan: float
    completion: float | None = None
    completion_p95: float | None = None
    wait: float | None = None
    run: float | None = None
    energy: float | None = None
    ooms: int | None = None


PUBLISHED = msgspec.convert(TABLE["published"], dict[str, Published])
