"""The traces that come with the package, so that the demo needs no file of the user's."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from carma.errors import BadTrace
from carma.traces.read import parse, read
from carma.traces.schema import Trace

SHIPPED = ("t1",)


def find(name: str) -> Trace:
    """A shipped trace by its name, or the trace in the file of that path."""
    if name in SHIPPED:
        text = files("carma.traces").joinpath(f"{name}.csv").read_text(encoding="utf-8")
        return parse(text.splitlines(), f"{name}.csv")
    path = Path(name)
    if not path.exists() and path.name == name and not path.suffix:
        raise BadTrace(f"{name}: no such trace", f"Shipped traces: {', '.join(SHIPPED)}; or give a file's path.")
    return read(path)
