"""Simulates what CARMA is compared with, and its published variants, on the shipped traces; puts it on a page.

    python -m tools.baselines              simulates, writes results/simulation/baselines.json and docs/simulation.md
    python -m tools.baselines --page       only the page, from that file
    python -m tools.baselines --check      writes nothing; says whether the page is up to date

Four A100s of 40 GB. Ratios are to exclusive GPUs in the order of arrival. What was published is of other traces
(Philly, Saturn and Venus, 60 tasks each, one run): GitHub ehsanyousefzadehasl/AEGIS, geometric means over the three.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from carma import __version__
from carma.sim.request import Request, simulation
from carma.sim.result import Figures
from carma.traces.shipped import SHIPPED
from tools.markdown import code, table
from tools.pages import filled, renew

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "simulation" / "baselines.json"
PAGE = ROOT / "docs" / "simulation.md"
MARK = "baselines"

Settings = Mapping[str, object]


def gate(sm_active: float, sm_occupancy: float, dram_active: float) -> Settings:
    caps = {"gate.sm_active": sm_active, "gate.sm_occupancy": sm_occupancy, "gate.dram_active": dram_active}
    return {**caps, "gate.combine": "published"}


CARMA, AEGIS, CAREFUL = gate(0.8, 0.45, 0.4), gate(0.65, 0.35, 0.5), gate(0.5, 0.2, 0.4)
# Its caps, its recovery, and nothing that holds a task to its booking.
PUBLISHED = {**CARMA, "recovery.mode": "alone", "sharing.caps": False}


class Variant(NamedTuple):
    name: str
    options: Mapping[str, Any]  # of `carma simulate`
    published: tuple[float, int | None] | None = None  # makespan, OOMs in 180 tasks


def magm(memory: str, settings: Settings, **others: object) -> dict[str, Any]:
    return {"policy": "magm", "memory": memory, "demand": "none", "settings": dict(settings), **others}


VARIANTS = (
    Variant("Horus", {"policy": "horus", "demand": "measured"}, (0.924, 1)),
    Variant("Lucid", {"policy": "lucid", "demand": "measured"}, (0.865, 0)),
    Variant("Horus, demands from earlier runs", {"policy": "horus", "demand": "history"}),
    Variant("Lucid, demands from earlier runs", {"policy": "lucid", "demand": "history"}),
    Variant("MAGM as published, memory measured", magm("measured", PUBLISHED), (0.712, 0)),
    Variant("MAGM as published, none", magm("none", PUBLISHED), (0.730, 12)),
    Variant("MAGM as published, Horus's", magm("horus", PUBLISHED), (0.733, 3)),
    Variant("MAGM as published, GPUMemNet's", magm("gpumemnet", PUBLISHED), (0.737, 1)),
    Variant("MAGM as published, Fake Tensor's", magm("faketensor", PUBLISHED), (0.794, 0)),
    Variant("MAGM as published, trial run's", magm("trace", PUBLISHED)),
    Variant("LUG as published, none", {**magm("none", PUBLISHED), "policy": "lug"}, (0.755, 13)),
    Variant("MAGM as published, none, gate off", magm("none", {**PUBLISHED, "gate.enabled": False}), (0.732, 18)),
    Variant("MAGM as published, none, with the ladder", magm("none", {**PUBLISHED, "recovery.mode": "ladder"})),
    Variant("MAGM, measured, published gate .80/.45/.40", magm("measured", CARMA)),
    Variant("MAGM, measured, published gate .65/.35/.50", magm("measured", AEGIS)),
    Variant("MAGM, measured, published gate .50/.20/.40", magm("measured", CAREFUL)),
    Variant("MAGM, measured, gate off", magm("measured", {"gate.enabled": False})),
    *(Variant(f"MAGM, {memory}", magm(memory, {})) for memory in ("measured", "trace", "none", "horus")),
    *(Variant(f"MAGM, {memory}", magm(memory, {})) for memory in ("gpumemnet", "faketensor")),
    *(Variant(f"MAGM, {memory}, back alone", magm(memory, {"recovery.mode": "alone"})) for memory in ("none", "horus")),
    Variant("MAGM, measured, time slices", magm("measured", {}, mechanism="timeslice")),
)


def worked_out() -> dict[str, Any]:
    alone = {name: _run(name, {"policy": "exclusive", "demand": "none"}) for name in SHIPPED}
    return {
        "about": {
            "command": "python -m tools.baselines",
            "date": datetime.now(UTC).date().isoformat(),
            "carma": __version__,
            "python": platform.python_version(),
            "gpus": "4 x a100-40, simulated",
            "seed": 0,
            "published": "GitHub ehsanyousefzadehasl/AEGIS: Philly, Saturn, Venus; geometric means, OOMs of 180 tasks",
        },
        "exclusive": {name: {"makespan_s": round(found.makespan_s, 1)} for name, found in alone.items()},
        "variants": [_variant(one, alone) for one in VARIANTS],
    }


def _run(trace: str, options: Mapping[str, Any]) -> Figures:
    return simulation(Request(trace=trace, **options)).run()


def _variant(one: Variant, alone: Mapping[str, Figures]) -> dict[str, Any]:
    traces = {name: _ratios(_run(name, one.options), alone[name]) for name in SHIPPED}
    ratios: list[float] = [found["makespan"] for found in traces.values()]
    mean = prod(ratios) ** (1 / len(ratios))
    theirs = None if one.published is None else {"makespan": one.published[0], "ooms": one.published[1]}
    return {"name": one.name, "options": one.options, "traces": traces, "makespan": round(mean, 3), "published": theirs}


def _ratios(found: Figures, alone: Figures) -> dict[str, Any]:
    return {
        "makespan": round(found.makespan_s / alone.makespan_s, 3),
        "slowdown": None if found.slowdown_mean is None else round(found.slowdown_mean, 3),
        "energy": round((found.energy_j or 0.0) / (alone.energy_j or 1.0), 3),
        "ooms": found.ooms,
        "failed": found.failed,
    }


def shown(found: Mapping[str, Any]) -> str:
    titles = ("variant", *(code(name) for name in SHIPPED), "mean", "published")
    return table(titles, [_row(one) for one in found["variants"]])


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    cells = (f"{of['makespan']:.2f}, {of['slowdown']:.2f}, {of['ooms']}" for of in one["traces"].values())
    theirs = one["published"]
    return (
        one["name"],
        *cells,
        f"{one['makespan']:.3f}",
        f"{theirs['makespan']:.3f}, {theirs['ooms']}" if theirs else "",
    )


def pages() -> dict[Path, str]:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {PAGE: filled(PAGE.read_text(encoding="utf-8"), MARK, shown(found))}


if __name__ == "__main__":
    if not sys.argv[1:]:
        RESULTS.write_text(json.dumps(worked_out(), indent=1) + "\n", encoding="utf-8")
    sys.exit(renew("tools.baselines", __doc__, [word for word in sys.argv[1:] if word != "--page"], pages))
