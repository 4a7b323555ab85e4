"""`carma bench paper`: hands the study the reports' way of drawing, since neither of the two knows the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carma.errors import Refused

if TYPE_CHECKING:
    from carma_lab.bench.paper.plots import Sketch

PARTS = (
    "tables",
    "curves",
    "limits",
    "seeds",
    "philly",
    "speed",
)  # as in carma_lab/bench/paper/scope.py, imported late
LIMITED = ("curves", "limits", "philly")  # those that work out limits


def run(**flags: Any) -> int:
    from carma_lab.bench.paper import study
    from carma_lab.cli.progress_line import simulating

    options = study.Options(**flags)
    check_packages(() if options.redraw else study.wanted(options))
    with simulating() as follow:
        return study.run(options, draw, follow)


def check_packages(parts: Sequence[str]) -> None:
    """Before an hour is spent: pictures are drawn at the very end, and limits worked out in between."""
    wanted = ("matplotlib", *(("scipy",) if set(parts) & set(LIMITED) else ()))
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        hint = f"pip install {' '.join(missing)}; the extra `report` has both"
        raise Refused(f"{' and '.join(missing)} {are} not installed, and this study needs {_them(missing)}", hint)


def _them(missing: Sequence[str]) -> str:
    return "them" if len(missing) > 1 else "it"


def draw(sketches: Sequence[Sketch], out: Path) -> list[Path]:
    """As PNG and SVG, in the reports' style."""
    from carma_lab.reports.drawing import Picture, save

    return save([Picture(one.name, one.about, functools.partial(_made, one)) for one in sketches], out)


def _made(sketch: Sketch) -> Any:
    from carma_lab.reports.drawing import PALETTE, figure

    empty = figure(sketch.width, sketch.height)
    sketch.draw(empty, PALETTE)
    return empty
