"""Fits the power curve of the A100 in carma_lab/simulator/simulated_cards.py and prints the errors of that curve and of
the H200's line.

    python -m lab.tools.fit_power

The A100's is least squares over what was published of tasks alone on one (lab/results/a100/solo.csv: SM activity, DRAM
activity and watts of each GPU that a task works on). Limit and idle are given, not fitted; the module gives the reason.
The H200's line comes from core/scheduling/sharing_model.py; here it is held against lab/results/h200/profiles.json.
Needs scipy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from carma_lab.simulator import simulated_cards
from carma_lab.simulator.simulated_cards import Curve
from lab.tools import published
from lab.tools.profile_tables import PROFILES


class Point(NamedTuple):
    name: str
    sm_active: float
    dram_active: float
    power_w: float


def published_points(path: Path = published.SOLO) -> list[Point]:
    return [
        Point(row["name"], float(row["sm_active"]), float(row["dram_active"]), float(row["power_w"]))
        for row in published.rows(path)
        if published.works(row)
    ]


def measured_points(path: Path = PROFILES) -> list[Point]:
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    figures = ("sm_active", "dram_active", "power_w")
    return [Point(row["name"], *(row[name] for name in figures)) for row in found if None not in map(row.get, figures)]


def fit(points: Sequence[Point], start: Curve) -> Curve:
    """Weights and sharpness; idle and limit stay those of `start`."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    def curve(values: Sequence[float]) -> Curve:
        of_sm, of_dram, sharpness = map(float, values)
        return replace(start, of_sm=of_sm, of_dram=of_dram, sharpness=sharpness)

    found = least_squares(lambda values: errors(points, curve(values)), (1.5, 0.5, 1.5), bounds=(1e-6, 10.0))
    return curve(found.x)


def errors(points: Sequence[Point], curve: Curve) -> list[float]:
    """The curve's watts less those that were seen."""
    return [curve.watts(point.sm_active, point.dram_active) - point.power_w for point in points]


def errors_text(points: Sequence[Point], curve: Curve) -> str:
    off = errors(points, curve)
    worst = max(range(len(off)), key=lambda place: abs(off[place]))
    return (
        f"{len(points)} points, mean error {fmean(map(abs, off)):.1f} W, at most {abs(off[worst]):.1f} W "
        f"({points[worst].name})"
    )


def main() -> None:
    points = published_points()
    found = fit(points, simulated_cards.A100_40)
    print(f"A100 40 GB, fitted: of_sm={found.of_sm:.3f}, of_dram={found.of_dram:.3f}, sharpness={found.sharpness:.3f}")
    print(f"  as fitted: {errors_text(points, found)}")
    print(f"  as in lab/src/carma_lab/simulator/simulated_cards.py: {errors_text(points, simulated_cards.A100_40)}")
    h200 = errors_text(measured_points(), simulated_cards.H200)
    print(f"H200, as in lab/src/carma_lab/simulator/simulated_cards.py: {h200}")


if __name__ == "__main__":
    main()
