"""`carma bench paper`: hands the study the reports' way of drawing, since neither of the two knows the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carma.bench.paper.pictures import Sketch

PARTS = ("tables", "curves", "limits", "seeds", "philly", "speed")  # as in bench/paper/scope.py, imported late


def run(**flags: Any) -> int:
    from carma.bench.paper import study
    from carma.cli.progress import simulating

    with simulating() as follow:
        return study.run(study.Options(**flags), draw, follow)


def draw(sketches: Sequence[Sketch], out: Path) -> list[Path]:
    """As PNG and SVG, in the reports' style."""
    from carma.report.drawing import Picture, save

    return save([Picture(one.name, one.about, functools.partial(_made, one)) for one in sketches], out)


def _made(sketch: Sketch) -> Any:
    from carma.report.drawing import PALETTE, figure

    empty = figure(sketch.width, sketch.height)
    sketch.draw(empty, PALETTE)
    return empty
