"""Draws the sharing model's predictions for tasks left out over the measured rates: for lab/tools/sharing_fit.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from carma.core.scheduling.sharing_model import CAUTION, Mechanism
from carma_lab.reports.drawing import Picture, figure, save
from lab.tools.sharing_forms import Array, Rates

TITLES: dict[Mechanism, str] = {"mps": "under MPS", "timeslice": "in time slices"}
COLOURS = {2: "#3b75af", 3: "#e08a2e", 4: "#a83e3e"}


def draw(judged: dict[Mechanism, tuple[Array, Rates]], out: Path) -> list[Path]:
    about = (
        "Measured speed of a task over the speed that the sharing model said, fitted without that task, under MPS and "
        "in time slices, for two, three and four tasks on a GPU; below the dashed line lies about one in ten."
    )
    return save([Picture("sharing", about, lambda: _made(judged))], out)


def _made(judged: dict[Mechanism, tuple[Array, Rates]]) -> Any:
    drawn = figure(9.0, 4.4)
    for axes, (mechanism, (said, rates)) in zip(drawn.subplots(1, len(judged)), judged.items(), strict=True):
        for size, colour in COLOURS.items():
            rows = rates.size == size
            axes.scatter(said[rows], rates.was[rows], s=9, c=colour, alpha=0.6, linewidths=0, label=f"{size} tasks",
                         rasterized=True)  # fmt: skip
        line = np.linspace(0.15, 1.0, 60)
        least, slope = CAUTION[mechanism][0]
        axes.plot(line, line, color="#444444", linewidth=1)
        axes.plot(line, line * np.exp(-(least + slope * (1.0 - line))), color="#444444", linewidth=1, linestyle="--",
                  label="cautious")  # fmt: skip
        axes.set(xlim=(0.1, 1.03), ylim=(0.1, 1.03), title=TITLES[mechanism], xlabel="speed said, the task left out")
        axes.set_ylabel("speed measured (1: as fast as alone)")
        axes.legend(loc="upper left")
    return drawn
