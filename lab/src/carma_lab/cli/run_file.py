"""The check of an output file that will hold a run."""

from __future__ import annotations

from pathlib import Path

from carma.errors import CarmaError, Usage


def check_run_file(typed: str, force: bool, *, simulated: bool) -> None:
    """An earlier run may be written over, but no real one by a simulated one; anything else is somebody's work."""
    from carma_lab.runs.record import read
    from gpumemnet.output_file import holds_something

    if force or not holds_something(typed):
        return
    try:
        there = read(Path(typed))
    except CarmaError:
        raise Usage(
            f"{typed} is there and holds something else than a run", "Name another file, or add --force."
        ) from None
    if simulated and not there.about.simulated:
        raise Usage(
            f"{typed} is there and holds a real run, which no simulation brings back",
            "Name another file, or add --force.",
        )
